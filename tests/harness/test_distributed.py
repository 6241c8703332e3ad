"""Several processes do what one does: the same results file, and one line where something is wrong.

On CPUs accelerate's processes speak over gloo, and only if told so: ACCELERATE_USE_CPU.
"""

import contextlib
import copy
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.distributed import total
from lm_eval_icl.smoke.demo import model_path
from tests import evaluation, processes, tiny

# One of every kind: a plain pass, memories that depend on the query, a mask.
NAMES = ("icl", "saicl", "invicl")


def assert_same_run(found: dict, expected: dict) -> None:
    """Metrics with their standard errors, and all samples."""
    for task, metrics in expected["results"].items():
        assert_close([found["results"][task][name] for name in metrics], list(metrics.values()))
    for task, samples in expected["samples"].items():
        ours = sorted(found["samples"][task], key=where)
        theirs = sorted(samples, key=where)
        assert theirs
        for mine, other in zip(ours, theirs, strict=True):
            for key in ("doc_id", "filter", "doc_hash", "prompt_hash", "target_hash"):
                assert mine[key] == other[key]
            assert_close(mine["filtered_resps"], other["filtered_resps"])


def where(sample: dict) -> tuple:
    return sample["filter"], sample["doc_id"]


def assert_close(mine: object, theirs: object) -> None:
    """Equal texts and flags, numbers to 1e-5 of 1 or of their size."""
    for a, b in zip(flat(mine), flat(theirs), strict=True):
        assert a == b or abs(a - b) <= 1e-5 * max(1, abs(b)), (a, b)


def flat(values: object) -> list:
    """Nested lists as one, what is a number as a number."""
    if isinstance(values, (list, tuple)):
        return list(itertools.chain(*map(flat, values)))
    try:
        return [float(str(values))]  # a flag is no number
    except ValueError:
        return [str(values)]


# Evaluations by one process and by two.

HERDING = {"version": 1, "demonstrations": "herding"}  # the model chooses demonstrations
DECIDE = {"version": 1, "decide": "contextual+batch"}
TASKS = {
    **evaluation.TASKS,
    "chosen": evaluation.choice("chosen", "no", "yes", metadata=HERDING),
    "decided": evaluation.choice("decided", "no", "yes", metadata=DECIDE),
}


def run(
    model: str, path: Path, names: list[str], *, limit: int = 5, **kwargs: Any
) -> dict[str, Any] | None:
    """Five documents: two processes have three and two."""
    args = {"pretrained": str(path), **kwargs.pop("args", {})}
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=args,
        tasks=[copy.deepcopy(TASKS[name]) for name in names],
        task_manager=evaluation.manager(False),
        device="cpu",
        limit=limit,
        **{"batch_size": 4, "num_fewshot": 2, "bootstrap_iters": 100, **kwargs},
    )
    return results and {key: results[key] for key in ("results", "samples", "config", "configs")}


def with_cache(folder: Path) -> dict[str, Any] | None:
    return run(
        "icl",
        folder / "llama",
        ["one_token", "generate"],
        use_cache=str(folder / "cache"),
        batch_size="auto",
        max_batch_size=2,
        args={"max_length": 512},
    )


def everything(folder: Path) -> dict[str, Any]:
    path = folder / "llama"
    runs: dict[str, Any] = {}
    divided = int(os.environ.get("WORLD_SIZE", "1")) > 1
    for name in NAMES:
        runs[name] = run(name, path, ["one_token", "many_tokens", "generate"])
    args = {"max_length": 30}
    runs["left out"] = run("icl", path, ["many_tokens"], num_fewshot=11, args=args)
    runs["cache written"] = with_cache(folder)
    if divided and os.environ["RANK"] == "0":
        (folder / "cache_rank0.jsonl").unlink()
    runs["cache read by one process"] = with_cache(folder)
    # One process reads nothing of what two have chosen.
    os.environ["LM_EVAL_ICL_CACHE"] = str(folder / "chosen")
    runs["chosen"] = run("icl", path, ["chosen"])
    runs["decided"] = run("icl", path, ["decided"])
    # One model over all processes, each of which has every document.
    args = {"tp_plan": "auto"} if divided else {}
    with contextlib.suppress(InputError):  # older versions of transformers refuse it
        runs["tensor parallel"] = run("invicl", path, ["one_token", "generate"], args=args)
    return runs


def everything_of_two(line: list[str]) -> None:
    """What each of two processes runs. The first writes what came out."""
    (folder,) = map(Path, line)
    found = everything(folder)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found, default=str))
    # PyTorch's caches hold on to the groups of a model that was split by tensor parallelism, and
    # with them to threads of gloo, which now and then abort a Python interpreter that is ending.
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """`everything` by two processes and by one."""
    two = tmp_path_factory.mktemp("two")
    one = tmp_path_factory.mktemp("one")
    tiny.save("llama", two / "llama")
    tiny.save("llama", one / "llama")
    for done in processes.ranks(everything_of_two, two):
        assert done.returncode == 0, done.stderr[-3000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LM_EVAL_ICL_CACHE", "")  # set again inside, and here as it was before
        alone = json.loads(json.dumps(everything(one), default=str))
    return [json.loads((two / "found.json").read_text()), alone]


CACHED = "cache read by one process"


@pytest.mark.slow
def test_two_processes_give_what_one_gives(runs):
    two, one = runs
    for name in [*NAMES, "left out", "cache written", CACHED, "chosen", "decided"]:
        assert_same_run(two[name], one[name])


@pytest.mark.slow
def test_one_process_chooses_demonstrations_for_all(runs):
    two, one = (each["chosen"]["config"]["icl"]["chosen"]["chosen"] for each in runs)
    for key in ("indices", "picked", "tokens", "made_now"):
        assert two[key] == one[key] != 0, key


@pytest.mark.slow
def test_a_mean_over_documents_is_over_those_of_all_processes(runs):
    two, one = (each["decided"]["configs"]["decided"]["metadata"]["decided"] for each in runs)
    for rule in ("batch", "contextual"):
        assert_close(two[rule]["constants"], one[rule]["constants"])


def counts(runs: dict) -> dict:
    return {name: run["config"]["icl"] for name, run in runs.items() if isinstance(run, dict)}


def requested(counts: dict) -> int:
    return counts["tokens_run"] + counts["tokens_saved"]


@pytest.mark.slow
@pytest.mark.pinned
def test_one_model_over_two_processes(runs):
    two, one = runs
    assert_same_run(two["tensor parallel"], one["tensor parallel"])


@pytest.mark.slow
def test_the_results_file_counts_what_both_did(runs):
    two, one = map(counts, runs)
    assert one["left out"]["left_out"]["many_tokens"]["documents"] == 5
    assert one["left out"]["truncated"]["many_tokens"]["tokens"] > 0
    for key in ("left_out", "truncated"):
        assert two["left out"][key] == one["left out"][key]
    for name in NAMES:
        # The same requests, of which each process runs its own, each with the demonstrations.
        assert requested(two[name]) == requested(one[name])
        # saicl encodes for every query anyway.
        assert two[name]["tokens_run"] > one[name]["tokens_run"] or name == "saicl"
    assert two["icl"]["contexts_encoded"] == 2 * one["icl"]["contexts_encoded"]
    # What came from a cache was not run, and not saved by us.
    assert one[CACHED]["tokens_run"] == one[CACHED]["tokens_saved"] == 0
    assert 0 < two[CACHED]["tokens_run"] < two["cache written"]["tokens_run"]


def without_errors(run: dict) -> dict:
    """A run without the standard errors, which `evaluation.run` does not ask for."""
    for metrics in run["results"].values():
        del metrics["acc_stderr,none"]
        del metrics["acc_norm_stderr,none"]
    return run


@pytest.mark.slow
def test_a_command_line(tmp_path):
    task = "icl_demo_short"
    line = ["lm_eval", "--model", "pcw", "--model_args", f"pretrained={model_path()}"]
    line += ["--tasks", task, "--num_fewshot", "4", "--limit", "5"]
    line += ["--output_path", tmp_path, "--log_samples"]
    for done in processes.ranks(processes.run_command, *line):
        assert done.returncode == 0, done.stderr[-3000:]
    (results,) = tmp_path.glob("*/results_*.json")
    (samples,) = tmp_path.glob("*/samples_*.jsonl")
    found = json.loads(results.read_text())
    found["samples"] = {task: list(map(json.loads, samples.read_text().splitlines()))}
    expected = evaluation.run("pcw", model_path(), [task], 4, limit=5)
    assert_same_run(without_errors(found), without_errors(expected))
    assert found["config"]["icl"]["contexts_encoded"] == 2


def test_total():
    shares = [
        {"n": 1, "of": {"a": {"x": 1}}},
        {"n": 2, "of": {"b": {"x": 5}}},
        {"n": 0, "of": {"a": {"x": 2}}},
    ]
    assert total(shares) == {"n": 3, "of": {"a": {"x": 3}, "b": {"x": 5}}}
