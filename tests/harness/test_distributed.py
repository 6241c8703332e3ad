"""Several processes do what one does: the same results file, and one line where something is wrong.

On CPUs accelerate's processes speak over gloo, and only if told so: ACCELERATE_USE_CPU.
"""

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.distributed import by_filter, in_order, total
from lm_eval_icl.smoke.demo import model_path
from tests import evaluation, processes, tiny

# One of every kind: a plain pass, masks, memories that depend on the query, thinking, parts, several memories.
NAMES = ("icl", "pcw", "saicl", "batchicl", "invicl", "deepthink", "ape", "nbce")
ROOT = Path(__file__).resolve().parents[2]


def launch(*command: str) -> subprocess.CompletedProcess:
    """Two processes, at ports that are free."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    line = [sys.executable, "-m", *command]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)  # in place of a hang


ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0", "-m")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


def assert_same_run(found: dict, expected: dict) -> None:
    """Metrics with their standard errors, and samples one by one."""
    for task, metrics in expected["results"].items():
        assert_close([found["results"][task][name] for name in metrics], list(metrics.values()))
    for task, samples in expected["samples"].items():
        assert len(found["samples"][task]) == len(samples) > 0
        for mine, theirs in zip(found["samples"][task], samples, strict=True):
            for key in ("doc_id", "filter", "doc_hash", "prompt_hash", "target_hash"):
                assert mine[key] == theirs[key]
            assert [len(of) for of in mine["resps"]] == [len(of) for of in theirs["resps"]]
            assert_close(mine["resps"], theirs["resps"])
            assert_close(mine["filtered_resps"], theirs["filtered_resps"])


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

FILTERED = evaluation.task(
    "filtered",
    output_type="generate_until",
    doc_to_target="{{other}}",
    generation_kwargs={"until": ["\n\n"], "max_gen_toks": 5, "do_sample": False},
    repeats=2,
    filter_list=[
        {"name": "all", "filter": [{"function": "take_first"}]},
        {"name": "often", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]},
    ],
)
ROLLING = evaluation.task("rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
LIKELY = evaluation.task(  # standard errors by bootstrap, which depend on the order of the documents
    "likely", output_type="loglikelihood", doc_to_text="{{text}}", doc_to_target="then {{other}}"
)
CHOSEN = evaluation.task(  # demonstrations that the model chooses
    "chosen", **evaluation.CHOICE, doc_to_choice=["no", "yes"], metadata={"version": 1, "demonstrations": "herding"}
)
DECIDED = {**CHOSEN, "task": "decided", "metadata": {"version": 1, "decide": "contextual+batch"}}
TASKS = evaluation.TASKS | {task["task"]: task for task in (DECIDED, FILTERED, ROLLING, LIKELY, CHOSEN)}


def run(model: str, path: Path, names: list[str], *, limit: int = 5, **kwargs: Any) -> dict[str, Any] | None:
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
    return results and {key: results[key] for key in ("results", "samples", "config")}


def everything(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    divided = int(os.environ.get("WORLD_SIZE", "1")) > 1
    for name in NAMES:
        found[name] = run(name, folder / "llama", ["one_token", "many_tokens", "generate"])
    found["other tasks"] = run("icl", folder / "llama", ["filtered", "rolling", "likely"])
    args = {"max_length": 30}
    found["left out"] = run("icl", folder / "llama", ["many_tokens"], num_fewshot=11, args=args)
    for key in ("cache written", "cache read by one process"):
        if divided and key == "cache read by one process" and os.environ["RANK"] == "0":
            (folder / "cache_rank0.db").unlink()
        found[key] = run(
            *("icl", folder / "llama", ["one_token", "generate"]),
            use_cache=str(folder / "cache"),
            batch_size="auto",
            max_batch_size=2,
            args={"max_length": 512},
        )
    os.environ["LM_EVAL_ICL_CACHE"] = str(folder / "chosen")  # one process reads nothing of what two have chosen
    found["chosen"] = run("icl", folder / "llama", ["chosen"])
    found["decided"] = run("icl", folder / "llama", ["decided"])
    try:
        run("icl", folder / "llama", ["chosen"], num_fewshot=20)
    except InputError as error:  # of the first process, which all processes raise
        found["cannot choose"] = str(error)
    try:
        run("icl", folder / "llama", ["generate", "one_token"], limit=1)
    except InputError as error:
        found["too few"] = str(error)
    # One model over all processes, each of which has every document.
    split = {"tp_plan": "auto"} if divided else {}
    with contextlib.suppress(InputError):  # older versions of transformers refuse it
        found["tensor parallel"] = run("invicl", folder / "llama", ["one_token", "generate"], args=split)
    with contextlib.suppress(InputError):
        run("icl", folder / "llama", ["one_token"], args=split, use_cache=str(folder / "other"))
        found["tensor parallel with a cache"] = "ran"
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
    for name in [*NAMES, "other tasks", "left out", "cache written", "cache read by one process", "chosen", "decided"]:
        assert_same_run(two[name], one[name])


@pytest.mark.slow
def test_one_process_chooses_demonstrations_for_all(runs):
    two, one = (each["chosen"]["config"]["icl"]["chosen"]["chosen"] for each in runs)
    for key in ("indices", "picked", "tokens", "made_now"):
        assert two[key] == one[key], key
    assert two["made_now"] and runs[0]["cannot choose"] == runs[1]["cannot choose"]


@pytest.mark.slow
def test_a_mean_over_documents_is_over_those_of_all_processes(runs):
    two, one = (each["decided"]["config"]["icl"]["decided"]["decided"] for each in runs)
    assert two["batch"]["documents"] == one["batch"]["documents"] == 5
    assert two["batch"]["documents_sha256"] == one["batch"]["documents_sha256"]
    for rule in ("batch", "contextual"):
        assert_close(two[rule]["constants"], one[rule]["constants"])
    assert two["contextual"]["queries"] == 2 * one["contextual"]["queries"] == 6  # each process has a memory of its own


@pytest.mark.slow
@pytest.mark.pinned
def test_one_model_over_two_processes(runs):
    two, one = runs
    assert_same_run(two["tensor parallel"], one["tensor parallel"])


@pytest.mark.slow
def test_the_results_file_counts_what_both_did(runs):
    two, one = ({name: run["config"]["icl"] for name, run in each.items() if isinstance(run, dict)} for each in runs)
    assert one["left out"]["left_out"]["many_tokens"]["documents"] == 5
    assert one["left out"]["truncated"]["many_tokens"]["tokens"] > 0
    for name in ("left_out", "truncated"):
        assert two["left out"][name] == one["left out"][name]
    for name in NAMES:
        mine, alone = two[name], one[name]
        # The same requests, of which each process runs its own, each with the demonstrations.
        assert mine["tokens_run"] + mine["tokens_saved"] == alone["tokens_run"] + alone["tokens_saved"]
        assert mine["tokens_run"] > alone["tokens_run"] or name == "saicl"  # which encodes for every query anyway
    assert two["icl"]["contexts_encoded"] == 2 * one["icl"]["contexts_encoded"]
    # What came from a cache was not run, and not saved by us.
    assert one["cache read by one process"]["tokens_run"] == one["cache read by one process"]["tokens_saved"] == 0
    assert 0 < two["cache read by one process"]["tokens_run"] < two["cache written"]["tokens_run"]


@pytest.mark.slow
def test_what_several_processes_cannot_do(runs):
    two, one = runs
    assert "task 'generate' has fewer documents than there are processes (2)" in two["too few"]
    assert "too few" not in one
    assert "tensor parallel with a cache" not in two


@pytest.mark.slow
def test_a_process_leaves_the_others_before_it_ends():
    # One that does not is now and then aborted by gloo's threads.
    program = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print("still there" if dist.is_initialized() else "left"))
from lm_eval_icl.errors import InputError
from lm_eval_icl.demonstrations import choosing
from lm_eval_icl.harness.distributed import leave_in_order
leave_in_order()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


@pytest.mark.slow
def test_a_command_line(tmp_path):
    done = launch(
        *(*ACCELERATE, "tests.once", "lm_eval", "--model", "pcw", "--model_args", f"pretrained={model_path()}"),
        *("--tasks", "icl_demo_short", "--num_fewshot", "4", "--limit", "5"),
        *("--output_path", str(tmp_path), "--log_samples"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,), (samples,) = tmp_path.glob("*/results_*.json"), tmp_path.glob("*/samples_*.jsonl")
    found = json.loads(results.read_text())
    found["samples"] = {"icl_demo_short": [json.loads(line) for line in samples.read_text().splitlines()]}
    expected = evaluation.run("pcw", model_path(), ["icl_demo_short"], 4, limit=5)
    for run in (found, expected):
        for metrics in run["results"].values():
            metrics.pop("acc_stderr,none"), metrics.pop("acc_norm_stderr,none")  # the harness asks for none
    assert_same_run(found, expected)
    assert found["config"]["icl"]["contexts_encoded"] == 2


@pytest.mark.slow
def test_what_one_process_refuses_ends_all(checkpoint, tmp_path):
    """The second document, which is the second process's, does not fit."""
    documents = [{"text": "word " * (500 if i == 1 else 3)} for i in range(5)]
    asked = {"doc_to_text": "{{text}}", "doc_to_choice": ["a", "b"], "doc_to_target": 0}
    evaluation.task_file(tmp_path, "one_is_long", {"test": documents}, **asked)
    done = launch(
        *(*TORCHRUN, "tests.once", "lm_eval", "--model", "icl", "--tasks", "one_is_long"),
        *(
            "--include_path",
            str(tmp_path),
            "--model_args",
            f"pretrained={checkpoint('gpt2')},max_length=100,overflow=error",
        ),
    )
    assert done.returncode != 0
    assert done.stderr.count("lm-eval-icl: 1 of 2 documents (tasks: one_is_long) do not fit") == 1
    # The launcher's own traceback, and none of ours.
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "lm_eval_icl/" not in done.stderr


def fail_while_choosing(line: list[str]) -> None:
    """The first process fails and stays alive, as in a notebook."""
    folder, kind = Path(line[0]), line[1]
    rank = os.environ["RANK"]
    lm = evaluation.ICL(str(folder / "llama"), device="cpu", batch_size=4)

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].numel() > 80:  # more tokens than a model is tried with
            raise {"RuntimeError": RuntimeError("the kernel has failed"), "interrupt": KeyboardInterrupt()}[kind]

    if rank == "0":
        lm.model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        lm_eval.simple_evaluate(
            lm, tasks=[dict(CHOSEN)], task_manager=evaluation.manager(False), num_fewshot=2, limit=4
        )
    except BaseException as error:
        said = repr(error) if rank == "0" else str(error)
    (folder / f"{rank}.new").write_text(said)
    (folder / f"{rank}.new").rename(folder / rank)
    end = time.monotonic() + 240  # in place of a hang
    while len(list(folder.glob("[01]"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    os._exit(0)


@pytest.mark.parametrize(
    ("kind", "error", "inside"),
    [
        ("RuntimeError", "RuntimeError('the kernel has failed')", "RuntimeError: the kernel has failed"),
        ("interrupt", "KeyboardInterrupt()", "KeyboardInterrupt"),
    ],
)
def test_what_fails_in_the_process_that_acts_for_all_ends_all(tmp_path, monkeypatch, kind, error, inside):
    """Demonstrations are chosen by the first process, in which something fails that is not the user's input. It stays
    alive, as in a notebook: the others must not wait for it."""
    monkeypatch.setenv("LM_EVAL_ICL_CACHE", str(tmp_path / "cache"))  # nothing has been chosen before
    tiny.save("llama", tmp_path / "llama")
    first, _ = processes.ranks(fail_while_choosing, tmp_path, kind)
    said = {path.name: path.read_text() for path in tmp_path.glob("[01]")}
    assert said == {
        "0": error,
        "1": f"lm-eval-icl: the first process stops, and with it all others ({inside}).",
    }, first.stderr[-3000:]


@given(st.integers(0, 20), st.integers(1, 5))
def test_dealt_out_in_turn_and_joined(documents, processes):
    whole = list(range(documents))
    shares = [whole[rank::processes] for rank in range(processes)]
    assert in_order(shares) == whole
    assert in_order([{"a": share, "b": {"c": share}} for share in shares]) == {"a": whole, "b": {"c": whole}}


def test_a_metric_that_only_some_documents_give():
    assert in_order([{"t": {"a": [1]}}, {"t": {}}]) == {"t": {"a": [1]}}
    assert in_order([{"t": {}}, {"t": {"a": [2]}, "u": {"b": [3]}}]) == {"t": {"a": [2]}, "u": {"b": [3]}}


def test_a_group_that_was_there_before_is_not_left():
    """It is a trainer's, who ends it when it likes."""
    program = """
import atexit, sys
import torch.distributed as dist
atexit.register(lambda: print("still there" if dist.is_initialized() else "left"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.harness.models import icl
icl(str(model_path()), device="cpu")
atexit._run_exitfuncs()
"""
    done = processes.python(program)
    assert (done.returncode, done.stdout) == (0, "still there\n"), done.stderr


def test_samples_by_filter():
    samples = [{"filter": name, "doc_id": i} for name in ("z", "a") for i in (1, 0)]
    assert by_filter(samples) == {"z": samples[:2], "a": samples[2:]}


def test_total():
    shares = [{"n": 1, "of": {"a": {"x": 1}}}, {"n": 2, "of": {"b": {"x": 5}}}, {"n": 0, "of": {"a": {"x": 2}}}]
    assert total(shares) == {"n": 3, "of": {"a": {"x": 3}, "b": {"x": 5}}}
