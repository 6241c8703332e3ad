"""Which runs the board puts together, and which it keeps apart: results files in, numbers and labels out."""

import functools
import shutil

import pytest
import torch
import transformers

from lm_eval_icl.harness.models import model_class
from tests import boards, evaluation
from tests.results import test_leaderboard_read as reading

N = 20


write = functools.partial(boards.write, task="a", n=N, right=0.5, shots=2)


# Files that are refused.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n-shot.a": "4"}, "of task 'a', n-shot is '4': input should be a valid integer"),
        ({"n-shot.a": -4}, "of task 'a', n-shot is -4: input should be greater than or equal to 0"),
        ({"configs.a.num_fewshot": True}, "of task 'a', configs.num_fewshot is True: input should be a valid integer"),
        ({"results.a.acc_stderr,none": -1}, "task 'a', results: acc_stderr is -1, and no standard error is negative"),
        ({"results.a.f1_stderr,none": -0.5}, "results: f1_stderr is -0.5, and no standard error is negative"),
    ],
)
def test_a_file_with_an_impossible_number_is_refused(board, tmp_path, change, reason):
    write(tmp_path / "in", seed=1)
    bad = write(tmp_path / "in", seed=2, put=change)
    (line,) = made = board(tmp_path / "in")
    assert line["sets"] == "1" and line["conditions"] == "2 shots"
    assert bad.name in made.printed and reason in made.printed


def test_a_key_that_is_there_twice_is_refused(board, tmp_path):
    write(tmp_path / "in", seed=1)
    bad = write(tmp_path / "in", seed=2)
    bad.write_text(bad.read_text().replace('"acc,none": ', '"acc,none": 1.0, "acc,none": ', 1))
    samples = boards.samples_of(write(tmp_path / "in", seed=3), "a")
    samples.write_text(samples.read_text().replace('"acc": 0.0', '"acc": 1.0, "acc": 0.0', 1))
    (line,) = made = board(tmp_path / "in")
    assert line["sets"] == "1" and "has the key 'acc' twice in one object" in line["marks"]
    assert "has the key 'acc,none' twice in one object" in made.printed


# Documents.


def test_a_run_without_samples_does_not_join_documents_of_others(board, tmp_path):
    folder = tmp_path / "in"
    write(folder, seed=0, right=[1] * 15 + [0] * 5)
    write(folder, seed=1, first=N, right=[0] * 15 + [1] * 5)
    assert sorted(line["value"] for line in board(folder)) == ["0.25", "0.75"]
    write(folder, seed=2, samples=False, right=[1] * 10 + [0] * 10)
    lines = board(folder)
    assert {(line["value"], line["sets"]) for line in lines if line["interval"] != "reported"} == {
        ("0.75", "1"), ("0.25", "1"),
    }  # fmt: skip
    assert len({line["conditions"] for line in lines}) == 3


def test_a_run_without_samples_joins_the_only_documents(board, tmp_path):
    write(tmp_path / "in", seed=0)
    write(tmp_path / "in", seed=1, samples=False)
    (line,) = board(tmp_path / "in")
    assert "1 of 2 runs without samples are not counted" in line["marks"]


# Models.


DIGEST, OTHER = "0" * 16, "1" * 16


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"config.model_files_digest": DIGEST}, {"config.model_files_digest": OTHER}, f"model_files_digest={OTHER}"),
        ({"config.model_num_parameters": 100}, {"config.model_num_parameters": 200}, "model_num_parameters=200"),
        ({"config.peft_sha": "a"}, {"config.peft_sha": "b"}, "peft_sha=b"),
        ({"config.icl": {"trained": {"steps": 100}}}, {"config.icl": {"trained": {"steps": 30000}}},
         "trained.steps=30000"),
        ({"config.icl": {"study": {"weights": "a"}}}, {"config.icl": {"study": {"weights": "b"}}}, "study.weights=b"),
        ({"eot_token_id": 1}, {"eot_token_id": 0}, "eot_token_id=0"),
    ],
)  # fmt: skip
def test_what_files_say_of_a_model_keeps_rows_apart(board, tmp_path, one, other, said):
    write(tmp_path / "in", seed=0, right=[1] * 10 + [0] * 10, put=one)
    write(tmp_path / "in", seed=1, right=[1] * 5 + [0] * 15, put=other)
    lines = board(tmp_path / "in")
    assert [float(line["value"]) for line in lines] == [0.5, 0.25]
    assert lines[1]["details"] == said


def test_a_file_that_does_not_say_which_model_agrees_with_the_others_unless_they_differ(board, tmp_path):
    write(tmp_path / "in", seed=0)
    write(tmp_path / "in", seed=1, put={"config.model_files_digest": DIGEST, "config.model_num_parameters": 7})
    assert len(board(tmp_path / "in")) == 1
    write(tmp_path / "in", seed=2, put={"config.model_files_digest": OTHER})
    assert {line["details"] for line in board(tmp_path / "in")} == {
        "no model_files_digest", f"model_files_digest={DIGEST}", f"model_files_digest={OTHER}",
    }  # fmt: skip


def test_a_baseline_has_the_same_weights(board, tmp_path):
    for model in ("icl", "invicl"):
        for digest in (DIGEST, OTHER):
            write(tmp_path / "in", model, put={"config.model_files_digest": digest})
    by_name = {line["entry"]: line for line in board(tmp_path / "in")}
    pairs = [(line["details"], by_name[line["baseline"]]["details"]) for line in by_name.values() if line["baseline"]]
    assert len(pairs) == 2 and all(mine == theirs for mine, theirs in pairs)


LOCAL = {"config.model_sha": ""}
HAS_DIGEST, OF_STUDY = {"config.model_files_digest": DIGEST}, {"config.icl": {"study": {"weights": "a"}}}


@pytest.mark.parametrize(
    ("runs", "is_marked"),
    [
        ([{}], False),  # of a model that has no files, or of another program
        ([LOCAL], True),
        ([{"config.model_args": {"pretrained": "./model"}}], True),
        ([{"config.model_sha": "abc"}], False),
        ([LOCAL | HAS_DIGEST, LOCAL | HAS_DIGEST], False),
        ([LOCAL | OF_STUDY], False),
        ([LOCAL | HAS_DIGEST, LOCAL | OF_STUDY], True),  # they say it in different ways
    ],
)
def test_a_local_model_that_nothing_identifies_is_marked(board, tmp_path, runs, is_marked):
    for seed, results in enumerate(runs):
        write(tmp_path / "in", seed=seed, put=results)
    (line,) = board(tmp_path / "in")
    assert ("Nothing says which weights the model had" in line["marks"]) is is_marked


# Tasks.


GENERATE = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 2}}
FILTER = {"name": "none", "filter": [{"function": "take_first"}]}
CLEAN = "def clean(docs):\n    return docs\n"


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (GENERATE, {**GENERATE, "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24}}, "max_gen_toks=24"),
        (GENERATE, {**GENERATE, "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2}}, 'until=["\\n"]'),
        (GENERATE, {**GENERATE, "generation_kwargs": {**GENERATE["generation_kwargs"], "temperature": 0.5}},
         "temperature=0.5"),
        ({"filter_list": [FILTER]}, {"filter_list": [{**FILTER, "filter": []}]},
         "filter "),
        ({"process_results": "def f(doc, results):\n    return {'acc': 0}\n"},
         {"process_results": "def f(doc, results):\n    return {'acc': 1}\n"}, "process_results "),
        ({}, {"process_results": "def f(doc, results):\n    return {'acc': 1}\n"}, "process_results "),
        ({"fewshot_split": "train"}, {"fewshot_split": "validation"}, "fewshot_config.split=validation"),
        ({"dataset_path": "org/one"}, {"dataset_path": "org/two"}, "dataset_path=org/two"),
        ({"dataset_path": "/home/a/one"}, {"dataset_path": "/home/a/two"}, "dataset_path=two"),
        ({"dataset_kwargs": {"revision": "a"}}, {"dataset_kwargs": {"revision": "b"}}, "dataset_kwargs.revision=b"),
        ({"metadata": {"context": 4096}}, {"metadata": {"context": 8192}}, "metadata.context=8192"),
        ({"metric_list": [{"metric": "acc", "ignore_case": True}]}, {"metric_list": [{"metric": "acc"}]},
         "no metric.ignore_case"),
        ({}, {"repeats": 3}, "repeats=3"),
    ],
)  # fmt: skip
def test_other_settings_of_a_task_are_other_rows(board, tmp_path, one, other, said):
    write(tmp_path / "in", seed=0, right=[1] * 10 + [0] * 10, **one)
    write(tmp_path / "in", seed=1, right=[1] * 5 + [0] * 15, **other)
    first, second = board(tmp_path / "in")
    assert (float(first["value"]), float(second["value"])) == (0.5, 0.25)
    assert said in second["conditions"] and first["conditions"] != second["conditions"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # lm-eval writes functions that it does not find the code of with their addresses.
        *([{"fewshot_config": {name: f"<function {name} at 0x7f08{i}>"}} for i in (1, 2)]
          for name in ("doc_to_text", "process_docs")),
        ({"metric_list": [{"metric": "acc", "aggregation": "<function mean at 0x1>"}]},
         {"metric_list": [{"metric": "acc", "aggregation": "<function mean at 0x2>"}]}),
        ({"process_docs": CLEAN}, {"process_docs": CLEAN,
                                   "fewshot_config": {"process_docs": "<function clean at 0x7f3d10>"}}),
        ({"fewshot_split": "train"}, {"fewshot_split": "train", "fewshot_config": {"split": "train", "samples": None}}),
        ({"dataset_path": "/home/a/data/trec"}, {"dataset_path": "/scratch/b/trec"}),
        ({"metadata": {"config_source": "/home/a/trec.yaml", "pretrained": "org/model"}}, {"metadata": {}}),
        ({"unsafe_code": False, "should_decontaminate": False}, {}),
        ({"metric_list": [{"metric": "acc"}]}, {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}),
        ({"repeats": 1}, {"repeats": 1.0}),
        ({"metadata": {"version": 1}}, {"metadata": {"version": 1, "demonstrations_replaced": 1}}),
    ],
)  # fmt: skip
def test_the_same_in_another_form_is_one_row(board, tmp_path, one, other):
    write(tmp_path / "in", seed=0, **one)
    write(tmp_path / "in", seed=1, **other)
    (line,) = board(tmp_path / "in")
    assert line["sets"] == "2"


def test_machines_and_versions_are_marks(board, tmp_path):
    for seed, version in enumerate(("5.22.0", "5.23.0")):
        machine = f"PyTorch version: 2.{seed}.0\nGPU 0: NVIDIA H{seed}00\nModel name: AMD\n"
        changes = {"transformers_version": version, "pretty_env_info": machine, "config.batch_size": seed + 1}
        changes |= {"config.torch_seed": seed, "config.device": f"cuda:{seed}", "config.bootstrap_iters": seed}
        write(tmp_path / "in", seed=seed, put={**changes, "config.icl": {"version": f"0.{seed}", "commit": "a"}})
    (line,) = board(tmp_path / "in")
    for said in ("transformers: 5.22.0, 5.23.0", "torch: 2.0.0, 2.1.0", "the GPU: NVIDIA H000, NVIDIA H100",
                 "lm-eval-icl: 0.0, 0.1"):  # fmt: skip
        assert f"Its runs differ in {said}." in line["marks"]
    assert "CPU" not in line["marks"]


# What is compared with what.


def test_rows_are_of_one_limit_and_are_compared_task_by_task(board, tmp_path):
    """icl on bbh with the limits 6 and 10, and on trec with 20; pcw on both with other limits on other tasks."""
    for model, right in (("icl", [0] * 20), ("pcw", [1] * 20)):
        for seed in range(3):
            write(tmp_path / "in", model, seed, task="bbh", right=right[:6], put={"config.limit": 6})
            write(tmp_path / "in", model, seed, task="trec", right=right, put={"config.limit": 20})
    write(tmp_path / "in", "icl", 0, task="bbh", right=[0] * 10, put={"config.limit": 10})
    lines = {(line["method"], line["conditions"], line["column"]): line for line in board(tmp_path / "in")}
    limits = {"icl": (6, 10, 20), "pcw": (6, 20)}
    assert {key[:2] for key in lines} == {
        (method, f"2 shots, limit={limit}") for method, of_method in limits.items() for limit in of_method
    }
    for task, limit in (("bbh", 6), ("trec", 20)):
        line = lines["pcw", f"2 shots, limit={limit}", task]
        assert (line["difference"], line["documents"]) == ("1.0", str(limit)) and "unpaired" not in line["marks"]


def test_what_one_run_asked_stays_together(board, tmp_path):
    """Templates of several tasks, of which the one that came first on one task was not asked with that of the other."""
    write(tmp_path / "in", seed=0, task="b", right=[1] * N, description="B")
    for description, right in (("A", [0] * N), ("B", [1] * N)):
        write(tmp_path / "in", seed=1, task=("a", "b"), right=right, description=description)
    lines = board(tmp_path / "in")
    assert len({line["entry"] for line in lines}) == len({(line["entry"], line["value"]) for line in lines}) == 2


def test_two_rows_of_the_baseline_that_match_do_not_end_the_comparison(board, tmp_path):
    write(tmp_path / "in", "pcw", right=[1] * 20)
    write(tmp_path / "in", "icl", right=[0] * 20)
    (alone,) = (line for line in board(tmp_path / "in") if line["method"] == "pcw")
    assert (alone["difference"], alone["marks"]) == ("1.0", "")
    write(tmp_path / "in", "icl", right=[1] * 20, put={"config.model_args.positions": "none"})
    (line,) = (line for line in board(tmp_path / "in") if line["method"] == "pcw")
    assert (line["difference"], line["marks"]) == ("1.0", "Compared with icl, 2 shots.")


# Real runs.


def evaluate(model, path, seed=0, task="one_token", output=None, **kwargs):
    """A run as lm-eval's command makes and writes it. Returns what the results say of the model and its setting."""
    config = {**evaluation.TASKS[task], "fewshot_config": {"sampler": "default"}}
    results = reading.evaluate(path, [config], 2, model, bootstrap_iters=0, fewshot_random_seed=seed, **kwargs)
    if output:
        reading.save(results, output)
    return results["config"]


@pytest.fixture
def model(checkpoint, tmp_path):
    """A folder of a checkpoint that a test may change."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def other_weights(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0 + torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder)


def test_other_weights_under_one_name_are_two_rows(board, model, tmp_path):
    evaluate("icl", model, seed=0, output=tmp_path / "in")
    evaluate("icl", model, seed=1, output=tmp_path / "in")
    (line,) = board(tmp_path / "in")
    assert (line["details"], line["sets"], line["marks"]) == ("", "2", "few seeds")
    other_weights(model)
    evaluate("icl", model, seed=2, output=tmp_path / "in")
    lines = board(tmp_path / "in")
    assert sorted(line["sets"] for line in lines) == ["1", "2"]
    assert all(line["details"].startswith("model_files_digest=") for line in lines)


def test_a_model_that_was_made_in_python_has_no_digest_and_a_mark(board, model, tmp_path):
    weights = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    made = model_class("icl")(weights, tokenizer=tokenizer, device="cpu")
    assert "model_files_digest" not in evaluate(made, None, output=tmp_path / "in")
    (line,) = board(tmp_path / "in")
    assert "Nothing says which weights the model had" in line["marks"]


def test_generation_arguments_given_to_a_run_are_two_rows(board, model, tmp_path):
    for seed, length in enumerate((2, 5)):
        evaluate("icl", model, seed, "generate", tmp_path / "in", gen_kwargs={"max_gen_toks": length})
    assert {line["conditions"] for line in board(tmp_path / "in")} == {
        f"2 shots, max_gen_toks={length}" for length in (2, 5)
    }  # fmt: skip
