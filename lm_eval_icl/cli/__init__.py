"""The console command `lm-eval-icl`. Each of its commands is a file of that name in this folder, with the function
`command(parser, arguments)`, which adds the command's arguments to the parser and runs the command.

All other commands are lm-eval's own, with this package's models and tasks, which importing it registers.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from lm_eval_icl import version
from lm_eval_icl.errors import (
    InputError,
    did_you_mean,
    naming,
    one_line_with_place,
    show_as_lines,
)

COMMANDS = {
    "demo": "run eight methods on the model that comes with the package, offline",
    "show": "draw which token sees which, and at which position",
    "smoke": "run a smoke test of every method",
    "train": "fine-tune a model under a method",
    "study": "run a paper's table, or your own grid",
    "select": "choose demonstrations by a published method",
    "leaderboard": "make a table, a page and figures from results files",
    "compare": "compare two runs, or two rows of a leaderboard",
    "samples": "show the documents behind a number, or behind two",
    "collect": "make one small file of each run, for a shared leaderboard",
    "tasks": "list the tasks of this package, or say where they are",
}


class Terminated(KeyboardInterrupt):
    """SIGTERM, with which a scheduler warns a process before it kills the process."""


def main() -> None:
    """Run a command, ours or lm-eval's. An error in our commands is one line on standard error, with exit status 1, or
    130 after Ctrl-C and 143 after SIGTERM. With --debug, an error that is not an `InputError` has its traceback."""

    def terminate(number: int, frame: object) -> NoReturn:
        raise Terminated

    name = "".join(sys.argv[1:2])
    if name not in COMMANDS:
        if near := did_you_mean(name, COMMANDS):
            sys.exit(f"lm-eval-icl: there is no command {name!r}: {near}")
        lm_eval(sys.argv[1:])
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        run([argument for argument in sys.argv[1:] if argument != "--debug"])
    except InputError as error:
        sys.exit(str(error))
    except KeyboardInterrupt as stopped:
        how = "terminated" if isinstance(stopped, Terminated) else "interrupted"
        kept = (
            " What is done is kept. Run the same command to continue."
            if name in ("demo", "study")
            else ""
        )
        print(f"\nlm-eval-icl: {name}: {how}.{kept}", file=sys.stderr)
        sys.exit(143 if how == "terminated" else 130)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        sys.exit(f"lm-eval-icl: {name}: {one_line_with_place(error)} (--debug shows the traceback)")


def lm_eval(arguments: list[str]) -> None:
    """Run lm-eval's command line. Its --help begins with our commands, and --version prints our versions instead."""
    if arguments == ["--version"]:
        print(f"lm-eval-icl {version.version()} (commit {version.commit() or 'unknown'})")
        for name in (
            "lm-eval",
            "transformers",
            "torch",
        ):  # without importing them, which takes seconds
            print(name, importlib.metadata.version(name))
        return
    if arguments in ([], ["-h"], ["--help"]):
        print("lm-eval-icl evaluates in-context-learning methods as models of lm-eval.\n")
        print(*(f"lm-eval-icl {name} --help: {what}" for name, what in COMMANDS.items()), sep="\n")
        print(
            "lm-eval-icl --version: the versions of this package, lm-eval, transformers and torch"
        )
        print("All other arguments are lm-eval's own:\n")
    from lm_eval.__main__ import cli_evaluate

    show_as_lines()
    cli_evaluate()


def run(arguments: list[str]) -> None:
    """Run one of our commands.

    Raises:
        InputError: the input is wrong; the message begins with the command's name.
    """
    name = arguments[0]
    parser = OneLine(
        prog=f"lm-eval-icl {name}", allow_abbrev=False, epilog="--debug shows an error's traceback."
    )
    with naming(name):
        importlib.import_module(f"lm_eval_icl.cli.{name}").command(parser, arguments[1:])


class OneLine(argparse.ArgumentParser):
    """A parser that raises an `InputError`, like the rest of the package, instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} ({self.prog} --help).")


def add_options(
    parser: argparse.ArgumentParser, options: Mapping[str, tuple[str, type, str]]
) -> None:
    """Add options with one value each, or none.

    Args:
        options: name -> what stands for the value in --help; its type (bool for an option without a
            value); and what the option does.
    """
    for name, (metavar, kind, what) in options.items():
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true", help=what)
        else:
            parser.add_argument(f"--{name}", metavar=metavar, type=kind, help=what)
