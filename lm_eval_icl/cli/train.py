"""The command `lm-eval-icl train`: fine-tunes a model under the layout of a method."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError, checked_whole, did_you_mean, naming
from lm_eval_icl.harness.arguments import check_folders, pairs
from lm_eval_icl.metaicl.files import MetaICLFolder, setting_of
from lm_eval_icl.training.settings import Settings, with_numbers

if TYPE_CHECKING:
    from lm_eval_icl.methods.base import Method
    from lm_eval_icl.training.episodes import Task

# The options that are not settings of the training itself. Each may stand in the file of --config too.
OPTIONS = {
    "model_args": ("K=V,...", "pretrained=M, the method's arguments, and others as for hf"),
    "tasks": ("T1,T2", "tasks of lm-eval with a training split, or groups of them"),
    "episodes": ("FILE.jsonl", "in place of tasks: rows with task, input, output and options"),
    "metaicl": ("SETTING", "in place of tasks: MetaICL's training tasks of a setting, such as hr_to_lr"),
    "data": ("DIR", "with --metaicl: the folder of MetaICL's data"),
    "train_k": ("K", "with --metaicl: the K in the names of the training files (default: 16384)"),
    "channel": ("", "with --metaicl: give the output, and train on the input"),
    "output": ("DIR", "the folder of the trained checkpoint"),
    "fits": ("METHOD,...", "use only episodes whose rows' tokens fit the model under these methods too"),
    "include_path": ("DIR", "a folder of further tasks"),
    "metadata": ("K=V,...", "metadata of the tasks, as for lm-eval"),
    "device": ("DEVICE", "cpu, or the accelerator that is there (the default)"),
    "dry_run": ("", "say what there is to train on and what is left out, and train nothing"),
}

# The defaults with --metaicl, which are MetaICL's own; and the K in the names of its training files.
METAICL: dict[str, Any] = {"num_fewshot": 16, "draw": "row", "eval_steps": 0}
TRAIN_K = 16384


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl train`."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    parser.description = "Fine-tune a model under the layout of a method, on episodes of demonstrations and a query."
    options = read_options(parser, arguments)
    methods.find(options["method"])  # first, since an unknown method can be said without importing what trains

    import torch
    from accelerate import PartialState

    training(options)()
    if options.get("dry_run"):
        return
    processes = PartialState()
    processes.wait_for_everyone()
    if processes.is_main_process:
        method, output = options["method"], options["output"]
        print(f"{output}: trained under {method}. lm_eval --model {method} --model_args pretrained={output}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # a process that ends before the others would abort them


def training(options: Mapping[str, Any]) -> Callable[[], None]:
    """A training with these options, which are checked as far as can be done without the model and the data.

    Args:
        options: those of the command, by name.

    Returns:
        What trains the model and writes the checkpoint.

    Raises:
        InputError: an option cannot be used.
    """
    from lm_eval_icl.harness.training import HarnessTask, check_tasks, tasks_of
    from lm_eval_icl.inference.checkpoints import load_model
    from lm_eval_icl.metaicl.files import skips
    from lm_eval_icl.metaicl.reading import reader
    from lm_eval_icl.methods.predictor import Predictor
    from lm_eval_icl.training.episodes import read_file
    from lm_eval_icl.training.metaicl import SettingTask, load_rows
    from lm_eval_icl.training.rows import check_trainable
    from lm_eval_icl.training.train import check_lora, train

    check_known(options, "")
    defaults = METAICL if "metaicl" in options else {}
    named = {name: options[name] for name in Settings.model_fields if name in options}
    settings = Settings(**defaults | named)
    model_args = pairs("model_args", options.get("model_args", {}))
    if not model_args.get("pretrained"):
        raise InputError("--model_args: has no pretrained=...: give the name or folder of a checkpoint.")
    method = _method(options["method"], model_args)
    check_lora(settings)
    check_trainable(method, settings.loss)
    fits = [methods.make(name) for name in _names(options.get("fits", ()))]
    for other in fits:
        check_trainable(other)
    if "output" not in options and not options.get("dry_run"):
        raise InputError("--output: give the folder of the trained checkpoint.")
    for name in ("resume", "dry_run"):
        if not isinstance(options.get(name, False), bool):
            raise InputError(f"--{name} {options[name]!r}: must be true or false.")
    if sum(name in options for name in ("tasks", "episodes", "metaicl")) != 1:
        raise InputError("--tasks, --episodes, --metaicl: give one of them.")
    files = _metaicl_files(options, settings)
    _check_device(options.get("device"))
    metadata = pairs("metadata", options.get("metadata", {}))
    names = _names(options.get("tasks", ()))
    if "tasks" in options:
        check_folders(options.get("include_path"), None)
        if not names:
            raise InputError("--tasks: names no task.")
        check_tasks(names, options.get("include_path"), metadata)

    def run() -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tasks: Sequence[Task]
        if "episodes" in options:
            tasks = read_file(Path(str(options["episodes"])))
        elif files is None:
            tasks = [HarnessTask(task) for task in tasks_of(names, options.get("include_path"), metadata)]
        else:
            rows = load_rows(str(options["metaicl"]), files, int(options.get("train_k", TRAIN_K)), skips(metadata))
        model, tokenizer = load_model(model_args)
        if files is not None:
            predictor = Predictor(model, tokenizer, method, max_length=model_args.get("max_length"))
            limits = predictor.limits
            read = dataclasses.replace(
                reader(tokenizer, model_args.get("add_bos_token"), limits.positions),
                alike=method.treats_demonstrations_alike,
                longest_first=limits.longest_go_first,
                canonical=predictor.runner.invariant,
            )
            tasks = [SettingTask(name, own, read, options.get("channel", False)) for name, own in rows.items()]
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
                "model_args": {name: str(model_args[name]) for name in sorted(model_args)},
                "metadata": metadata,
                **{name: options[name] for name in ("metaicl", "channel") if name in options},
            },
            max_length=model_args.get("max_length"),
            add_bos_token=model_args.get("add_bos_token"),
            resume=options.get("resume", False),
            cpu=options.get("device") == "cpu",
            dry_run=options.get("dry_run", False),
        )

    return run


def read_options(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, Any]:
    """The arguments of the command line, and those of the --config file that the command line does not have."""
    parser.argument_default = argparse.SUPPRESS
    trained = "icl, nope, prefixicl, pcw, saicl, invicl, sbp, star, or MODULE:CLASS"
    parser.add_argument("method", metavar="METHOD", nargs="?", help=trained)
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="arguments, by name")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    for name, (metavar, what) in OPTIONS.items():
        if metavar:
            parser.add_argument(f"--{name}", metavar=metavar, help=what)
        else:
            parser.add_argument(f"--{name}", action="store_true", help=what)
    helps = {line.strip().partition(": ")[0]: line.partition(": ")[2] for line in (Settings.__doc__ or "").splitlines()}
    for name, field in Settings.model_fields.items():
        what = helps[name].rstrip(".").replace("%", "%%").replace("`", "")
        kind = type(field.default)
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true", help=what)
        else:
            what = f"{what} (default: {field.default})"
            parser.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=what)
    line = vars(parser.parse_args(arguments))
    options = _file(line.pop("config")) | line if "config" in line else line
    check_known(options, "--config: ")
    if not options.get("method"):
        raise InputError("give the METHOD to train under, such as invicl (train --help).")
    return options


def check_known(options: Mapping[str, Any], where: str) -> None:
    """Refuse an option that does not exist; `where` stands before the message."""
    known = {*OPTIONS, "method", "resume", *Settings.model_fields}
    if unknown := sorted(options.keys() - known):
        near = did_you_mean(unknown[0], known)
        raise InputError(f"{where}unknown argument {unknown[0]!r}" + (f": {near}" if near else "."))


def _file(path: Path) -> dict[str, Any]:
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: cannot be read ({' '.join(str(error).split())}).") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise InputError(f"--config {path}: must hold arguments by name, such as tasks: [icl_sst2].")
    with naming(f"--config {path}"):
        return with_numbers({name: value for name, value in options.items() if value is not None})


def _names(listed: Any) -> list[str]:
    names = listed if isinstance(listed, (list, tuple)) else str(listed).split(",")
    return [str(name).strip() for name in names if str(name).strip()]


def _method(name: str, model_args: Mapping[str, Any]) -> Method:
    from lm_eval_icl.inference.checkpoints import ARGUMENTS

    own = methods.arguments_of(methods.find(name))
    for argument in sorted(set(model_args) - own - ARGUMENTS):
        near = did_you_mean(argument, sorted(own | ARGUMENTS))
        what = near or f"training takes {', '.join(sorted(ARGUMENTS))}."
        raise InputError(f"unknown model argument {argument!r}: {what}")
    return methods.make(name, {key: value for key, value in model_args.items() if key in own})


def _metaicl_files(options: Mapping[str, Any], settings: Settings) -> MetaICLFolder | None:
    """The folder of MetaICL's data, if its rows are trained on."""
    if "metaicl" not in options:
        for name in ("data", "train_k", "channel"):
            if name in options:
                raise InputError(f"--{name}: goes with --metaicl.")
        return None
    if "data" not in options:
        raise InputError("--data: give the folder of MetaICL's data.")
    if settings.loss != "query":
        raise InputError(f"--loss {settings.loss}: MetaICL's loss is that of the query: leave it out.")
    if not isinstance(options.get("channel", False), bool):
        raise InputError(f"--channel {options['channel']!r}: must be true or false.")
    k = options.get("train_k", TRAIN_K)
    checked_whole("--train_k", int(k) if str(k).isdigit() else k)  # the command line gives a text
    setting_of(str(options["metaicl"]))
    return MetaICLFolder(str(options["data"]), "--data")


def _check_device(device: str | None) -> None:
    """Refuse a device that Trainer would not take."""
    if device in (None, "cpu"):
        return
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or device != accelerator.type:
        here = f"here is {accelerator.type}" if accelerator is not None else "here is no accelerator"
        raise InputError(
            f"--device {device}: {here}; CUDA_VISIBLE_DEVICES chooses one of several GPUs. Give cpu, or leave it out."
        )
