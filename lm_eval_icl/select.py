"""The command `lm-eval-icl select`: demonstrations chosen by a published method, written to a file that runs read."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lm_eval_icl import version
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.arguments import check_folders, pairs
from lm_eval_icl.harness.choosing import HOW, Choice, Chooser, PoolOfTask, as_json
from lm_eval_icl.harness.identity import fingerprint
from lm_eval_icl.harness.training import ARGUMENTS, load_model, tasks_of
from lm_eval_icl.methods import ICL, Predictor
from lm_eval_icl.studies.grid import expanded

_DRAWN = ("random", "stratified")


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl select`.

    Raises:
        InputError: an argument cannot be used, or nothing can be chosen.
    """
    parser.description = "Choose demonstrations by a published method, and write them to a file for --metadata."
    parser.add_argument("how", metavar="HOW", help=", ".join(HOW))
    parser.add_argument("--model_args", metavar="K=V,...", help="the model: pretrained=..., dtype=...")
    parser.add_argument("--tasks", required=True, metavar="T,...", help="tasks with options, and groups of such")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="how many (default: the task's own number)")
    parser.add_argument("--seeds", default="1234", metavar="N,A..B", help="a choice for each (default: 1234)")
    parser.add_argument("--pool", type=int, default=5000, metavar="N", help="documents to choose from (default: 5000)")
    parser.add_argument("--args", default="", metavar="K=V,...", help="the method's arguments; balance=False for all")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.json", help="where the choice is written")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="queries in a batch (default: 8)")
    parser.add_argument("--include_path", metavar="DIR", help="a folder of further tasks")
    parser.add_argument("--metadata", default="", metavar="K=V,...", help="of the tasks, as for lm_eval")
    given = parser.parse_args(arguments)
    _check(given)
    of_method = pairs("args", given.args)
    balance = of_method.pop("balance", True)
    if not isinstance(balance, bool):
        raise InputError(f"--args balance={balance}: must be True or False.")
    seeds = _seeds(given.seeds)
    check_folders(given.include_path, None)
    names = [name for name in given.tasks.split(",") if name]
    tasks = tasks_of(names, given.include_path, pairs("metadata", given.metadata))
    pools = [PoolOfTask(task) for task in tasks]
    shots = [_shots(task, pool, given.num_fewshot) for task, pool in zip(tasks, pools, strict=True)]
    about: dict[str, Any] = {"how": given.how, "arguments": of_method, "balance": balance, "pool": given.pool}
    predictor = None
    if given.how not in _DRAWN:
        predictor, about["model"] = _load(given)
    about["version"] = version.version()
    found: dict[str, Any] = {}
    for pool, n in zip(pools, shots, strict=True):
        chooser, chosen = Chooser(pool, predictor, given.pool), dict[int, Choice]()
        for seed in seeds:
            begun, before = time.perf_counter(), predictor.runner.tokens_run if predictor else 0
            try:
                chosen[seed] = chooser.choose(given.how, n, seed, balance, **of_method)
            except InputError as error:
                raise InputError(f"task {pool.name!r}: {error.message}") from error
            tokens = predictor.runner.tokens_run - before if predictor else 0
            _say(pool, seed, chosen[seed], time.perf_counter() - begun, tokens)
        found[pool.name] = as_json(pool, n, chosen)
        _write(given.output, {"about": about, "tasks": found})
    print(f"{given.output}: lm_eval ... --metadata demonstrations={given.output} --seed 0,1234,1234,{seeds[0]}")


def _check(given: argparse.Namespace) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    if given.how not in HOW:
        near = difflib.get_close_matches(given.how.lower(), HOW, n=1)
        raise InputError(
            f"{given.how!r}: " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(HOW)}.")
        )
    if given.pool < 1:
        raise InputError(f"--pool {given.pool}: must be 1 or more.")
    if given.num_fewshot is not None and given.num_fewshot < 1:
        raise InputError(f"--num_fewshot {given.num_fewshot}: must be 1 or more.")
    if given.how in _DRAWN and given.model_args:
        raise InputError(f"--model_args: {given.how} is drawn without a model; leave it out.")
    if given.how not in _DRAWN and not given.model_args:
        raise InputError(f"--model_args: {given.how} asks a model: give pretrained=... .")
    if given.output.is_dir() or not os.access(given.output.parent, os.W_OK):
        raise InputError(f"--output {given.output}: must be a file in a folder that is there and can be written to.")


def _seeds(text: str) -> list[int]:
    seeds = expanded("--seeds", [int(part) if part.isascii() and part.isdigit() else part for part in text.split(",")])
    for seed in seeds:
        if not isinstance(seed, int) or seed < 0:
            raise InputError(f"--seeds {seed}: must be whole numbers, 0 or more, or ranges such as 0..9.")
    return seeds


def _shots(task: Any, pool: PoolOfTask, num_fewshot: int | None) -> int:
    n = task.config.num_fewshot if num_fewshot is None else num_fewshot
    if not n:
        raise InputError(f"task {pool.name!r} has no number of demonstrations of its own: give --num_fewshot.")
    return int(n)


def _load(given: argparse.Namespace) -> tuple[Predictor, dict[str, Any]]:
    """The model under plain ICL, and what tells it from others."""
    arguments: Mapping[str, Any] = pairs("model_args", given.model_args)
    if not arguments.get("pretrained"):
        raise InputError("--model_args: has no pretrained=...: give the name or folder of a checkpoint.")
    for name in sorted(arguments.keys() - ARGUMENTS):
        near = difflib.get_close_matches(name, sorted(ARGUMENTS), n=1)
        raise InputError(
            f"--model_args: unknown argument {name!r}: "
            + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(ARGUMENTS))}.")
        )
    model: Any
    model, tokenizer = load_model(arguments)
    try:
        model = model.to(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {given.device}: {str(error).splitlines()[0]}") from error
    limits = {name: arguments[name] for name in ("max_length", "add_bos_token") if name in arguments}
    predictor = Predictor(model, tokenizer, ICL(), batch_size=given.batch_size, **limits)
    said = json.dumps(fingerprint(model, tokenizer), sort_keys=True, default=str)
    return predictor, {"pretrained": str(arguments["pretrained"]), "sha256": hashlib.sha256(said.encode()).hexdigest()}


def _say(pool: PoolOfTask, seed: int, choice: Choice, seconds: float, tokens: int) -> None:
    said = [f"rows {', '.join(map(str, choice.indices))}"]
    if choice.margin is not None:
        said.append(f"the closest decision would change with relative noise of {choice.margin:.1e}")
    if choice.accuracy is not None:
        said.append(f"accuracy {choice.accuracy:.3f} where it was chosen")
    said.append(f"{seconds:.1f} s, {tokens:,} tokens")
    print(f"{pool.name}, seed {seed}: {'; '.join(said)}", flush=True)


def _write(path: Path, found: Mapping[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written ({error.strerror or error}).") from error
