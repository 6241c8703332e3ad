"""lm-eval's own commands, with this package's models and tasks registered even if the `.pth` file is not installed."""

from __future__ import annotations

import importlib.metadata
import re
import traceback
from contextlib import ExitStack

from lm_eval_icl import version
from lm_eval_icl.cli import COMMANDS
from lm_eval_icl.errors import InputError, did_you_mean
from lm_eval_icl.harness import interrupt, patches, plugin


def command(arguments: list[str]) -> None:
    """Run lm-eval's command line; before its --help and in place of --version, print what is ours.

    Raises:
        InputError: there is no such command, model, task or document.
    """
    if arguments == ["--version"]:
        print(f"lm-eval-icl {version.version()} (commit {version.commit() or 'unknown'})")
        for name in ("lm-eval", "transformers", "torch"):  # without importing them, which takes seconds
            print(name, importlib.metadata.version(name))
        return
    if arguments in ([], ["-h"], ["--help"]):
        for name, what in COMMANDS.items():
            print(f"lm-eval-icl {name} --help: {what}")
        print("lm-eval-icl --version: the versions of this package, lm-eval, transformers and torch")
        print("All other arguments are lm-eval's own:\n")
    with ExitStack() as stack:
        try:
            _check_names(arguments)
            stack.enter_context(patches.of_our_commands())
        except KeyboardInterrupt as stopped:
            interrupt.end(stopped, lambda: "interrupted before anything was run.")

        from lm_eval.__main__ import cli_evaluate

        try:
            cli_evaluate()
        except ValueError as error:
            if str(error).startswith("No tasks specified"):
                message = str(error).partition(".")[0]
                raise InputError(f"--tasks: {message}. `lm-eval-icl ls tasks` lists those there are.") from error
            if missing := re.match("Tasks not found: ([^,]*)", str(error)):
                from lm_eval_icl.harness.task_errors import unknown_task

                # The index of tasks, which takes seconds to make, is in the frame where a task was looked for.
                frames = {frame.f_code.co_name: frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)}
                manager, config = (frames.get("process_tasks", {}).get(name) for name in ("task_manager", "self"))
                known = manager.all_tasks if manager else ()
                raise InputError(
                    f"--tasks: {unknown_task(missing[1], known, config and config.include_path)}"
                ) from error
            if unknown := re.match("Attempted to load model '(.*?)'", str(error)):  # in a file of --config
                plugin.check_model(unknown[1])
            raise
        except AssertionError as error:
            if str(error).startswith("Elements of --samples"):
                raise InputError(f"--samples: a task has no document of such a number ({error})") from error
            raise


def _check_names(arguments: list[str]) -> None:
    """Refuse a command that is neither ours nor lm-eval's, which would take it for an argument of `run`; and an unknown
    model, before what the patches need is imported."""
    from lm_eval._cli import HarnessCLI

    parsers = HarnessCLI()._subparsers.choices
    known = [*COMMANDS, *parsers]
    first = arguments[0] if arguments else "--help"
    if not first.startswith("-") and first not in known:
        near = did_you_mean(first, known) or f"there are {', '.join(known)}."
        raise InputError(f"unknown command {first!r}: {near}")
    if first == "run" or first.startswith(("--m", "-M")):
        model = parsers["run"].parse_known_args(arguments[first == "run" :])[0].model
        if model is not None:
            plugin.check_model(model)
