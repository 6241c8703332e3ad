"""Results files: what lm-eval writes is read as it is, and whatever else is in a file never stops the others."""

import copy
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.results import read as reading
from lm_eval_icl.results.collect import collect, faults, load, name_of
from lm_eval_icl.results.records import Run, TaskResult
from lm_eval_icl.smoke.demo import model_path
from tests import boards, evaluation

NESTED = {
    "outer": "[icl_demo_short, inner]\naggregate_metric_list: [{metric: acc, weight_by_size: false}]",
    "inner": "[icl_demo_four, icl_demo_long]\naggregate_metric_list: [{metric: acc}]",
    "named": "[outer]",  # without a value
}
ASKED = {
    "icl_demo_short": [0, 2, 5, 7],
    "icl_demo_four": [1, 2, 3],
    "icl_demo_long": [0, 1, 2, 3, 4, 9],
}
GENERATE = evaluation.task(
    "generate",
    output_type="generate_until",
    doc_to_target="{{other}}",
    filter_list=[
        {
            "name": "first",
            "filter": [
                {"function": "regex", "regex_pattern": r"(\w+)"},
                {"function": "take_first"},
            ],
        },
        {"name": "whole", "filter": [{"function": "take_first"}]},
    ],
    metric_list=[{"metric": "exact_match"}],
    generation_kwargs={"until": ["\n"], "max_gen_toks": 4},
)
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": ["no", "yes"]}
METRICS = {
    "f1": evaluation.task("f1", **CHOICE, metric_list=[{"metric": "f1"}, {"metric": "mcc"}]),
    "mcc": evaluation.task("mcc", **CHOICE, metric_list=[{"metric": "mcc"}]),
    "brier": evaluation.task("brier", **CHOICE, metric_list=[{"metric": "brier_score"}]),
    "mutual": evaluation.TASKS["mutual"],
    "described": evaluation.TASKS["described"],
    "surprise": evaluation.task(
        "surprise",
        output_type="loglikelihood",
        doc_to_target="so",
        metric_list=[{"metric": "perplexity"}],
    ),
    "own": evaluation.task(
        "own", **CHOICE, metric_list=[{"metric": "acc", "aggregation": lambda items: 0.25}]
    ),
    "generate": GENERATE,
}


def save(results: dict, folder: Path, system: str | None = None) -> Path:
    """Write results as lm-eval's command does with --output_path and --log_samples."""
    tracker = EvaluationTracker(output_path=str(folder))
    config = results["config"]
    tracker.general_config_tracker.log_experiment_args(
        config["model"], config["model_args"], system, None, False
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, of_task in samples.items():
        tracker.save_results_samples(task_name=task, samples=of_task)
    (file,) = folder.rglob(f"results_{tracker.date_id}.json")
    return file


def evaluate(
    path: Path | None, tasks: Iterable[dict | str], shots: int, model: object = "icl", **kwargs: Any
) -> dict:
    """What lm-eval makes of tasks; `path` is None for a model that was made in Python."""
    return lm_eval.simple_evaluate(
        model=model,
        model_args=None if path is None else {"pretrained": str(path), **kwargs.pop("args", {})},
        tasks=copy.deepcopy(list(tasks)),
        num_fewshot=shots,
        device="cpu",
        **{
            "task_manager": evaluation.manager(False),
            "batch_size": 8,
            "bootstrap_iters": 10,
            **kwargs,
        },
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Results files of lm-eval itself: by name, all in lm-eval's folder of the checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in NESTED.items():
        (folder / f"{name}.yaml").write_text(f"group: {name}\ntask: {text}\n")
    out = folder / "out"
    files = {}
    orders = {"order": [0, 1, 2], "reverse": [2, 1, 0], "other": [3, 1, 2]}
    for name, model in {**dict.fromkeys(orders, "icl"), "again": "hf", "nested": "hf"}.items():
        chosen = folder / f"{name}.json"
        chosen.write_text(json.dumps(orders.get(name, [0, 1, 2])))
        paths = [str(folder), str(task_dir() / "demo")]
        results = evaluate(
            model_path(),
            ["named"] if name == "nested" else ["icl_demo_short"],
            3,
            model,
            samples=ASKED if name == "nested" else None,
            limit=None if name == "nested" else 6,
            fewshot_random_seed=7,
            task_manager=TaskManager(
                None, paths, include_defaults=False, metadata={"demonstrations": str(chosen)}
            ),
        )
        files[name] = save(results, out)
    files["metrics"] = save(evaluate(model_path(), METRICS.values(), 2), out)
    return files


def one(path: Path) -> Run:
    (run,), left_out = reading.read([path], quiet=True)
    assert not left_out
    return run


def assert_same(run: Run, other: Run) -> None:
    """Everything is equal but where it was read."""
    for name in set(vars(run)) - {"path", "tasks"}:
        assert repr(getattr(run, name)) == repr(getattr(other, name)), name
    assert list(run.tasks) == list(other.tasks)
    for task, result in run.tasks.items():
        for name in set(vars(result)) - {"answers"}:
            assert repr(getattr(result, name)) == repr(getattr(other.tasks[task], name)), name
        mine = result.answers
        theirs = other.tasks[task].answers
        assert (mine is None) == (theirs is None)
        for name in vars(mine) if mine else ():
            one = getattr(mine, name)
            two = getattr(theirs, name)
            if name == "predicted" and theirs.predictions is None:
                continue  # `collect` leaves predicted texts out
            if isinstance(one, np.ndarray):
                assert one.dtype == two.dtype
                assert one.shape == two.shape
            np.testing.assert_array_equal(one, two, name)


def test_a_run_as_lm_eval_wrote_it(made):
    run = one(made["order"])
    assert run.model == "icl"
    assert run.pretrained == str(model_path())
    assert run.dtype == "float32"
    assert run.revision == ""
    assert run.seed == 7
    assert run.order == 0
    assert run.limit == 6.0
    assert dict(run.arguments) == {}
    assert run.icl["method"] == "icl"
    assert run.date == run.results["date"] > 1.7e9
    assert run.results == json.loads(made["order"].read_text())
    result = run.tasks["icl_demo_short"]
    assert result.metric == "acc"
    assert result.filter == "none"
    assert result.aggregation == "mean"
    assert result.higher_is_better is True
    assert result.shots == 3
    assert result.documents == 6
    assert result.fields.column["version"] == "1"
    assert result.marks == ()
    assert len(result.fields.switches["demonstrations"]) == 32, (
        "a long path is compared by its digest"
    )
    assert result.stderr == run.results["results"]["icl_demo_short"]["acc_stderr,none"]
    samples = [
        json.loads(line) for line in boards.samples_of(made["order"], "icl_demo_short").open()
    ]
    assert result.answers.items.tolist() == [sample["acc"] for sample in samples]
    assert result.answers.items.mean() == result.value
    right = result.answers.predictions == [int(sample["target"]) for sample in samples]
    assert right.tolist() == (result.answers.items == 1).tolist()


def test_each_run_has_its_own_samples(made):
    """lm-eval writes all runs of a checkpoint, of every method and seed, into one folder."""
    assert len({file.parent for file in made.values()}) == 1
    runs, left_out = reading.read([made["order"].parent], quiet=True)
    assert not left_out
    assert {run.path for run in runs} == set(made.values())
    for run in runs:
        assert_same(run, one(run.path))


def test_what_was_asked(made):
    """One set in two orders, another set, and another model with the prompts of the first."""
    results = [
        one(made[name]).tasks["icl_demo_short"] for name in ("order", "reverse", "other", "again")
    ]
    order, reverse, other, again = (result.answers for result in results)
    assert order.documents == reverse.documents == other.documents == again.documents
    assert order.prompts == again.prompts
    assert len({order.prompts, reverse.prompts, other.prompts}) == 3
    assert (
        order.demonstrations
        == reverse.demonstrations
        == again.demonstrations
        != other.demonstrations
    )
    assert len({result.fields.column["template"] for result in results}) == 1


def test_demonstrations_of_other_prompts(chat_checkpoint):
    """A description is no part of them, a chat template is; without demonstrations there are none."""

    def result_of(reverse: bool, shots: int, path: Path, **kwargs: object) -> TaskResult:
        samples = evaluation.documents(2, 80)
        config = evaluation.task(
            "a_task",
            **CHOICE,
            description="Tell.\n\nNow: ",
            fewshot_split=None,
            training_split=None,
            fewshot_config={"sampler": "first_n", "samples": samples[::-1] if reverse else samples},
        )
        results = evaluate(path, [config], shots, limit=2, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            return one(save(results, Path(folder), kwargs.get("system_instruction"))).tasks[
                "a_task"
            ]

    plain = [result_of(reverse, 2, model_path()) for reverse in (False, True)]
    assert plain[0].answers.prompts != plain[1].answers.prompts
    assert plain[0].answers.demonstrations == plain[1].answers.demonstrations
    assert result_of(False, 0, model_path()).answers.demonstrations is None
    system = result_of(True, 2, model_path(), system_instruction="Be brief.")
    assert system.answers.demonstrations == plain[0].answers.demonstrations
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    chats = [
        result_of(reverse, 2, chat_checkpoint("llama3"), **chat).answers
        for reverse in (False, True)
    ]
    assert chats[0].prompts != chats[1].prompts
    assert None not in (
        chats[0].demonstrations,
        chats[1].demonstrations,
    )


def test_metrics(made):
    run = one(made["metrics"])
    of = run.tasks
    assert {name: (result.metric, result.aggregation) for name, result in of.items()} == {
        "f1": ("f1", "f1"),
        "mcc": ("mcc", "matthews_corrcoef"),
        "brier": ("brier_score", ""),
        "mutual": ("acc_mutual_info", "mean"),
        "described": ("acc", "mean"),
        "surprise": ("perplexity", "perplexity"),
        "own": ("acc", ""),
        "generate": ("exact_match", "mean"),
    }
    assert of["f1"].answers.items.shape == of["mcc"].answers.items.shape == (6, 2)
    assert of["f1"].answers.items[:, 1].tolist() == of["f1"].answers.predictions.tolist()
    assert math.isclose(math.exp(-of["surprise"].answers.items.mean()), of["surprise"].value)
    assert not of["surprise"].higher_is_better
    assert of["mutual"].answers.predictions is None  # lm-eval asks for each option twice
    assert of["generate"].filter == "first"
    assert of["generate"].answers.predictions is None
    reported = ("brier", "own")
    assert of["own"].value == 0.25
    assert all("shown as reported" in of[name].marks[0] for name in reported)
    assert {name for name, result in of.items() if result.marks or result.answers is None} == {
        *reported
    }


def test_groups(made):
    """The tasks of groups in groups, with the weights that give lm-eval's value."""
    run = one(made["nested"])
    assert set(run.tasks) == set(ASKED)
    assert set(run.groups) == {"outer", "inner"}
    assert run.groups["outer"] == pytest.approx(dict.fromkeys(ASKED, 1 / 3))
    assert run.groups["inner"] == pytest.approx({"icl_demo_four": 3 / 9, "icl_demo_long": 6 / 9})
    for name, weights in run.groups.items():
        mean = sum(weight * run.tasks[task].value for task, weight in weights.items())
        assert mean == pytest.approx(run.results["groups"][name]["acc,none"])
    assert {task: len(result.answers.items) for task, result in run.tasks.items()} == {
        t: len(a) for t, a in ASKED.items()
    }


def results_of(scores: dict[str, list[float]]) -> dict:
    """The results of a group of tasks as lm-eval would write them, by documents."""
    tasks = {
        name: {
            "acc,none": sum(of) / len(of),
            "acc_stderr,none": 0.01 * (1 + len(of)),
            "sample_len": len(of),
        }
        for name, of in scores.items()
    }
    n = sum(map(len, scores.values()))
    group = {"acc,none": sum(map(sum, scores.values())) / n, "acc_stderr,none": "N/A"}
    return {
        "results": {**tasks, "all": group},
        "groups": {"all": group},
        "group_subtasks": {"all": list(scores)},
        "configs": {name: {"output_type": "multiple_choice", "num_fewshot": 0} for name in scores},
        "config": {
            "model": "hf",
            "model_args": "pretrained=a/b,revision=x,dtype=float16,parallelize=True,k=2",
        },
    }


def samples_of(scores: list[float]) -> str:
    samples = [
        {
            "doc_id": number,
            "doc": {"text": f"SECRET {number}"},
            "target": "0",
            "arguments": {
                f"gen_args_{i}": {"arg_0": "SECRET", "arg_1": x}
                for i, x in enumerate((" no", " yes"))
            },
            **{"filter": "none", "metrics": ["acc"], "doc_hash": str(number)},
            **dict.fromkeys(("prompt_hash", "target_hash"), "SHA"),
            "filtered_resps": [[-1.0, False], [-1.0 - (score == 1), False]],
            "acc": score,
        }
        for number, score in enumerate(scores)
    ]
    return "".join(json.dumps(sample) + "\n" for sample in samples)


def write(
    folder: Path,
    results: object,
    samples: dict[str, str] | None = None,
    time: str = "2026-01-01T00-00-00",
) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / f"results_{time}.json"
    file.write_text(results if isinstance(results, str) else json.dumps(results))
    for task, text in (samples or {}).items():
        (folder / f"samples_{task}_{time}.jsonl").write_text(text)
    return file


def test_weights_that_two_ways_give(tmp_path):
    """All tasks have the same accuracy: they count by documents."""
    results = results_of({"a": [0.0, 1.0], "b": [0.0, 1.0] * 3})
    assert one(write(tmp_path, results)).groups["all"] == {"a": 0.25, "b": 0.75}
    results["groups"]["all"]["acc,none"] = 0.9
    (run,), (left,) = reading.read([write(tmp_path, results)], quiet=True)
    assert not run.groups
    assert len(run.tasks) == 2
    assert left.why.startswith(
        "group 'all' is left out: its acc,none is not the mean of its tasks', weighted by doc"
    )


def test_arguments_as_text(tmp_path):
    """As Python's `simple_evaluate` records them; ties of options go to the first."""
    scores = [1.0, 0.0, 1.0]
    run = one(write(tmp_path, results_of({"a": scores}), {"a": samples_of(scores)}))
    assert run.pretrained == "a/b"
    assert run.revision == "x"
    assert run.dtype == "float16"
    assert run.arguments == {"parallelize": True, "k": 2}
    answers = run.tasks["a"].answers
    assert answers.items.tolist() == scores
    assert answers.predictions.tolist() == [0, 0, 0]
    assert run.tasks["a"].documents == 3
    assert run.date == 0.0
    assert run.seed is None


def test_a_run_counts_once(tmp_path):
    """The copy with more samples is used, whichever is read first, and copies of copies too."""
    results = results_of({"a": [1.0, 0.0]})
    samples = {"a": samples_of([1.0, 0.0])}
    full = one(write(tmp_path / "m", results, samples))
    bare = write(tmp_path / "a", json.dumps(results, indent=4))
    runs, (left,) = reading.read([tmp_path], quiet=True)
    assert [run.path for run in runs] == [full.path]
    assert left.path == bare
    assert left.why == f"is the same run as {full.path}."
    write(tmp_path / "z", results, samples)
    collect(runs, tmp_path / "n")
    runs, left_out = reading.read([tmp_path, bare], quiet=True)
    assert len(runs) == 1
    assert len(left_out) == 3
    assert all("is the same run as" in left.why for left in left_out)


def of_two(scores: list[float], **values: float) -> tuple[dict, str]:
    """Results of two documents, with these values in place of the true ones, and the samples of these scores."""
    results = results_of({"a": [1.0, 0.0]})
    results["results"]["a"].update(values)
    results["group_subtasks"] = {}
    return results, samples_of(scores)


def damaged(change: Callable[[str], str]) -> tuple[dict, str]:
    results, samples = of_two([1.0, 0.0])
    return results, change(samples)


FILE = "samples_a_2026-01-01T00-00-00.jsonl"
MARKED = {
    "their acc is 0.5, in the results it is 0.75": of_two([1.0, 0.0], **{"acc,none": 0.75}),
    "the acc of a document is not a finite number": of_two([1.0, math.nan]),
    f"{FILE}: is damaged, half-written or not JSON": damaged(lambda text: text[:-9]),
    "document 1 is in the samples twice": damaged(lambda text: text + text.splitlines()[1]),
    "the samples have none of this filter": damaged(
        lambda text: text.replace('"filter": "none"', '"filter": "x"')
    ),
    "is not a sample of lm-eval, which has": damaged(
        lambda text: text.replace('"doc_id": 1', '"doc_id": 1.5')
    ),
}


@pytest.mark.parametrize("mark", MARKED)
def test_samples_that_are_damaged_or_contradict_the_results_are_not_used(tmp_path, mark):
    results, samples = MARKED[mark]
    run = one(write(tmp_path, results, {"a": samples}))
    assert run.tasks["a"].value == results["results"]["a"]["acc,none"]
    assert run.tasks["a"].answers is None
    assert mark in run.tasks["a"].marks[0]


LEFT_OUT = {
    "is damaged, half-written or not JSON": '{"results": {"a": {"acc,none": 0.5',
    "is not a results file of lm-eval, which has 'results', 'configs' and 'config'": '{"results": {"a": 1}}',
    "its acc,none is 'nan', which is not a number": json.dumps(results_of({"a": [math.nan]})),
    "its acc of 1.5 is not between 0 and 1": json.dumps(of_two([1.0, 2.0], **{"acc,none": 1.5})[0]),
    "dev set": json.dumps(
        {**results_of({"a": [1.0]}), "config": {"icl": {"study": {"split": "dev"}}}}
    ),
}


@pytest.mark.parametrize("why", LEFT_OUT)
def test_left_out(tmp_path, why):
    good = write(tmp_path, results_of({"a": [1.0]}), time="good")
    bad = write(tmp_path, LEFT_OUT[why])
    (run,), left_out = reading.read([tmp_path], quiet=True)
    assert run.path == good
    assert {left.path for left in left_out} == {bad}
    said = left_out[-1].why
    assert why in said
    assert "\n" not in said
    assert said.endswith(".")
    assert len(said) < 700


def test_a_task_of_several_is_left_out(tmp_path):
    (run,), left_out = reading.read(
        [write(tmp_path, results_of({"a": [math.nan], "b": [1.0, 0.0]}))], quiet=True
    )
    assert list(run.tasks) == ["b"]
    assert [left.why for left in left_out] == [
        "task 'a' is left out: its acc,none is 'nan', which is not a number.",
        "group 'all' is left out: it has no result of its task 'a'.",
    ]


def test_what_a_folder_has_besides(tmp_path):
    """Only files that are named as lm-eval's and our own are read; what is none is no traceback."""
    write(tmp_path / ".hidden", results_of({"a": [1.0, 0.0]}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "results_pipe.json")
    runs, (left,) = reading.read([tmp_path], quiet=True)
    assert not runs
    assert left.path.name == "results_pipe.json"


def test_a_task_name_leads_to_no_other_folder(tmp_path):
    write(tmp_path / "other", "", {"a": samples_of([1.0])}, time="t")
    (tmp_path / "samples_..").mkdir()
    runs, _ = reading.read(
        [write(tmp_path, results_of({"../other/samples_a": [1.0]}), time="t")], quiet=True
    )
    assert not runs


def test_collected(made, tmp_path):
    """The same run again, in a file without any text of a document, which is made the same again."""
    runs, _ = reading.read([made["order"].parent], quiet=True)
    files = collect(runs, tmp_path)
    before = {file.name: file.read_bytes() for file in files}
    assert collect(runs, tmp_path) == files
    assert {file.name: file.read_bytes() for file in files} == before
    assert sorted((tmp_path / "runs").iterdir()) == sorted(files)
    assert [sentence for file in files for sentence in faults(file)] == []
    assert all(file.name.startswith(run.digest) for run, file in zip(runs, files, strict=True))
    again, left_out = reading.read([tmp_path], quiet=True)
    assert not left_out
    assert len(again) == len(runs)
    for run in again:
        assert_same(run, next(other for other in runs if other.digest == run.digest))
    twice = collect(again, tmp_path / "twice")
    assert {file.name for file in twice} == set(before), "names are of what is in them"
    for run, file in zip(runs, files, strict=True):
        results, documents = load(file)
        assert results == json.loads(run.path.read_text())
        assert set(documents) <= set(run.tasks)
        rows = repr([row for of_task in documents.values() for row in of_task])
        for task in run.tasks:
            for line in boards.samples_of(run.path, task).open():
                for text in json.loads(line)["doc"].values():
                    assert not isinstance(text, str) or len(text) < 6 or text not in rows


def with_rules(folder: Path) -> Path:
    """A run with two decision rules that say otherwise."""
    facts = {"rule": "x", "arguments": {}, "transductive": False}
    says = {"one": [1, 0, 1, 0] * 10, "two": [1, 1, 0, 0] * 10}
    rules = {name: {**facts, "says": of} for name, of in says.items()}
    return boards.write(folder, says=[0] * 40, rules=rules)


FORGED: dict[str, Callable[[list], list]] = {
    "swapped": lambda rows: [
        row._replace(filter={"one": "two", "two": "one"}.get(row.filter, row.filter))
        for row in rows
    ],
    "removed": lambda rows: [row for row in rows if row.filter != "two"],
    "exchanged": lambda rows: [
        row._replace(doc_id={0: 1, 1: 0}.get(row.doc_id, row.doc_id))
        if row.filter == "two"
        else row
        for row in rows
    ],
    "scored otherwise": lambda rows: [
        row._replace(metrics={"acc": 1.0 - row.metrics["acc"]})
        if row.doc_id < 2 and row.filter == "one"
        else row
        for row in rows
    ],
}


@pytest.mark.parametrize("how", FORGED)
def test_a_check_compares_all_answers_with_the_results(tmp_path, monkeypatch, how):
    """Also those under decision rules, where the name of the file says nothing of what was forged."""
    (run,), _ = reading.read([with_rules(tmp_path)], quiet=True)
    (file,) = collect([run], tmp_path / "board")
    assert faults(file) == []
    assert {r.rule.name for r in one(file).decided} == {"one", "two"}
    results, documents = load(file)
    forged = {task: FORGED[how](rows) for task, rows in documents.items()}
    monkeypatch.setattr("lm_eval_icl.results.collect.load", lambda path: (results, forged))
    assert "was changed" in faults(file)[0]
    assert faults(tmp_path / f"{name_of(results, forged)}.parquet"), "a new name does not help"


def test_a_damaged_file_of_collect_is_left_out(tmp_path):
    (file,) = collect([one(boards.write(tmp_path))], tmp_path / "board")
    data = file.read_bytes()
    for place, text in (("cut", data[: len(data) // 2]), ("none", b""), ("text", b"PAR1 what")):
        file.with_name(f"{place}.parquet").write_bytes(text)
    runs, left_out = reading.read([file.parent], quiet=True)
    assert len(runs) == 1
    assert len(left_out) == 3
    assert all("is damaged" in left.why for left in left_out)
