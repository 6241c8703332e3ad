"""The command `lm-eval-icl select`: demonstrations chosen by a published method, written to a file
that runs read."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_icl import version
from lm_eval_icl.cli import add_options
from lm_eval_icl.cli.reading import model_arguments
from lm_eval_icl.demonstrations.how import SELECTION_METHODS, SelectionMethod, read
from lm_eval_icl.errors import InputError, log, naming, refusing, writing
from lm_eval_icl.files import write_atomically
from lm_eval_icl.harness.arguments import check_folder, pairs
from lm_eval_icl.studies.grid import expanded

if TYPE_CHECKING:
    from lm_eval_icl.methods import Predictor


_OPTIONS = {
    "num_fewshot": ("N", int, "how many to choose (default: the task's number)"),
    "device": ("DEVICE", str, "cpu, cuda, ... (default: a GPU if there is one)"),
    "include_path": ("DIR", str, "a folder of further tasks"),
    "metadata": ("K=V,...", str, "metadata of the tasks, as for lm_eval"),
}


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl select`."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    log.setLevel(logging.WARNING)
    parser.description = (
        "Choose demonstrations by a published method, and write them to a file for --metadata."
    )
    args = _read_options(parser, arguments)
    how = read(args.how)
    if not isinstance(how, SelectionMethod):
        raise InputError(
            f"{args.how!r}: is no such method: give one of {', '.join(SELECTION_METHODS)}."
        )
    seeds = _seeds(args.seeds)
    output = args.output
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise InputError(
            f"--output {output}: must be a file in a folder that exists and can be written to."
        )
    check_folder(args.include_path)

    from lm_eval_icl.demonstrations.chooser import Chooser
    from lm_eval_icl.demonstrations.kept import about_model
    from lm_eval_icl.harness.model_choices import PoolOfTask
    from lm_eval_icl.harness.training import tasks_of

    shots_by_pool: dict[PoolOfTask, int] = {}
    names = [name for name in args.tasks.split(",") if name]
    if not names:
        raise InputError("--tasks: names no task.")
    for task in tasks_of(names, args.include_path, pairs("metadata", args.metadata or "")):
        shots = task.config.num_fewshot if args.num_fewshot is None else args.num_fewshot
        if not shots or shots < 1:
            raise InputError(
                f"--num_fewshot: give how many demonstrations task {task.config.task!r} gets, 1 or "
                "more."
            )
        shots_by_pool[PoolOfTask(task)] = int(shots)
    predictor, model = _load(args)
    about = {"how": str(how), "model": about_model(*model), "version": version.version()}
    tasks: dict[str, Any] = {}
    for pool, shots in shots_by_pool.items():
        chooser = Chooser(pool, predictor, how.pool)
        chosen = {}
        for seed in seeds:
            with naming(f"task {pool.name!r}"):
                choice = chooser.choose(how, shots, seed)
            chosen[str(seed)] = choice.as_json()
            rows = ", ".join(map(str, choice.indices))
            cost = f"{choice.seconds:.1f} s, {choice.tokens:,} tokens"
            print(f"{pool.name}, seed {seed}: rows {rows}; {cost}", flush=True)
        digest = {"rows": len(pool.docs), "sha256": pool.docs_digest}
        tasks[pool.name] = {"n": shots, "pool": digest, "seeds": chosen}
        with writing(f"--output {output}"):
            text = json.dumps({"about": about, "tasks": tasks}, indent=1)
            write_atomically(output, text + "\n")
    print(f"{output}: lm_eval ... --metadata demonstrations={output} --seed 0,1234,1234,{seeds[0]}")


def _read_options(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    parser.add_argument(
        "how",
        metavar="HOW",
        help=f"{', '.join(SELECTION_METHODS)}; arguments follow as in lens:m=200:rho=3, and all methods take "
        "pool=N and balance=False",
    )
    parser.add_argument(
        "--model_args",
        required=True,
        metavar="K=V,...",
        help="the model: pretrained=..., dtype=...",
    )
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="T,...",
        help="tasks with options, and groups of such tasks",
    )
    parser.add_argument(
        "--seeds",
        default="1234",
        metavar="N,A..B",
        help="the seeds, each of which gets its own choice (default: 1234)",
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE.json", help="the file for the choices"
    )
    parser.add_argument(
        "--batch_size", type=int, default=8, metavar="N", help="queries in a batch (default: 8)"
    )
    add_options(parser, _OPTIONS)
    return parser.parse_args(arguments)


def _seeds(written: str) -> list[int]:
    with naming("--seeds"):
        seeds = expanded([int(text) if text.isdecimal() else text for text in written.split(",")])
    for seed in seeds:
        if not isinstance(seed, int):
            raise InputError(
                f"--seeds {seed}: must be whole numbers, 0 or more, or ranges such as 0..9."
            )
    return seeds


def _load(args: argparse.Namespace) -> tuple[Predictor, tuple[str, Mapping[str, Any]]]:
    """The model under plain ICL, its name, and the facts that tell it from other models."""
    import torch

    from lm_eval_icl.inference.checkpoints import load_model
    from lm_eval_icl.inference.identity import files_digest, hub_commit, model_identity
    from lm_eval_icl.methods import ICL, Predictor

    model: Any
    arguments = model_arguments(args.model_args)
    model, tokenizer = load_model(arguments)
    with refusing(f"--device {args.device}"):
        model = model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    limits = {
        name: arguments[name] for name in ("max_length", "add_bos_token") if name in arguments
    }
    predictor = Predictor(model, tokenizer, ICL(), batch_size=args.batch_size, **limits)
    commit = hub_commit(arguments["pretrained"], arguments.get("revision"))
    identity = model_identity(model, files_digest(**arguments), commit)
    return predictor, (str(arguments["pretrained"]), identity)
