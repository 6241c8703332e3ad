"""The command `lm-eval-icl smoke`: every method on tiny random models."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from pathlib import Path

from lm_eval_icl.errors import InputError


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl smoke`.

    Raises:
        InputError: an option cannot be used, or a method failed or gave a wrong number.
        SystemExit: of several model types, one gave a wrong number; or, with --strict, there are refusals.
    """
    parser.description = (
        "Make tiny random models and run every method on them through lm-eval; icl must give what hf "
        "gives. Exit status 0, or 1 if a number is wrong or a method fails."
    )
    parser.add_argument(
        "--arch", default="llama", metavar="TYPE[,TYPE...]", help="transformers model types, or all (default: llama)"
    )
    parser.add_argument("--limit", type=int, default=3, help="documents a task (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="a refusal counts as a failure")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=120,
        metavar="SECONDS",
        help="how long each of several types may take (default: 120)",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep results here; types that are in it are not run again"
    )
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error(f"--limit {options.limit}: must be 1 or more")
    if not options.time_limit > 0:
        parser.error(f"--time-limit {options.time_limit:g}: must be above 0")

    # Run offline, and without those progress bars that these variables switch off.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    from lm_eval_icl.smoke import tiny

    archs = list(tiny.types()) if options.arch == "all" else options.arch.split(",")
    try:
        for arch in archs:  # before the work on the others
            tiny.check(arch)
        single = len(archs) == 1 and options.record is None
        counts = one_type(archs[0], options.limit) if single else several_types(archs, options)
    except tiny.NoTinyModel as error:
        raise InputError(f"smoke --arch: {error.message}") from error
    print(f"methods: {counts['methods']} ran, {counts['refusals']} refusals")
    if counts["WRONG"] or (options.strict and counts["refusals"]):
        sys.exit(1)


def one_type(arch: str, limit: int) -> Counter[str]:
    """Test a model type and print a line a method. Returns how many methods ran, and how many refusals there are."""

    import transformers

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()  # or it would list, for every method, the weights for pictures
    from lm_eval_icl.smoke.smoke import refusals, smoke

    scores = smoke(arch, limit)
    for name, by_task in scores.items():
        if not isinstance(by_task, str):
            print(f"{name} on {arch}: ok ({', '.join(task for task in by_task if not isinstance(by_task[task], str))})")
    refused = refusals(scores)
    for why in dict.fromkeys(refused.values()):
        print(f"{', '.join(name for name in refused if refused[name] == why)} on {arch}: refused ({why})")
    return Counter(methods=sum(not isinstance(by_task, str) for by_task in scores.values()), refusals=len(refused))


def several_types(archs: list[str], options: argparse.Namespace) -> Counter[str]:
    """Test several model types and print a line a type. Returns how many types have which status, how many methods ran,
    and how many refusals there are."""
    from lm_eval_icl.smoke.smoke import sweep

    counts: Counter[str] = Counter()
    for result in sweep(archs, options.limit, options.time_limit, options.record):
        counts.update([result.status])
        counts.update(methods=len(result.ran), refusals=len(result.refused))
        reason = result.why or ("refused: " + ", ".join(result.refused) if result.refused else "")
        print(f"{result.status:<8} {result.arch:<24} {result.seconds:5.1f} s  {reason}".rstrip(), flush=True)
    print(
        f"{len(archs)} types: {counts['exact']} exact, {counts['refused']} refused, {counts['none']} without a tiny "
        f"model, {counts['WRONG']} wrong"
    )
    return counts
