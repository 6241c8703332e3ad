"""The same evaluations by one process, or by as many as `torchrun -m tests.divided FOLDER` starts."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval

from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import NAMES
from tests import harness, tiny

FILTERED = harness.task(
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
ROLLING = harness.task("rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
LIKELY = harness.task(  # standard errors by bootstrap, which depend on the order of the documents
    "likely", output_type="loglikelihood", doc_to_text="{{text}}", doc_to_target="then {{other}}"
)
CHOSEN = {  # demonstrations that the model chooses
    **harness.TASKS["one_token"],
    "task": "chosen",
    "doc_to_choice": ["no", "yes"],
    "metadata": {"version": 1, "demonstrations": "herding"},
}
DECIDED = {
    **harness.TASKS["one_token"],
    "task": "decided",
    "metadata": {"version": 1, "decide": "contextual+batch"},
}
TASKS = {
    **harness.TASKS,
    "decided": DECIDED,
    "filtered": FILTERED,
    "rolling": ROLLING,
    "likely": LIKELY,
    "chosen": CHOSEN,
}


def save(folder: Path) -> None:
    """The checkpoints."""
    tiny.save("llama", folder / "llama")


def run(model: str, path: Path, names: list[str], *, limit: int = 5, **kwargs: Any) -> dict[str, Any] | None:
    """Five documents: two processes have three and two."""
    args = {"pretrained": str(path), **kwargs.pop("args", {})}
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=args,
        tasks=[copy.deepcopy(TASKS[name]) for name in names],
        task_manager=harness.manager(False),
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
    args = {"overflow": "truncate", "max_length": 30}
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


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = everything(folder)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found, default=str))
    # PyTorch's caches hold on to the groups of a model that was split by tensor parallelism, and with them to threads
    # of gloo, which now and then abort a Python interpreter that is ending.
    sys.stdout.flush()
    os._exit(0)
