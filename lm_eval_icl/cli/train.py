"""The command `lm-eval-icl train`: fine-tunes a model under the layout of a method."""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_icl import methods
from lm_eval_icl.cli.reading import model_arguments
from lm_eval_icl.declared import arguments_of, meaning_of, range_of
from lm_eval_icl.errors import InputError, suggestion
from lm_eval_icl.harness.arguments import check_folder, pairs
from lm_eval_icl.metaicl.data import MetaICLFolder, setting_of
from lm_eval_icl.training.settings import Settings

if TYPE_CHECKING:
    from lm_eval_icl.methods.base import Method

# The options that are not settings of the training itself.
OPTIONS = {
    "model_args": ("K=V,...", "pretrained=M, the method's arguments, and others as for hf"),
    "tasks": ("T1,T2", "tasks of lm-eval with a training split, or groups of such tasks"),
    "episodes": (
        "FILE.jsonl",
        "instead of --tasks: a file of rows with task, input, output and options",
    ),
    "metaicl": (
        "SETTING",
        "instead of --tasks: MetaICL's training tasks of a setting, such as hr_to_lr",
    ),
    "data": ("DIR", "with --metaicl: the folder of MetaICL's data"),
    "train_k": ("K", "with --metaicl: the K in the names of the training files (default: 16384)"),
    "channel": ("", "with --metaicl: train on the input, given the output"),
    "output": ("DIR", "the folder of the trained checkpoint"),
    "fits": ("METHOD,...", "use only episodes whose rows also fit the model under these methods"),
    "include_path": ("DIR", "a folder of further tasks"),
    "metadata": ("K=V,...", "metadata of the tasks, as for lm-eval"),
    "device": ("DEVICE", "cpu, ... (default: the accelerator, if there is one)"),
    "dry_run": ("", "print the numbers of rows and of rows that are left out, and train nothing"),
}

# The defaults with --metaicl, which are MetaICL's own.
METAICL: dict[str, Any] = {"num_fewshot": 16, "draw": "row", "eval_steps": 0}


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl train`."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    parser.description = (
        "Fine-tune a model under the layout of a method, on episodes of demonstrations and a query."
    )
    options = read_options(parser, arguments)
    methods.find(options["method"])  # an unknown method is refused before the slow imports

    import torch
    from accelerate import PartialState

    training(options)()
    if options.get("dry_run"):
        return
    processes = PartialState()
    processes.wait_for_everyone()
    if processes.is_main_process:
        method = options["method"]
        output = options["output"]
        how = f"lm_eval --model {method} --model_args pretrained={output}"
        print(f"{output}: trained under {method}. {how}")
    if torch.distributed.is_initialized():
        # Otherwise a process that ends first would abort the other processes.
        torch.distributed.destroy_process_group()


def training(options: Mapping[str, Any]) -> Callable[[], None]:
    """A function that trains a model with these options of the command, and writes its checkpoint.
    The options are checked now, as far as this is possible without the model and the data."""
    import torch

    from lm_eval_icl.harness.training import check_tasks
    from lm_eval_icl.training.rows import check_trainable

    known = {*OPTIONS, "method", "resume", *arguments_of(Settings)}
    for name in options.keys() - known:  # a study's file may have any
        raise InputError(f"unknown argument {name!r}: {suggestion(name, sorted(known))}")
    given = {name: options[name] for name in arguments_of(Settings) if name in options}
    settings = Settings(**(METAICL if "metaicl" in options else {}) | given)
    names = methods.arguments_of(methods.find(options["method"]))
    model_args = model_arguments(options.get("model_args", {}), names)
    method = methods.make(
        options["method"], {name: value for name, value in model_args.items() if name in names}
    )
    fits = [methods.make(name) for name in _names(options.get("fits", ()))]
    check_trainable(method, settings.loss)
    if "output" not in options and not options.get("dry_run"):
        raise InputError("--output: give the folder of the trained checkpoint.")
    if sum(name in options for name in ("tasks", "episodes", "metaicl")) != 1:
        raise InputError("--tasks, --episodes, --metaicl: give one of them.")
    if options.get("device", "cpu") != "cpu" and not torch.accelerator.is_available():
        raise InputError(
            f"--device {options['device']}: torch finds no accelerator here: give cpu, or leave it out."
        )
    if "metaicl" in options:
        if settings.loss != "query":
            raise InputError(
                f"--loss {settings.loss}: MetaICL's loss is that of the query: leave it out."
            )
        if "data" not in options:
            raise InputError("--data: give the folder of MetaICL's data.")
        setting_of(str(options["metaicl"]))
        MetaICLFolder(str(options["data"]), "--data")
    if "tasks" in options:
        check_folder(options.get("include_path"))
        metadata = pairs("metadata", options.get("metadata", {}))
        if not (tasks := _names(options["tasks"])):
            raise InputError("--tasks: names no task.")
        check_tasks(tasks, options.get("include_path"), metadata)
    return functools.partial(_train, options, settings, model_args, method, fits)


def _train(
    options: Mapping[str, Any],
    settings: Settings,
    model_args: dict[str, Any],
    method: Method,
    fits: Sequence[Method],
) -> None:
    """Load the data and the model, and train."""
    from lm_eval_icl.harness.training import HarnessTask, tasks_of
    from lm_eval_icl.inference.checkpoints import load_model
    from lm_eval_icl.metaicl.data import skips
    from lm_eval_icl.methods.predictor import Predictor
    from lm_eval_icl.training.episodes import read_file
    from lm_eval_icl.training.finetune import train
    from lm_eval_icl.training.metaicl_tasks import load_rows, setting_tasks

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    metadata = pairs("metadata", options.get("metadata", {}))
    tasks = list[Any]()
    rows = {}
    if "episodes" in options:
        tasks += read_file(Path(str(options["episodes"])))
    elif "tasks" in options:
        names = _names(options["tasks"])
        tasks += map(HarnessTask, tasks_of(names, options.get("include_path"), metadata))
    else:
        data = MetaICLFolder(str(options["data"]), "--data")
        k = options.get("train_k", 16384)
        rows = load_rows(str(options["metaicl"]), data, k, skips(metadata))
    model, tokenizer = load_model(model_args)
    channel = options.get("channel", False)
    bos = model_args.get("add_bos_token")
    limits: dict[str, Any] = {"max_length": model_args.get("max_length"), "add_bos_token": bos}
    if rows:
        predictor = Predictor(model, tokenizer, method, **limits)
        tasks += setting_tasks(rows, predictor, channel, bos)
    train(
        model,
        tokenizer,
        method,
        tasks,
        Path(str(options.get("output", ""))),
        settings,
        fits=fits,
        source=str(model_args["pretrained"]),
        identity={
            "model_args": {name: str(value) for name, value in sorted(model_args.items())},
            "metadata": metadata,
            "metaicl": options.get("metaicl"),
            "channel": channel,
        },
        **limits,
        resume=options.get("resume", False),
        cpu=options.get("device") == "cpu",
        dry_run=options.get("dry_run", False),
    )


def read_options(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, Any]:
    """The arguments of the command line, without those that were not given."""
    parser.argument_default = argparse.SUPPRESS
    trained = "a method of one pass, such as icl, pcw or invicl (docs/training.md), or MODULE:CLASS"
    parser.add_argument("method", metavar="METHOD", help=trained)
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint in --output"
    )
    for name, (metavar, what) in OPTIONS.items():
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        parser.add_argument(f"--{name}", help=what, **kind)
    for name, hint in arguments_of(Settings).items():
        default = getattr(Settings, name)
        meaning = meaning_of(hint)
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=meaning)
        else:
            meaning = f"{meaning} ({range_of(hint)}; default: {default})"
            metavar = "NAME" if isinstance(default, str) else "N"
            parser.add_argument(f"--{name}", metavar=metavar, help=meaning)
    return vars(parser.parse_args(arguments))


def _names(listed: Any) -> list[str]:
    names = listed if isinstance(listed, (list, tuple)) else str(listed).split(",")
    return [str(name).strip() for name in names if str(name).strip()]
