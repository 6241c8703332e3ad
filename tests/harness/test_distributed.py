"""Several processes do what one does: the same results file, and one line where something is wrong.

On CPUs accelerate's processes speak over gloo, and only if told so: ACCELERATE_USE_CPU.
"""

import contextlib
import copy
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
        assert len(found["samples"][task]) == len(samples) > 0
        for mine, theirs in zip(
            *(sorted(of, key=where) for of in (found["samples"][task], samples)), strict=True
        ):
            for key in ("doc_id", "filter", "doc_hash", "prompt_hash", "target_hash"):
                assert mine[key] == theirs[key]
            assert_close(mine["filtered_resps"], theirs["filtered_resps"])


def where(sample: dict) -> tuple:
    return sample["filter"], sample["doc_id"]


def assert_close(mine: object, theirs: object) -> None:
    """Equal texts and flags, numbers to 1e-5 of 1 or of their size."""
    for a, b in zip(flat(mine), flat(theirs), strict=True):
        assert a == b or abs(a - b) <= 1e-5 * max(1, abs(b)), (a, b)


def flat(values: object) -> list:
    """Nested lists as one, what is a number as a number."""
    if isinstance(values, (list, tuple)):
        return [value for each in values for value in flat(each)]
    try:
        return [float(str(values))]  # a flag is no number
    except ValueError:
        return [str(values)]


# Evaluations by one process and by two.

CHOSEN = evaluation.task(  # demonstrations that the model chooses
    "chosen",
    **evaluation.CHOICE,
    doc_to_choice=["no", "yes"],
    metadata={"version": 1, "demonstrations": "herding"},
)
DECIDED = {**CHOSEN, "task": "decided", "metadata": {"version": 1, "decide": "contextual+batch"}}
TASKS = evaluation.TASKS | {task["task"]: task for task in (DECIDED, CHOSEN)}


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


def everything(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    divided = int(os.environ.get("WORLD_SIZE", "1")) > 1
    for name in NAMES:
        found[name] = run(name, folder / "llama", ["one_token", "many_tokens", "generate"])
    args = {"max_length": 30}
    found["left out"] = run("icl", folder / "llama", ["many_tokens"], num_fewshot=11, args=args)
    for key in ("cache written", "cache read by one process"):
        if divided and key == "cache read by one process" and os.environ["RANK"] == "0":
            (folder / "cache_rank0.jsonl").unlink()
        found[key] = run(
            *("icl", folder / "llama", ["one_token", "generate"]),
            use_cache=str(folder / "cache"),
            batch_size="auto",
            max_batch_size=2,
            args={"max_length": 512},
        )
    os.environ["LM_EVAL_ICL_CACHE"] = str(
        folder / "chosen"
    )  # one process reads nothing of what two have chosen
    found["chosen"] = run("icl", folder / "llama", ["chosen"])
    found["decided"] = run("icl", folder / "llama", ["decided"])
    # One model over all processes, each of which has every document.
    with contextlib.suppress(InputError):  # older versions of transformers refuse it
        split = {"tp_plan": "auto"} if divided else {}
        found["tensor parallel"] = run(
            "invicl", folder / "llama", ["one_token", "generate"], args=split
        )
    return found


def everything_of_two(line: list[str]) -> None:
    """What each of two processes runs. The first writes what came out."""
    (folder,) = map(Path, line)
    found = everything(folder)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found, default=str))
    # PyTorch's caches hold on to the groups of a model that was split by tensor parallelism, and with them to threads
    # of gloo, which now and then abort a Python interpreter that is ending.
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """`everything` by two processes and by one."""
    two, one = (tmp_path_factory.mktemp(kind) for kind in ("two", "one"))
    for folder in (two, one):
        tiny.save("llama", folder / "llama")
    for done in processes.ranks(everything_of_two, two):
        assert done.returncode == 0, done.stderr[-3000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LM_EVAL_ICL_CACHE", "")  # set again inside, and here as it was before
        alone = json.loads(json.dumps(everything(one), default=str))
    return [json.loads((two / "found.json").read_text()), alone]


@pytest.mark.slow
def test_two_processes_give_what_one_gives(runs):
    two, one = runs
    for name in [
        *NAMES,
        "left out",
        "cache written",
        "cache read by one process",
        "chosen",
        "decided",
    ]:
        assert_same_run(two[name], one[name])
    # One process chooses demonstrations for all, and a mean over documents is over those of all processes.
    two_chosen, one_chosen = (each["chosen"]["config"]["icl"]["chosen"]["chosen"] for each in runs)
    for key in ("indices", "picked", "tokens", "made_now"):
        assert two_chosen[key] == one_chosen[key] != 0, key
    two_decided, one_decided = (
        each["decided"]["configs"]["decided"]["metadata"]["decided"] for each in runs
    )
    for rule in ("batch", "contextual"):
        assert_close(two_decided[rule]["constants"], one_decided[rule]["constants"])


@pytest.mark.slow
@pytest.mark.pinned
def test_one_model_over_two_processes(runs):
    two, one = runs
    assert_same_run(two["tensor parallel"], one["tensor parallel"])


@pytest.mark.slow
def test_the_results_file_counts_what_both_did(runs):
    two, one = (
        {name: run["config"]["icl"] for name, run in each.items() if isinstance(run, dict)}
        for each in runs
    )
    assert one["left out"]["left_out"]["many_tokens"]["documents"] == 5
    assert one["left out"]["truncated"]["many_tokens"]["tokens"] > 0
    for name in ("left_out", "truncated"):
        assert two["left out"][name] == one["left out"][name]
    for name in NAMES:
        mine, alone = two[name], one[name]
        # The same requests, of which each process runs its own, each with the demonstrations.
        assert (
            mine["tokens_run"] + mine["tokens_saved"] == alone["tokens_run"] + alone["tokens_saved"]
        )
        assert (
            mine["tokens_run"] > alone["tokens_run"] or name == "saicl"
        )  # which encodes for every query anyway
    assert two["icl"]["contexts_encoded"] == 2 * one["icl"]["contexts_encoded"]
    # What came from a cache was not run, and not saved by us.
    assert (
        one["cache read by one process"]["tokens_run"]
        == one["cache read by one process"]["tokens_saved"]
        == 0
    )
    assert 0 < two["cache read by one process"]["tokens_run"] < two["cache written"]["tokens_run"]


@pytest.mark.slow
def test_a_command_line(tmp_path):
    line = [
        "lm_eval",
        "--model",
        "pcw",
        "--model_args",
        f"pretrained={model_path()}",
        "--tasks",
        "icl_demo_short",
    ]
    line += ["--num_fewshot", "4", "--limit", "5", "--output_path", tmp_path, "--log_samples"]
    for done in processes.ranks(processes.run_command, *line):
        assert done.returncode == 0, done.stderr[-3000:]
    (results,), (samples,) = tmp_path.glob("*/results_*.json"), tmp_path.glob("*/samples_*.jsonl")
    found = json.loads(results.read_text())
    found["samples"] = {
        "icl_demo_short": [json.loads(line) for line in samples.read_text().splitlines()]
    }
    expected = evaluation.run("pcw", model_path(), ["icl_demo_short"], 4, limit=5)
    for run in (found, expected):
        for metrics in run["results"].values():
            (
                metrics.pop("acc_stderr,none"),
                metrics.pop("acc_norm_stderr,none"),
            )  # the harness asks for none
    assert_same_run(found, expected)
    assert found["config"]["icl"]["contexts_encoded"] == 2


def test_total():
    shares = [
        {"n": 1, "of": {"a": {"x": 1}}},
        {"n": 2, "of": {"b": {"x": 5}}},
        {"n": 0, "of": {"a": {"x": 2}}},
    ]
    assert total(shares) == {"n": 3, "of": {"a": {"x": 3}, "b": {"x": 5}}}
