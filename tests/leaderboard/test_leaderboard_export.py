"""Exports: valid by the schemas of others, the same at every run, and never outside of their folder."""

import argparse
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from lm_eval_icl.cli import export as export_command
from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard.export import export
from lm_eval_icl.results.collect import collect
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import Run
from lm_eval_icl.smoke.demo import model_path
from tests import boards, processes

SCHEMAS = Path(__file__).parents[1] / "schemas"
# A path that every_eval_ever 0.3.0's `validate` takes: validator/validation_core.py, check_path_structure.
EEE_PATH = re.compile(
    r"data(/(?!data/|con[./]|aux[./])[^<>:\"\\|?*/\x00-\x1f]*[^<>:\"\\|?*/\x00-\x1f. ]){3}"
    r"/[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(\.json|_samples\.jsonl)",
    re.IGNORECASE,
)
HOSTILE = [
    "../../../etc/passwd",
    "/etc/cron.d/x",
    "..\\..\\x",
    "..",
    ".",
    "",
    "a/../../b",
    "CON",
    "aux.txt",
    "data",
    "unknown",
    "C:\\x",
    "<script>alert(1)</script>",
    "x" * 5000,
    "\u202eevil\x00\x1b[31m\n",
    "\ud800",
    "trailing. . .",
    "🦙/模型",
    "a: b\n- c",
]


def make_run(
    folder: Path,
    seed: int = 1234,
    *,
    task: str = "icl_sst2",
    model: str = "deepthink",
    dataset: Any = "stanfordnlp/sst2",
) -> Run:
    """A run that was read from files."""
    names = ("acc", "acc_norm")
    of_task = {"test_split": "validation", "metadata": {"demonstrations": "stratified"},
               "metric_list": [{"metric": name, "aggregation": "mean"} for name in names],
               "generation_kwargs": {"temperature": 0.0, "max_gen_toks": 32, "until": ["\n"]}}  # fmt: skip
    icl = {"version": "0.1", "commit": "c" * 40, "method": "deepthink", "T": 5, "eta": 0.01}
    put = {
        f"results.{task}.acc_stderr,none": 0.25, f"results.{task}.acc_norm,none": 0.5,
        f"results.{task}.acc_norm_stderr,none": "N/A", f"higher_is_better.{task}": dict.fromkeys(names, True),
        f"n-samples.{task}.original": 872, "config.model_num_parameters": 990720, "config.bootstrap_iters": 100000,
        "config.model_args": {"pretrained": "example/model-1B", "T": 5, "eta": 0.01}, "config.icl": icl,
        "lm_eval_version": "0.4.13", "transformers_version": "5.23.0", "git_hash": "55329b1", "date": 1795387962.09,
    }  # fmt: skip
    of_task |= {"dataset_path": dataset} if dataset else {}
    answers = {"gold": [0, 1, 0, 1], "says": [0, 0, 0, 1]}
    path = boards.write(folder, model, seed, task=task, n=4, evil="Très bien\n\n", put=put, **answers, **of_task)
    samples = [{**sample, "doc_hash": f"hash {sample['doc_id']}"} for sample in samples_of(path, task)]
    boards.write_samples(path, task, samples[::-1])
    ((run,), left_out) = read([path], quiet=True)
    assert not left_out and run.tasks[task].answers is not None
    return run


def samples_of(results: Path, task: str = "icl_sst2") -> list[dict]:
    return [json.loads(line) for line in boards.samples_of(results, task).open(encoding="utf-8")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "in")


def change_result(run: Run, **changes: object) -> Run:
    ((task, result),) = run.tasks.items()
    return replace(run, tasks={task: replace(result, **changes)})


def validator(name: str) -> jsonschema.Draft7Validator:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    assert schema["version"] == "0.3.0"
    return jsonschema.Draft7Validator(schema)


def strict(text: str) -> object:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    return found


def check_logs(folder: Path) -> list[tuple[dict, list[dict]]]:
    """Every log with its samples: valid by the schemas and by the rules of `every_eval_ever validate`."""
    of_log, of_sample = validator("eval"), validator("instance_level_eval")
    found = []
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert all(EEE_PATH.fullmatch(path) for path in files), files
    for path in sorted(path for path in files if path.endswith(".json")):
        log = strict((folder / path).read_text(encoding="utf-8"))
        of_log.validate(log)
        owner, name = log["model_info"]["id"].split("/")
        assert path.split("/")[2:4] == [owner, name]
        rows = []
        if pointer := log.get("detailed_evaluation_results"):
            assert pointer["file_path"] == path.removesuffix(".json") + "_samples.jsonl"
            content = (folder / pointer["file_path"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == pointer["checksum"]
            rows = [strict(line) for line in content.decode().splitlines()]
            assert len(rows) == pointer["total_rows"]
            for row in rows:
                of_sample.validate(row)
                assert (row["evaluation_id"], row["model_id"]) == (log["evaluation_id"], log["model_info"]["id"])
            files.remove(pointer["file_path"])
        files.remove(path)
        found.append((log, rows))
    assert not files, "samples that no log points to"
    return found


# ---------------------------------------------------------------------------------------------------------------
# Every Eval Ever.


def test_a_log_says_what_the_run_was(run, tmp_path):
    exported = export([run], tmp_path / "out", organization="Example Lab", relationship="first_party")
    assert not exported.left_out
    ((log, rows),) = check_logs(tmp_path / "out")
    assert log["evaluation_id"] == f"icl_sst2/example/model-1B/{run.digest}"
    assert log["evaluation_timestamp"] == "1795387962"
    assert log["source_metadata"]["source_organization_name"] == "Example Lab"
    assert log["source_metadata"]["evaluator_relationship"] == "first_party"
    assert log["eval_library"]["version"] == "0.4.13"
    assert log["model_info"]["name"] == "model-1B (deepthink T=5, eta=0.01)"
    assert log["model_info"]["inference_engine"] == {"name": "transformers", "version": "5.23.0"}
    accuracy, normalized = log["evaluation_results"]
    assert accuracy["score_details"]["score"] == 0.75
    assert accuracy["score_details"]["uncertainty"] == {
        "num_samples": 4,
        "standard_error": {"value": 0.25, "method": "analytic"},
    }
    assert (accuracy["metric_config"]["metric_id"], accuracy["metric_config"]["max_score"]) == ("accuracy", 1)
    assert accuracy["source_data"]["hf_repo"] == "stanfordnlp/sst2"
    assert accuracy["generation_config"]["generation_args"] == {"temperature": 0.0, "max_tokens": 32}
    details = accuracy["generation_config"]["additional_details"]
    assert (details["method"], details["num_fewshot"], details["fewshot_seed"]) == ("deepthink", "4", "1234")
    assert json.loads(details["method_arguments"]) == {"T": 5, "eta": 0.01}
    assert details["prompts_digest"] == run.tasks["icl_sst2"].answers.prompts
    assert normalized["evaluation_result_id"] == "acc_norm" and normalized["score_details"]["score"] == 0.5
    assert "standard_error" not in normalized["score_details"]["uncertainty"]

    assert [row["evaluation"]["score"] for row in rows] == [1, 0, 1, 1]
    assert [row["sample_id"] for row in rows] == ["0", "1", "2", "3"]
    second = rows[1]
    assert re.fullmatch("Très bien\n\n.*Text: document 1\nLabel:", second["input"]["raw"], re.DOTALL)
    assert second["input"]["choices"] == ["good", "bad"] and second["input"]["reference"] == ["1"]
    assert second["output"]["raw"] == ["good"] and second["evaluation"]["is_correct"] is False
    assert second["metadata"] == {"doc_hash": "hash 1", "predicted_option": "0"}


def test_demonstrations_that_were_left_out_were_not_used(run, tmp_path):
    """Of four demonstrations, two of each of two documents, and so one of each of four."""
    left_out = {"icl_sst2": {"documents": 2, "demonstrations": 4}}
    export([replace(run, icl={**run.icl, "left_out": left_out})], tmp_path / "out")
    ((log, _),) = check_logs(tmp_path / "out")
    details = log["evaluation_results"][0]["generation_config"]["additional_details"]
    assert (details["num_fewshot"], float(details["num_fewshot_used"])) == ("4", 3)


def test_seeds_and_methods_have_their_own_logs_and_copies_do_not(tmp_path):
    runs = [make_run(tmp_path / "in", seed, model=method) for method in ("icl", "deepthink") for seed in range(3)]
    copy = replace(runs[0], path=tmp_path / "elsewhere" / "results_x.json")
    exported = export([*runs, copy], tmp_path / "out")
    logs = [log for log, _ in check_logs(tmp_path / "out")]
    assert len(logs) == 6 == len({log["evaluation_id"] for log in logs}) and len(exported.files) == 12
    assert {log["source_metadata"]["source_organization_name"] for log in logs} == {"unknown"}


def test_run_again_it_writes_the_same_and_touches_nothing(tmp_path):
    runs = [make_run(tmp_path / "in", seed) for seed in range(2)]
    folder = tmp_path / "out"
    first = export(runs, folder)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in first.files}
    other = folder / "README.md"
    other.write_text("mine")
    assert set(export(runs[::-1], folder).files) == set(before) and other.read_text() == "mine"
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before}
    assert set(before) | {other} == {path for path in folder.rglob("*") if path.is_file()}


def test_without_samples_there_is_the_log_alone(run, tmp_path):
    export([run], tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("*.jsonl"))) == 1
    boards.samples_of(run.path, "icl_sst2").unlink()
    exported = export([run], tmp_path / "out")
    ((log, rows),) = check_logs(tmp_path / "out")  # the samples that were there before are gone
    assert not rows and log["evaluation_results"][0]["score_details"]["score"] == 0.75
    (left_out,) = exported.left_out
    assert left_out.why.startswith("1 of 1 tasks have no documents in the export")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda first, *others: others, "has 3 of the 4 documents"),
        (lambda first, *others: [first, *others, first], ".jsonl twice"),
        (lambda *samples: [{"doc_id": 1}], "KeyError: 'acc'"),
        (lambda first, *others: [{**first, "doc_id": 99}], "KeyError: 99"),
        (lambda first, *others: [{**first, "arguments": "x"}], "AttributeError"),
        (lambda first, *others: [{**first, "arguments": {}}], "IndexError"),
        (lambda first, *others: [*others, {**first, "acc": 1 - first["acc"]}], "is not that of the results"),
        (lambda *samples: ["text"], "is no sample of lm-eval"),
    ],
)
def test_samples_that_do_not_fit_are_left_out_and_named(run, tmp_path, broken, why):
    boards.write_samples(run.path, "icl_sst2", broken(*samples_of(run.path)))
    (left_out,) = export([run], tmp_path / "out").left_out
    assert left_out.why.startswith("icl_sst2: its samples cannot be used: ") and why in left_out.why
    ((_, rows),) = check_logs(tmp_path / "out")
    assert not rows


def test_pairs_of_gold_and_predicted_answers(run, tmp_path):
    pairs = [[0, 0], [1, 0], [0, 0], [1, 1]]
    samples = [{**sample, "f1": pairs[sample["doc_id"]]} for sample in samples_of(run.path)]
    boards.write_samples(run.path, "icl_sst2", samples)
    answers = replace(run.tasks["icl_sst2"].answers, items=np.array(pairs, dtype=float))
    run = change_result(run, metric="f1", aggregation="f1", value=0.66, answers=answers)
    export([run], tmp_path / "out")
    ((log, rows),) = check_logs(tmp_path / "out")
    assert [row["evaluation"]["is_correct"] for row in rows] == [True, False, True, True]
    uncertainty = log["evaluation_results"][0]["score_details"]["uncertainty"]
    assert uncertainty["standard_error"]["method"] == "bootstrap" and uncertainty["num_bootstrap_samples"] == 100000


def test_generated_texts(tmp_path):
    texts = [
        {
            "doc_id": i,
            "target": "42",
            "arguments": {"gen_args_0": {"arg_0": f"Question {i}", "arg_1": {"until": ["\n"]}}},
            "resps": [[f"The answer is {n}."]],
            "filtered_resps": [str(n)],
            "filter": filter_,
            "exact_match": float(n == 42),
        }
        for i, n in enumerate((42, 43, 42, 42))
        for filter_ in ("flexible-extract", "strict-match")
    ]
    run = make_run(tmp_path / "in", task="gsm")
    boards.write_samples(run.path, "gsm", texts)
    answers = replace(run.tasks["gsm"].answers, predictions=None, chance=None)
    run = change_result(run, metric="exact_match", filter="strict-match", answers=answers)
    assert not export([run], tmp_path / "out").left_out
    ((log, rows),) = check_logs(tmp_path / "out")
    assert log["evaluation_results"][0]["evaluation_name"] == "gsm/strict-match" == rows[0]["evaluation_name"]
    assert rows[1]["evaluation_result_id"] == "exact_match:strict-match"
    assert rows[1]["output"]["raw"] == ["The answer is 43."] and rows[1]["input"]["choices"] is None
    assert rows[1]["answer_attribution"][0]["extracted_value"] == "43"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 75.0])
def test_numbers_that_an_accuracy_cannot_be_are_left_out(run, tmp_path, value):
    exported = export([change_result(run, value=value)], tmp_path / "none")
    assert not exported.files and f"acc is {value}" in exported.left_out[0].why
    # Another metric of the same task is only not there.
    run.results["results"]["icl_sst2"]["acc_norm,none"] = value
    export([run], tmp_path / "out")
    ((log, _),) = check_logs(tmp_path / "out")
    assert [each["evaluation_result_id"] for each in log["evaluation_results"]] == ["acc"]


def test_a_perplexity_has_no_upper_bound_and_no_right_answers(run, tmp_path):
    marks = ("The samples give 3.", "They are of 7 documents.")
    run = change_result(run, metric="word_perplexity", value=1e6, higher_is_better=False, stderr=None, marks=marks)
    export([run], tmp_path / "out")
    ((log, rows),) = check_logs(tmp_path / "out")
    config = log["evaluation_results"][0]["metric_config"]
    assert (config["lower_is_better"], config["max_score"]) == (True, "Infinity") and not rows
    assert log["evaluation_results"][0]["score_details"]["details"]["marks"] == " ".join(marks)


def test_a_run_of_lm_eval_and_its_collected_copy(tmp_path):
    line = f"run --model icl --model_args pretrained={model_path()} --tasks icl_demo_short,icl_demo_four"
    options = f"--num_fewshot 2 --limit 6 --device cpu --log_samples --output_path {tmp_path / 'in'}"
    processes.command(*line.split(), *options.split(), program="lm_eval").check_returncode()
    runs, left_out = read([tmp_path / "in"], quiet=True)
    assert len(runs) == 1 and not left_out
    assert not export(runs, tmp_path / "out").left_out
    found = {log["evaluation_results"][0]["evaluation_name"]: (log, rows) for log, rows in check_logs(tmp_path / "out")}
    assert set(found) == {"icl_demo_short", "icl_demo_four"}
    for task, (log, rows) in found.items():
        (file,) = (tmp_path / "in").rglob(f"samples_{task}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        assert [row["input"]["raw"] for row in rows] == [each["arguments"]["gen_args_0"]["arg_0"] for each in samples]
        assert [row["evaluation"]["score"] for row in rows] == [each["acc"] for each in samples]
        scores = {each["evaluation_result_id"]: each["score_details"]["score"] for each in log["evaluation_results"]}
        assert scores == {name: runs[0].results["results"][task][f"{name},none"] for name in ("acc", "acc_norm")}
        assert scores["acc"] == np.mean([row["evaluation"]["is_correct"] for row in rows])

    collected, _ = read([path.parent for path in collect(runs, tmp_path / "board")], quiet=True)
    assert export(collected, tmp_path / "again").left_out
    for log, rows in check_logs(tmp_path / "again"):
        original, _ = found[log["evaluation_results"][0]["evaluation_name"]]
        assert not rows and log == {name: each for name, each in original.items() if not name.startswith("detailed")}


@pytest.mark.parametrize("dataset", [None, "json", "/data/sst2", "../sst2", "a/b/c", "<b>/x", ["a/b"], "a/.."])
def test_documents_of_no_hub_dataset_have_another_source(tmp_path, dataset):
    export([make_run(tmp_path / "in", dataset=dataset)], tmp_path / "out")
    ((log, _),) = check_logs(tmp_path / "out")
    assert log["evaluation_results"][0]["source_data"]["source_type"] == "other"


# ---------------------------------------------------------------------------------------------------------------
# Files come from strangers.


def test_hostile_names_stay_in_the_folder(run, tmp_path):
    runs, (result,), (config,) = [], run.tasks.values(), run.results["configs"].values()
    for i, name in enumerate(HOSTILE):
        of_task = {"tasks": {name: replace(result, task=name)}, "results": {**run.results, "configs": {name: config}}}
        runs += [
            replace(run, digest=f"p{i}", pretrained=name),
            replace(run, digest=f"o{i}", pretrained=f"{name}/{name}"),
            replace(run, digest=f"m{i}", model=name, arguments={name: name}),
            replace(run, digest=f"t{i}", **of_task),
        ]
    before = sorted((tmp_path / "in").iterdir())
    out = tmp_path / "deep" / "out"
    files = export(runs, out, organization="\x00../..", developer="../..").files
    assert sorted(tmp_path.iterdir()) == [tmp_path / "deep", tmp_path / "in"] and list(out.parent.iterdir()) == [out]
    assert sorted((tmp_path / "in").iterdir()) == before
    assert {path for path in out.rglob("*") if path.is_file()} == set(files)
    for path in files:
        parts = path.relative_to(out).parts
        assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,160}", part) for part in parts), parts
        assert all(re.fullmatch(r"[^.].*[^.]|[^.]", part) for part in parts), parts
    assert len({log["evaluation_id"] for log, _ in check_logs(out)}) == len(runs)


def test_links_out_of_the_folder_are_not_followed(run, tmp_path):
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (out / "data").symlink_to(outside)
    with pytest.raises(InputError, match="leads out of the folder"):
        export([run], out)
    assert not list(outside.iterdir())


def test_odd_results_do_not_stop_the_export(run, tmp_path):
    """Parts of the results that reading does not look at may be anything."""
    values = [None, 3, "x", [], {}, [None, 1], {"icl_sst2": 1}, {"icl_sst2": {"acc": "yes", "x": [1]}}]
    values += [{"temperature": value, "max_gen_toks": value, "top_p": value} for value in (10**400, True, -1.5)]
    values += [{"icl_sst2": {"original": value, "acc_norm,none": value}} for value in (10**400, True, -1)]
    config = run.results["configs"]["icl_sst2"]
    for i, odd in enumerate(values):
        runs = [replace(run, digest=f"{i}-{key}", results={**run.results, key: odd}) for key in run.results]
        for key in (*config, "dataset_name"):
            changed = {**run.results, "configs": {"icl_sst2": {**config, key: odd}}}
            runs.append(replace(run, digest=f"{i}-config-{key}", results=changed))
        export(runs, tmp_path / "eee")
    assert len(check_logs(tmp_path / "eee")) == len(values) * (len(run.results) + len(config) + 1)


def test_wrong_arguments(run, tmp_path):
    with pytest.raises(InputError, match="--relationship friend: must be one of"):
        export([run], tmp_path / "out", relationship="friend")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        export([run], tmp_path / "file")
    with pytest.raises(InputError, match="--format hub: must be eee"):
        export_command.command(argparse.ArgumentParser(), ["x", "--format", "hub", "--output", str(tmp_path / "out")])
