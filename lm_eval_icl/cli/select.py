"""The command `lm-eval-icl select`: demonstrations chosen by a published method, written to a file that runs read."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_icl.demonstrations.how import METHODS, How, make
from lm_eval_icl.demonstrations.select import near
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.files import write_atomically
from lm_eval_icl.harness.arguments import check_folders, pairs
from lm_eval_icl.studies.grid import expanded

if TYPE_CHECKING:
    from lm_eval_icl.demonstrations.choosing import Choice
    from lm_eval_icl.harness.pools import PoolOfTask
    from lm_eval_icl.methods import Predictor

_DRAWN = ("random", "stratified")
HOW = (*_DRAWN, *METHODS)


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl select`.

    Raises:
        InputError: an argument cannot be used, or nothing can be chosen.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    log.setLevel(logging.WARNING)  # what a search will cost
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
    given_arguments = pairs("args", given.args)
    if given.how in _DRAWN:
        how = How(given.how, given_arguments, pool=given.pool)
    else:
        how = make(given.how, {"pool": given.pool, **given_arguments})
    seeds = _seeds(given.seeds)
    check_folders(given.include_path, None)

    from lm_eval_icl.demonstrations.choosing import Chooser
    from lm_eval_icl.demonstrations.kept import about, as_json
    from lm_eval_icl.harness.pools import PoolOfTask
    from lm_eval_icl.harness.training import tasks_of

    names = [name for name in given.tasks.split(",") if name]
    tasks = tasks_of(names, given.include_path, pairs("metadata", given.metadata))
    pools = [PoolOfTask(task) for task in tasks]
    shots = [_shots(task, pool, given.num_fewshot) for task, pool in zip(tasks, pools, strict=True)]
    predictor, model = (None, None) if given.how in _DRAWN else _load(given)
    said = about(how, model)
    found: dict[str, Any] = {}
    for pool, n in zip(pools, shots, strict=True):
        chooser, chosen = Chooser(pool, predictor, how.pool), dict[int, "Choice"]()
        for seed in seeds:
            try:
                chosen[seed] = chooser.choose(how.name, n, seed, how.balance, **how.arguments)
            except InputError as error:
                raise InputError(f"task {pool.name!r}: {error.message}") from error
            _say(pool, seed, chosen[seed])
        found[pool.name] = as_json(pool, n, chosen)
        _write(given.output, {"about": said, "tasks": found})
    print(f"{given.output}: lm_eval ... --metadata demonstrations={given.output} --seed 0,1234,1234,{seeds[0]}")


def _check(given: argparse.Namespace) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    if given.how not in HOW:
        raise InputError(f"{given.how!r}: {near(given.how, HOW)}")
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


def _load(given: argparse.Namespace) -> tuple[Predictor, dict[str, str]]:
    """The model under plain ICL, and what tells it from others."""
    import torch

    from lm_eval_icl.demonstrations.kept import about_model
    from lm_eval_icl.inference.checkpoints import ARGUMENTS, load_model
    from lm_eval_icl.inference.fingerprint import fingerprint
    from lm_eval_icl.methods import ICL, Predictor

    arguments: Mapping[str, Any] = pairs("model_args", given.model_args)
    if not arguments.get("pretrained"):
        raise InputError("--model_args: has no pretrained=...: give the name or folder of a checkpoint.")
    for name in sorted(arguments.keys() - ARGUMENTS):
        raise InputError(f"--model_args: unknown argument {name!r}: {near(name, sorted(ARGUMENTS))}")
    model: Any
    model, tokenizer = load_model(arguments)
    try:
        model = model.to(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {given.device}: {str(error).splitlines()[0]}") from error
    limits = {name: arguments[name] for name in ("max_length", "add_bos_token") if name in arguments}
    predictor = Predictor(model, tokenizer, ICL(), batch_size=given.batch_size, **limits)
    return predictor, about_model(str(arguments["pretrained"]), fingerprint(model, tokenizer))


def _say(pool: PoolOfTask, seed: int, choice: Choice) -> None:
    said = [f"rows {', '.join(map(str, choice.indices))}"]
    if choice.accuracy is not None:
        said.append(f"accuracy {choice.accuracy:.3f} where it was chosen")
    said.append(f"{choice.seconds:.1f} s, {choice.tokens:,} tokens")
    print(f"{pool.name}, seed {seed}: {'; '.join(said)}", flush=True)


def _write(path: Path, found: Mapping[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written ({error.strerror or error}).") from error
