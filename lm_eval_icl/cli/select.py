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
from lm_eval_icl.errors import InputError, log, naming, writing
from lm_eval_icl.files import write_atomically
from lm_eval_icl.harness.arguments import check_folders, pairs
from lm_eval_icl.studies.grid import expanded

if TYPE_CHECKING:
    from lm_eval_icl.methods import Predictor

_DRAWN = ("random", "stratified")
HOW = (*_DRAWN, *METHODS)


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl select`."""
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
    args = parser.parse_args(arguments)
    _check(args)
    arguments_of_how = pairs("args", args.args)
    if args.how in _DRAWN:
        how = How(args.how, arguments_of_how, pool=args.pool)
    else:
        how = make(args.how, {"pool": args.pool, **arguments_of_how})
    texts = args.seeds.split(",")
    with naming("--seeds"):
        seeds = expanded([int(text) if text.isascii() and text.isdigit() else text for text in texts])
    for seed in seeds:
        if not isinstance(seed, int) or seed < 0:
            raise InputError(f"--seeds {seed}: must be whole numbers, 0 or more, or ranges such as 0..9.")
    check_folders(args.include_path, None)

    from lm_eval_icl.demonstrations.choosing import Choice, Chooser
    from lm_eval_icl.demonstrations.kept import about, as_json
    from lm_eval_icl.harness.pools import PoolOfTask
    from lm_eval_icl.harness.training import tasks_of

    names = [name for name in args.tasks.split(",") if name]
    tasks = tasks_of(names, args.include_path, pairs("metadata", args.metadata))
    shots_of_pools: dict[PoolOfTask, int] = {}
    for task in tasks:
        pool, shots = PoolOfTask(task), task.config.num_fewshot if args.num_fewshot is None else args.num_fewshot
        if not shots:
            raise InputError(f"task {pool.name!r} has no number of demonstrations of its own: give --num_fewshot.")
        shots_of_pools[pool] = int(shots)
    predictor, model = (None, None) if args.how in _DRAWN else _load(args)
    about_choices = about(how, model)
    by_task: dict[str, Any] = {}
    for pool, shots in shots_of_pools.items():
        chooser, chosen = Chooser(pool, predictor, how.pool), dict[int, Choice]()
        for seed in seeds:
            with naming(f"task {pool.name!r}"):
                chosen[seed] = choice = chooser.choose(how.name, shots, seed, how.balance, **how.arguments)
            accuracy = "" if choice.accuracy is None else f"accuracy {choice.accuracy:.3f} where it was chosen; "
            cost = f"{choice.seconds:.1f} s, {choice.tokens:,} tokens"
            rows = ", ".join(map(str, choice.indices))
            print(f"{pool.name}, seed {seed}: rows {rows}; {accuracy}{cost}", flush=True)
        by_task[pool.name] = as_json(pool, shots, chosen)
        with writing(f"--output {args.output}"):
            write_atomically(args.output, json.dumps({"about": about_choices, "tasks": by_task}, indent=1) + "\n")
    print(f"{args.output}: lm_eval ... --metadata demonstrations={args.output} --seed 0,1234,1234,{seeds[0]}")


def _check(args: argparse.Namespace) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    if args.how not in HOW:
        raise InputError(f"{args.how!r}: {near(args.how, HOW)}")
    for name in ("pool", "num_fewshot"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise InputError(f"--{name} {number}: must be 1 or more.")
    if args.how in _DRAWN and args.model_args:
        raise InputError(f"--model_args: {args.how} is drawn without a model; leave it out.")
    if args.how not in _DRAWN and not args.model_args:
        raise InputError(f"--model_args: {args.how} asks a model: give pretrained=... .")
    if args.output.is_dir() or not os.access(args.output.parent, os.W_OK):
        raise InputError(f"--output {args.output}: must be a file in a folder that is there and can be written to.")


def _load(args: argparse.Namespace) -> tuple[Predictor, dict[str, str]]:
    """The model under plain ICL, and what tells it from others."""
    import torch

    from lm_eval_icl.demonstrations.kept import about_model
    from lm_eval_icl.inference.checkpoints import ARGUMENTS, load_model
    from lm_eval_icl.inference.identity import files_digest, hub_commit, model_identity
    from lm_eval_icl.methods import ICL, Predictor

    arguments: Mapping[str, Any] = pairs("model_args", args.model_args)
    if not arguments.get("pretrained"):
        raise InputError("--model_args: has no pretrained=...: give the name or folder of a checkpoint.")
    for name in sorted(arguments.keys() - ARGUMENTS):
        raise InputError(f"--model_args: unknown argument {name!r}: {near(name, sorted(ARGUMENTS))}")
    model: Any
    model, tokenizer = load_model(arguments)
    try:
        model = model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    limits = {name: arguments[name] for name in ("max_length", "add_bos_token") if name in arguments}
    predictor = Predictor(model, tokenizer, ICL(), batch_size=args.batch_size, **limits)
    commit = hub_commit(arguments["pretrained"], arguments.get("revision"))
    identity = model_identity(model, files_digest(**arguments), commit)
    return predictor, about_model(str(arguments["pretrained"]), identity)
