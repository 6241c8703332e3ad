"""Results files: what lm-eval writes is read as it is.

Whatever else is in a file never stops the others.
"""

import copy
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import yaml
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.results import read as reading
from lm_eval_icl.results.build import build
from lm_eval_icl.results.collect import collect, faults, load, name_of
from lm_eval_icl.results.records import Run, TaskResult
from lm_eval_icl.smoke.demo import model_path
from tests import boards, evaluation
from tests.results.files import board_of, samples_in

GROUPS = {
    "outer": """
        task: [icl_demo_short, inner]
        aggregate_metric_list: [{metric: acc, weight_by_size: false}]
    """,
    "inner": """
        task: [icl_demo_four, icl_demo_long]
        aggregate_metric_list: [{metric: acc}]
    """,
    "without_a_value": """
        task: [outer]
    """,
}
ASKED = {
    "icl_demo_short": [0, 2, 5, 7],
    "icl_demo_four": [1, 2, 3],
    "icl_demo_long": [0, 1, 2, 3, 4, 9],
}
GENERATE = r"""
    output_type: generate_until
    doc_to_target: "{{other}}"
    filter_list:
      - {name: first, filter: [{function: regex, regex_pattern: '(\w+)'}, {function: take_first}]}
      - {name: whole, filter: [{function: take_first}]}
    metric_list: [{metric: exact_match}]
    generation_kwargs: {until: ["\n"], max_gen_toks: 4}
"""
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": ["no", "yes"]}


def scored_by(name: str, *metrics: str) -> dict[str, Any]:
    """A task of two options with these metrics."""
    metric_list = [{"metric": metric} for metric in metrics]
    return evaluation.task(name, **CHOICE, metric_list=metric_list)


def generating() -> dict[str, Any]:
    """A task whose texts are filtered in two ways."""
    return evaluation.task("generate", **yaml.safe_load(GENERATE))


def tasks_of_every_metric() -> list[dict[str, Any]]:
    surprise = {
        "output_type": "loglikelihood",
        "doc_to_target": "so",
        "metric_list": [{"metric": "perplexity"}],
    }
    own = scored_by("own", "acc")
    own["metric_list"][0]["aggregation"] = lambda items: 0.25
    return [
        scored_by("f1", "f1", "mcc"),
        scored_by("mcc", "mcc"),
        scored_by("brier", "brier_score"),
        evaluation.TASKS["mutual"],
        evaluation.TASKS["described"],
        evaluation.task("surprise", **surprise),
        own,
        generating(),
    ]


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
    path: Path, tasks: Iterable[dict | str], shots: int, model: str = "icl", **options: Any
) -> dict:
    """What lm-eval makes of tasks."""
    options.setdefault("task_manager", evaluation.manager(False))
    return lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(path)},
        tasks=copy.deepcopy(list(tasks)),
        num_fewshot=shots,
        device="cpu",
        batch_size=8,
        bootstrap_iters=10,
        **options,
    )


def evaluate_on_rows(folder: Path, rows: list[int], tasks: list[str], model: str, **options: Any):
    """The results with these rows of the pool as demonstrations."""
    chosen = folder / f"rows_{'_'.join(map(str, rows))}.json"
    chosen.write_text(json.dumps(rows))
    manager = TaskManager(
        None,
        [str(folder), str(task_dir() / "demo")],
        include_defaults=False,
        metadata={"demonstrations": str(chosen)},
    )
    options["fewshot_random_seed"] = 7
    return evaluate(model_path(), tasks, len(rows), model, task_manager=manager, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Results files of lm-eval itself: by name, all in lm-eval's folder of the checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in GROUPS.items():
        config = {"group": name, **yaml.safe_load(text)}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))

    def short(rows: list[int], model: str = "icl") -> dict:
        return evaluate_on_rows(folder, rows, ["icl_demo_short"], model, limit=6)

    results = {
        "order": short([0, 1, 2]),
        "reverse": short([2, 1, 0]),
        "other": short([3, 1, 2]),
        "again": short([0, 1, 2], "hf"),
        "nested": evaluate_on_rows(folder, [0, 1, 2], ["without_a_value"], "hf", samples=ASKED),
        "metrics": evaluate(model_path(), tasks_of_every_metric(), 2),
    }
    return {name: save(of_run, folder / "out") for name, of_run in results.items()}


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
        assert_same_result(result, other.tasks[task])


def assert_same_result(result: TaskResult, other: TaskResult) -> None:
    for name in set(vars(result)) - {"answers"}:
        assert repr(getattr(result, name)) == repr(getattr(other, name)), name
    if result.answers is None:
        assert other.answers is None
        return
    for name, mine in vars(result.answers).items():
        theirs = getattr(other.answers, name)
        if name == "predicted" and other.answers.predictions is None:
            continue  # `collect` leaves predicted texts out
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs, name)


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


def test_a_result_as_lm_eval_wrote_it(made):
    run = one(made["order"])
    result = run.tasks["icl_demo_short"]
    assert result.metric == "acc"
    assert result.filter == "none"
    assert result.aggregation == "mean"
    assert result.higher_is_better is True
    assert result.shots == 3
    assert result.documents == 6
    assert result.fields.column["version"] == "1"
    assert result.marks == ()
    digest = result.fields.switches["demonstrations"]
    assert len(digest) == 32, "a long path is compared by its digest"
    assert result.stderr == run.results["results"]["icl_demo_short"]["acc_stderr,none"]
    samples = samples_in(made["order"], "icl_demo_short")
    answers = result.answers
    assert answers.items.tolist() == [sample["acc"] for sample in samples]
    assert answers.items.mean() == result.value
    right = answers.predictions == [int(sample["target"]) for sample in samples]
    assert right.tolist() == (answers.items == 1).tolist()


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
    names = ("order", "reverse", "other", "again")
    results = [one(made[name]).tasks["icl_demo_short"] for name in names]
    order, reverse, other, again = (result.answers for result in results)
    assert order.documents == reverse.documents == other.documents == again.documents
    assert order.prompts == again.prompts
    assert len({order.prompts, reverse.prompts, other.prompts}) == 3
    assert order.demonstrations == reverse.demonstrations == again.demonstrations
    assert order.demonstrations != other.demonstrations
    assert len({result.fields.column["template"] for result in results}) == 1


def answers_of(folder: Path, reverse: bool, shots: int, path: Path, **options: object) -> Any:
    """The answers to prompts with a description and demonstrations in one of two orders."""
    samples = evaluation.documents(2, 80)
    if reverse:
        samples.reverse()
    config = evaluation.task(
        "a_task",
        **CHOICE,
        description="Tell.\n\nNow: ",
        fewshot_split=None,
        training_split=None,
        fewshot_config={"sampler": "first_n", "samples": samples},
    )
    results = evaluate(path, [config], shots, limit=2, **options)
    file = save(results, folder, options.get("system_instruction"))
    return one(file).tasks["a_task"].answers


def test_a_description_and_a_system_prompt_are_no_part_of_demonstrations(tmp_path):
    plain = answers_of(tmp_path, False, 2, model_path())
    reverse = answers_of(tmp_path, True, 2, model_path())
    assert plain.prompts != reverse.prompts
    assert plain.demonstrations == reverse.demonstrations
    assert answers_of(tmp_path, False, 0, model_path()).demonstrations is None
    system = answers_of(tmp_path, True, 2, model_path(), system_instruction="Be brief.")
    assert system.demonstrations == plain.demonstrations


def test_chats_have_demonstrations(tmp_path, chat_checkpoint):
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    path = chat_checkpoint("llama3")
    first = answers_of(tmp_path, False, 2, path, **chat)
    reverse = answers_of(tmp_path, True, 2, path, **chat)
    assert first.prompts != reverse.prompts
    assert first.demonstrations is not None
    assert reverse.demonstrations is not None


METRICS = """
f1: f1 by f1
mcc: mcc by matthews_corrcoef
brier: brier_score by nothing
mutual: acc_mutual_info by mean
described: acc by mean
surprise: perplexity by perplexity
own: acc by nothing
generate: exact_match by mean
"""


def test_metrics(made):
    tasks = one(made["metrics"]).tasks
    metrics = {
        name: f"{result.metric} by {result.aggregation or 'nothing'}"
        for name, result in tasks.items()
    }
    assert metrics == yaml.safe_load(METRICS)
    f1 = tasks["f1"].answers
    assert f1.items.shape == tasks["mcc"].answers.items.shape == (6, 2)
    assert f1.items[:, 1].tolist() == f1.predictions.tolist()
    surprise = tasks["surprise"]
    assert math.isclose(math.exp(-surprise.answers.items.mean()), surprise.value)
    assert not surprise.higher_is_better
    # lm-eval asks for each option twice.
    assert tasks["mutual"].answers.predictions is None
    assert tasks["generate"].filter == "first"
    assert tasks["generate"].answers.predictions is None


def test_metrics_that_are_shown_as_reported(made):
    tasks = one(made["metrics"]).tasks
    assert tasks["own"].value == 0.25
    for name, result in tasks.items():
        if name in ("brier", "own"):
            assert "shown as reported" in result.marks[0]
        else:
            assert not result.marks
            assert result.answers is not None


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
    for task, documents in ASKED.items():
        assert len(run.tasks[task].answers.items) == len(documents)


def results_of(scores: dict[str, list[float]]) -> dict:
    """The results of a group of tasks as lm-eval would write them, by documents."""
    tasks = {}
    configs = {}
    total = 0.0
    documents = 0
    for name, of_task in scores.items():
        n = len(of_task)
        value = sum(of_task) / n
        error = 0.01 * (1 + n)
        tasks[name] = {"acc,none": value, "acc_stderr,none": error, "sample_len": n}
        configs[name] = {"output_type": "multiple_choice", "num_fewshot": 0}
        total += sum(of_task)
        documents += n
    group = {"acc,none": total / documents, "acc_stderr,none": "N/A"}
    arguments = "pretrained=a/b,revision=x,dtype=float16,parallelize=True,k=2"
    return {
        "results": {**tasks, "all": group},
        "groups": {"all": group},
        "group_subtasks": {"all": list(scores)},
        "configs": configs,
        "config": {"model": "hf", "model_args": arguments},
    }


SAMPLE = """
doc: {}
target: "0"
arguments:
  gen_args_0: {arg_0: SECRET, arg_1: " no"}
  gen_args_1: {arg_0: SECRET, arg_1: " yes"}
filter: none
metrics: [acc]
prompt_hash: SHA
target_hash: SHA
"""


def samples_of(scores: list[float]) -> str:
    lines = []
    for number, score in enumerate(scores):
        sample = yaml.safe_load(SAMPLE)
        sample["doc_id"] = number
        sample["doc"] = {"text": f"SECRET {number}"}
        sample["doc_hash"] = str(number)
        second = -1.0 - (score == 1)
        sample["filtered_resps"] = [[-1.0, False], [second, False]]
        sample["acc"] = score
        lines.append(json.dumps(sample) + "\n")
    return "".join(lines)


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
    why = "group 'all' is left out: its acc,none is not the mean of its tasks', weighted by doc"
    assert left.why.startswith(why)


def test_weights_that_another_run_shows(tmp_path):
    write(tmp_path, results_of({"a": [0.0], "b": [0.0] * 3}), time="all-are-equal")
    results = results_of({"a": [1.0], "b": [0.0] * 3})
    results["groups"]["all"]["acc,none"] = 0.5
    write(tmp_path, results, time="they-differ")
    columns = build(reading.read([tmp_path], quiet=True)[0]).columns
    assert [column.name for column in columns] == ["all", "a", "b"]
    assert columns[0].weights == {"a": 0.5, "b": 0.5}


def test_tasks_that_are_listed_as_groups_of_nothing(tmp_path):
    """As lm-eval wrote them before it had classes of groups."""
    results = results_of({"a": [0.0, 1.0], "b": [0.0, 1.0] * 3})
    results["group_subtasks"] |= {"a": [], "b": []}
    run = one(write(tmp_path, results))
    assert list(run.tasks) == ["a", "b"]
    assert run.groups["all"] == {"a": 0.25, "b": 0.75}


def test_results_without_numbers_of_documents_have_an_average(tmp_path):
    """As lm-eval wrote them until 0.4.2."""
    results = results_of({"a": [0.0, 1.0], "b": [1.0, 1.0]})
    results["group_subtasks"] = {}
    for task in ("a", "b"):
        del results["results"][task]["sample_len"]
    (entry,) = board_of(write(tmp_path, results)).entries
    assert entry.cells["average"].estimate.mean == 0.75


def test_arguments_as_text(tmp_path):
    """As Python's `simple_evaluate` records them; ties of options go to the first."""
    scores = [1.0, 0.0, 1.0]
    run = one(write(tmp_path, results_of({"a": scores}), {"a": samples_of(scores)}))
    assert run.pretrained == "a/b"
    assert run.revision == "x"
    assert run.dtype == "float16"
    assert run.arguments == {"parallelize": True, "k": 2}
    assert run.date == 0.0
    assert run.seed is None
    result = run.tasks["a"]
    assert result.documents == 3
    assert result.answers.items.tolist() == scores
    assert result.answers.predictions.tolist() == [0, 0, 0]


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
    """Results of two documents, with these values in place of the true ones, and samples."""
    results = results_of({"a": [1.0, 0.0]})
    results["results"]["a"].update(values)
    results["group_subtasks"] = {}
    return results, samples_of(scores)


def damaged(change: Callable[[str], str]) -> tuple[dict, str]:
    results, samples = of_two([1.0, 0.0])
    return results, change(samples)


def replaced(old: str, new: str) -> tuple[dict, str]:
    return damaged(lambda text: text.replace(old, new))


MARKED = {
    "their acc is 0.5, in the results it is 0.75": of_two([1.0, 0.0], **{"acc,none": 0.75}),
    "the acc of a document is not a finite number": of_two([1.0, math.nan]),
    "is damaged, half-written or not JSON": damaged(lambda text: text[:-9]),
    "document 1 is in the samples twice": damaged(lambda text: text + text.splitlines()[1]),
    "the samples have none of this filter": replaced('"filter": "none"', '"filter": "x"'),
    "a document has no acc that is a number, a pair": replaced('"acc": 1.0', '"acc": "x"'),
    "is not a sample of lm-eval, which has": replaced('"doc_id": 1', '"doc_id": 1.5'),
}


@pytest.mark.parametrize("mark", MARKED)
def test_samples_that_are_damaged_or_contradict_the_results_are_not_used(tmp_path, mark):
    results, samples = MARKED[mark]
    result = one(write(tmp_path, results, {"a": samples})).tasks["a"]
    assert result.value == results["results"]["a"]["acc,none"]
    assert result.answers is None
    assert mark in result.marks[0]
    if "half-written" in mark:
        assert f"samples_a_2026-01-01T00-00-00.jsonl: {mark}" in result.marks[0]


def on_dev() -> dict:
    results = results_of({"a": [1.0]})
    results["config"] = {"icl": {"study": {"split": "dev"}}}
    return results


NO_RESULTS = "is not a results file of lm-eval, which has 'results', 'configs' and 'config'"
LEFT_OUT = {
    "is damaged, half-written or not JSON": '{"results": {"a": {"acc,none": 0.5',
    NO_RESULTS: '{"results": {"a": 1}}',
    "its acc,none is 'nan', which is not a number": results_of({"a": [math.nan]}),
    "its acc of 1.5 is not between 0 and 1": of_two([1.0, 2.0], **{"acc,none": 1.5})[0],
    "dev set": on_dev(),
}


@pytest.mark.parametrize("why", LEFT_OUT)
def test_files_that_are_left_out_for_a_reason(tmp_path, why):
    good = write(tmp_path, results_of({"a": [1.0]}), time="good")
    bad = write(tmp_path, LEFT_OUT[why])
    (run,), left_out = reading.read([tmp_path], quiet=True)
    assert run.path == good
    assert {left.path for left in left_out} == {bad}
    reason = left_out[-1].why
    assert why in reason
    assert "\n" not in reason
    assert reason.endswith(".")
    assert len(reason) < 700


def test_a_task_of_several_is_left_out(tmp_path):
    file = write(tmp_path, results_of({"a": [math.nan], "b": [1.0, 0.0]}))
    (run,), left_out = reading.read([file], quiet=True)
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
    file = write(tmp_path, results_of({"../other/samples_a": [1.0]}), time="t")
    runs, _ = reading.read([file], quiet=True)
    assert not runs


@pytest.fixture(scope="module")
def runs(made) -> list[Run]:
    return reading.read([made["order"].parent], quiet=True)[0]


def contents(files: list[Path]) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in files}


def test_collected_runs_are_the_same_again(runs, tmp_path):
    files = collect(runs, tmp_path)
    before = contents(files)
    assert collect(runs, tmp_path) == files
    assert contents(files) == before
    assert sorted((tmp_path / "runs").iterdir()) == sorted(files)
    for run, file in zip(runs, files, strict=True):
        assert faults(file) == []
        assert file.name.startswith(run.digest)
    again, left_out = reading.read([tmp_path], quiet=True)
    assert not left_out
    assert len(again) == len(runs)
    by_digest = {run.digest: run for run in runs}
    for run in again:
        assert_same(run, by_digest[run.digest])
    twice = collect(again, tmp_path / "twice")
    assert {file.name for file in twice} == set(before), "names are of what is in them"


def test_collected_files_have_no_text_of_a_document(runs, tmp_path):
    files = collect(runs, tmp_path)
    for run, file in zip(runs, files, strict=True):
        results, documents = load(file)
        assert results == json.loads(run.path.read_text())
        assert set(documents) <= set(run.tasks)
        rows = repr(list(documents.values()))
        for task in run.tasks:
            for sample in samples_in(run.path, task):
                texts = [text for text in sample["doc"].values() if isinstance(text, str)]
                for text in texts:
                    assert len(text) < 6 or text not in rows


def with_rules(folder: Path) -> Path:
    """A run with two decision rules that say otherwise."""
    facts = {"rule": "x", "arguments": {}, "transductive": False}
    rules = {
        "one": {**facts, "says": [1, 0, 1, 0] * 10},
        "two": {**facts, "says": [1, 1, 0, 0] * 10},
    }
    return boards.write(folder, says=[0] * 40, rules=rules)


def swapped(row):
    names = {"one": "two", "two": "one"}
    return row._replace(filter=names.get(row.filter, row.filter))


def removed(row):
    return None if row.filter == "two" else row


def exchanged(row):
    if row.filter != "two":
        return row
    numbers = {0: 1, 1: 0}
    return row._replace(doc_id=numbers.get(row.doc_id, row.doc_id))


def scored_otherwise(row):
    if row.doc_id >= 2 or row.filter != "one":
        return row
    return row._replace(metrics={"acc": 1.0 - row.metrics["acc"]})


@pytest.mark.parametrize("forge", [swapped, removed, exchanged, scored_otherwise])
def test_a_check_compares_all_answers_with_the_results(tmp_path, monkeypatch, forge):
    """Also those under rules, where the name of the file says nothing of what was forged."""
    (run,), _ = reading.read([with_rules(tmp_path)], quiet=True)
    (file,) = collect([run], tmp_path / "board")
    assert faults(file) == []
    assert {result.rule.name for result in one(file).decided} == {"one", "two"}
    results, documents = load(file)
    forged = {task: list(filter(None, map(forge, rows))) for task, rows in documents.items()}
    monkeypatch.setattr("lm_eval_icl.results.collect.load", lambda path: (results, forged))
    assert "was changed" in faults(file)[0]
    assert faults(tmp_path / f"{name_of(results, forged)}.parquet"), "a new name does not help"


def test_a_damaged_file_of_collect_is_left_out(tmp_path):
    (file,) = collect([one(boards.write(tmp_path))], tmp_path / "board")
    data = file.read_bytes()
    file.with_name("cut.parquet").write_bytes(data[: len(data) // 2])
    file.with_name("none.parquet").write_bytes(b"")
    file.with_name("text.parquet").write_bytes(b"PAR1 what")
    runs, left_out = reading.read([file.parent], quiet=True)
    assert len(runs) == 1
    assert len(left_out) == 3
    assert all("is damaged" in left.why for left in left_out)
