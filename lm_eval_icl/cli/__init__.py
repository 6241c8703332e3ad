"""The console command `lm-eval-icl`. Each of its commands is the file here of that name, with the function `command`,
which takes a parser without arguments and the command line. It raises an `InputError` for what it refuses.

Other commands are lm-eval's own (lm_eval.py), with this package's models and tasks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from typing import NoReturn

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import interrupt
from lm_eval_icl.harness.shim import give_way  # which also registers our models and tasks, without the `.pth` file

COMMANDS = {
    "demo": "eight methods on the model that comes with the package, offline",
    "show": "which token sees which, at which position",
    "smoke": "a smoke test of every method",
    "train": "fine-tune a model under a method",
    "study": "a paper's table, or a grid of one's own, in one run",
    "select": "demonstrations chosen by a published method",
    "leaderboard": "results files into a table, a page and figures",
    "compare": "two runs, or two rows of a leaderboard",
    "collect": "one small file a run, for a leaderboard that is shared",
    "export": "results in others' formats",
}
# The advice after a Ctrl-C, by command; these go on where they were stopped.
_GO_ON = {
    "train": " With --resume, the same command goes on from the last checkpoint.",
    "study": " The same command goes on from what is in its folder.",
}


def main() -> None:
    """Run a command. An `InputError` becomes one line on standard error, and exit status 1."""
    give_way()
    name = "".join(sys.argv[1:2])
    line = f"{name}: interrupted.{_GO_ON.get(name, '')}"
    if name in COMMANDS:
        interrupt.never_ignored(lambda: line, terminated=name == "study")
    try:
        try:
            run(sys.argv[1:])
        except KeyboardInterrupt as stopped:
            if name not in COMMANDS:
                raise
            kept = str(stopped) or line  # what is kept, if the command knows
            interrupt.end(stopped, lambda: kept)
        finally:
            sys.stdout.flush()
    except InputError as error:
        sys.exit(str(error))
    except BrokenPipeError:  # `lm-eval-icl show invicl | head` closes the pipe; Python would print an error on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as a shell says of a program that this signal ended


def run(arguments: list[str]) -> None:
    """Run a command, ours or lm-eval's.

    Raises:
        InputError: it is refused; the message begins with the command's name.
    """
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        importlib.import_module("lm_eval_icl.cli.lm_eval").command(arguments)
        return
    try:
        parser = OneLine(prog=f"lm-eval-icl {name}", allow_abbrev=False)
        importlib.import_module(f"lm_eval_icl.cli.{name}").command(parser, arguments[1:])
    except InputError as error:
        begins = error.message.startswith((f"{name}: ", f"{name} "))
        raise InputError(error.message if begins else f"{name}: {error.message}") from error


class OneLine(argparse.ArgumentParser):
    """A parser that raises an `InputError`, as the rest of the package does, in place of usage and exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog.removeprefix('lm-eval-icl ')}: {message} ({self.prog} --help).")
