"""The command `lm-eval-icl smoke`: runs every method on tiny random models."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from lm_eval_icl.errors import InputError


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl smoke`."""
    parser.description = (
        "Make a tiny random model, and run every method on it through lm-eval. The exit status is "
        "1 if a number is wrong (icl must give those of hf), or if a method fails."
    )
    parser.add_argument(
        "--arch",
        default="llama",
        metavar="TYPE[,TYPE...]",
        help="transformers model types, or the folder of a checkpoint (default: llama)",
    )
    parser.add_argument(
        "--limit", type=int, default=3, help="documents of each task (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.limit < 1:
        raise InputError(f"--limit {options.limit}: must be 1 or more.")

    # Run offline, and without the progress bars that this variable switches off.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    import transformers

    from lm_eval_icl.smoke import every_method, tiny

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()  # else it lists weights for pictures, for every method
    ran = refused = 0
    for arch in [options.arch] if Path(options.arch).is_dir() else options.arch.split(","):
        try:
            scores = every_method.smoke(arch, options.limit)
        except tiny.NoTinyModel as error:
            raise InputError(f"--arch: {error.message}") from error
        for name, by_task in scores.items():
            if not isinstance(by_task, str):
                tasks = ", ".join(task for task in by_task if not isinstance(by_task[task], str))
                print(f"{name} on {arch}: ok ({tasks})", flush=True)
                ran += 1
        for name, why in every_method.refusals(scores).items():
            print(f"{name} on {arch}: refused ({why})")
            refused += 1
    print(f"methods: {ran} ran, {refused} refusals")
