"""The console command `lm-eval-icl`: this package's commands, and lm-eval's with this package's models and tasks."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from lm_eval_icl import methods, version
from lm_eval_icl.errors import InputError, one_line
from lm_eval_icl.harness import interrupt, patches
from lm_eval_icl.harness.shim import give_way  # which also registers our models and tasks, without the `.pth` file

# What is said after a Ctrl-C, of the commands that go on where they were stopped.
_GO_ON = {
    "train": " With --resume, the same command goes on from the last checkpoint.",
    "study": " The same command goes on from what is in its folder.",
}


def main() -> None:
    """Run a command. An `InputError` becomes one line on standard error, and exit status 1."""
    give_way()
    try:
        try:
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except InputError as error:
        sys.exit(str(error))
    except BrokenPipeError:  # `lm-eval-icl show invicl | head` closes the pipe; Python would print an error on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as a shell says of a program that this signal ended


def _run(arguments: list[str]) -> None:
    if arguments[:1] and arguments[0] in COMMANDS:
        line = f"{arguments[0]}: interrupted.{_GO_ON.get(arguments[0], '')}"
        interrupt.never_ignored(lambda: line, terminated=arguments[0] == "study")
        try:
            COMMANDS[arguments[0]][1](arguments[1:])
        except KeyboardInterrupt as stopped:
            said = str(stopped) or line  # what is kept, if the command knows
            interrupt.end(stopped, lambda: said)
        return
    if arguments == ["--version"]:
        print(f"lm-eval-icl {version.version()} (commit {version.commit() or 'unknown'})")
        for name in ("lm-eval", "transformers", "torch"):  # without importing them, which takes seconds
            print(name, importlib.metadata.version(name))
        return
    if arguments in ([], ["-h"], ["--help"]):
        for name, (what, _) in COMMANDS.items():
            print(f"lm-eval-icl {name} --help: {what}")
        print("lm-eval-icl --version: the versions of this package, lm-eval, transformers and torch")
        print("All other arguments are lm-eval's own:\n")
    _lm_eval(arguments)


def _lm_eval(arguments: list[str]) -> None:
    """Run lm-eval's command line, with models and tasks registered even if the `.pth` file is not installed."""
    with ExitStack() as stack:
        try:
            _check_command(arguments)
            stack.enter_context(patches.of_our_commands())
        except KeyboardInterrupt as stopped:
            interrupt.end(stopped, lambda: "interrupted before anything was run.")

        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry

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
            if unknown := re.match("Attempted to load model '(.*?)'", str(error)):
                near = difflib.get_close_matches(unknown[1].lower(), list(model_registry), n=1)
                known = f"did you mean {near[0]!r}?" if near else f"the methods are {', '.join(methods.NAMES)}."
                raise InputError(f"--model: unknown model {unknown[1]!r}: {known}") from error
            raise
        except AssertionError as error:
            if str(error).startswith("Elements of --samples"):
                raise InputError(f"--samples: a task has no document of such a number ({error})") from error
            raise


def _check_command(arguments: list[str]) -> None:
    """Refuse a command that is neither ours nor lm-eval's, which would take it for an argument of `run`."""
    from lm_eval._cli import HarnessCLI

    known = [*COMMANDS, *HarnessCLI()._subparsers.choices]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        near = difflib.get_close_matches(arguments[0], known, n=1)
        there = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
        raise InputError(f"unknown command {arguments[0]!r}: {there}")


class _OneLine(argparse.ArgumentParser):
    """A parser that raises an `InputError`, as the rest of the package does, in place of usage and exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog.removeprefix('lm-eval-icl ')}: {message} ({self.prog} --help).")


def _smoke(arguments: list[str]) -> None:
    parser = _OneLine(
        prog="lm-eval-icl smoke",
        description="Make tiny random models and run every method on them through lm-eval; icl must give what hf "
        "gives. Exit status 0, or 1 if a number is wrong or a method fails.",
    )
    parser.add_argument(
        "--arch", default="llama", metavar="TYPE[,TYPE...]", help="transformers model types, or all (default: llama)"
    )
    parser.add_argument("--limit", type=int, default=3, help="documents a task (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="a refusal counts as a failure")
    parser.add_argument(
        "--time-limit", type=float, default=120, metavar="SECONDS", help="of several types, for each (default: 120)"
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
        one = len(archs) == 1 and options.record is None
        counts = _smoke_one(archs[0], options.limit) if one else _smoke_several(archs, options)
    except tiny.NoTinyModel as error:
        raise InputError(f"smoke --arch: {error.message}") from error
    print(f"methods: {counts['methods']} ran, {counts['refusals']} refusals")
    if counts["WRONG"] or (options.strict and counts["refusals"]):
        sys.exit(1)


def _smoke_one(arch: str, limit: int) -> Counter[str]:
    """Test a model type and print a line a method. Returns how many methods ran, and how many refusals there are."""
    import logging

    import transformers

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()  # or it would list, for every method, the weights for pictures
    from lm_eval_icl.smoke.smoke import refusals, smoke

    scores = smoke(arch, limit)
    for name, of in scores.items():
        if not isinstance(of, str):
            print(f"{name} on {arch}: ok ({', '.join(task for task in of if not isinstance(of[task], str))})")
    refused = refusals(scores)
    for why in dict.fromkeys(refused.values()):
        print(f"{', '.join(name for name in refused if refused[name] == why)} on {arch}: refused ({why})")
    return Counter(methods=sum(not isinstance(of, str) for of in scores.values()), refusals=len(refused))


def _smoke_several(archs: list[str], options: argparse.Namespace) -> Counter[str]:
    """Test several model types and print a line a type. Returns how many types have which status, how many methods ran,
    and how many refusals there are."""
    from lm_eval_icl.smoke.smoke import sweep

    counts: Counter[str] = Counter()
    for result in sweep(archs, options.limit, options.time_limit, options.record):
        counts.update([result.status])
        counts.update(methods=len(result.ran), refusals=len(result.refused))
        said = result.why or ("refused: " + ", ".join(result.refused) if result.refused else "")
        print(f"{result.status:<8} {result.arch:<24} {result.seconds:5.1f} s  {said}".rstrip(), flush=True)
    print(
        f"{len(archs)} types: {counts['exact']} exact, {counts['refused']} refused, {counts['none']} without a tiny "
        f"model, {counts['WRONG']} wrong"
    )
    return counts


def _show(arguments: list[str]) -> None:
    parser = _OneLine(
        prog="lm-eval-icl show",
        description="Draw the layout that a method runs: which token sees which, at which position; in the terminal, "
        "or as a picture.",
        epilog='A FILE of --prompt is JSON: {"prefix": "...", "demonstrations": ["...", ...], "query": "...", '
        '"answer": "..."}, each with the blanks and line breaks that stand there; prefix and answer may be left out.',
        allow_abbrev=False,
    )
    names = ", ".join((*methods.NAMES, *methods.installed()))
    parser.add_argument("method", metavar="METHOD", help=f"{names}, or MODULE:CLASS")
    parser.add_argument("--args", default="", metavar="K=V,...", help="the method's arguments, as in --model_args")
    parser.add_argument("--shots", type=int, help="demonstrations of the example (default: 3)")
    parser.add_argument("--prompt", metavar="FILE", help="a prompt of your own in place of the example; - reads stdin")
    parser.add_argument("--pretrained", help="whose tokenizer reads --prompt (default: the embedded demo model's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a picture, .svg or .png")
    options = parser.parse_args(arguments)
    if options.prompt is not None and options.shots is not None:
        parser.error("--shots is for the example; with --prompt the file's demonstrations are drawn")
    if options.prompt is None and options.pretrained is not None:
        parser.error("--pretrained is the tokenizer of a --prompt, and there is none")
    try:
        _draw(options)
    except InputError as error:
        raise InputError(f"show: {error.message}") from error


def _draw(options: argparse.Namespace) -> None:
    import logging

    import transformers
    from lm_eval.utils import simple_parse_args_string
    from rich.console import Console

    from lm_eval_icl.drawing import drawing, picture, terminal
    from lm_eval_icl.smoke import demo

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    if options.output is not None:
        picture.check_output(options.output)  # before anything is loaded
    methods.find(options.method)  # first, so that the error for an unknown method does not blame --args
    try:
        method = methods.make(options.method, simple_parse_args_string(options.args))
    except InputError as error:
        raise InputError(f"{'--args: ' if options.args else ''}{error.message}") from error
    if options.prompt is None:
        parts = drawing.example(3 if options.shots is None else options.shots)
    else:
        pretrained = options.pretrained or str(demo.model_path())
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
        except Exception as error:  # the Hub, a missing folder and a broken file raise different ones
            raise InputError(
                f"--pretrained {pretrained}: no tokenizer could be loaded from there ({one_line(error)})."
            ) from error
        parts = drawing.read_prompt(options.prompt, tokenizer, method)
    drawn = drawing.draw(method, parts)
    if options.output is not None:
        picture.save(drawn, options.output)
        print(f"{method.name}: drawn in {options.output}")
        return
    console = Console()
    text = terminal.as_text(
        drawn,
        width=console.width if console.is_terminal else None,
        glyphs=terminal.UNICODE if "utf" in console.encoding else terminal.ASCII,
    )
    with console.capture() as captured:  # rich would end a process whose reader has gone as one that failed
        console.print(text, soft_wrap=True)
    print(captured.get())
    print("As a picture: --output FILE.svg or FILE.png")


def _train(arguments: list[str]) -> None:
    import logging

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    from lm_eval_icl.cli import train

    _command("train", train.command, arguments)


def _study(arguments: list[str]) -> None:
    import logging

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval_icl.cli import study

    _command("study", study.command, arguments)


def _select(arguments: list[str]) -> None:
    import logging

    from lm_eval_icl.errors import log

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    log.setLevel(logging.WARNING)  # what a search will cost
    from lm_eval_icl.cli import select

    _command("select", select.command, arguments)


def _of_results(name: str) -> Callable[[list[str]], None]:
    """A command that reads results files: see `lm_eval_icl.cli.leaderboards`."""

    def run(arguments: list[str]) -> None:
        from lm_eval_icl.cli import leaderboards

        _command(name, getattr(leaderboards, name), arguments)

    return run


def _command(name: str, run: Callable[[argparse.ArgumentParser, list[str]], None], arguments: list[str]) -> None:
    """Run a command that fills its parser itself; its errors begin with its name."""
    try:
        run(_OneLine(prog=f"lm-eval-icl {name}", allow_abbrev=False), arguments)
    except InputError as error:
        begins = error.message.startswith(f"{name}: ")  # those of the parser
        raise InputError(error.message if begins else f"{name}: {error.message}") from error


COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "smoke": ("a smoke test of every method", _smoke),
    "train": ("fine-tune a model under a method", _train),
    "study": ("a paper's table, or a grid of one's own, in one run", _study),
    "select": ("demonstrations chosen by a published method", _select),
    "leaderboard": (
        "results files into a table, a page and figures",
        _of_results("leaderboard"),
    ),
    "compare": ("two runs, or two rows of a leaderboard", _of_results("compare")),
    "collect": (
        "one small file a run, for a leaderboard that is shared",
        _of_results("collect"),
    ),
    "export": ("results in others' formats", _of_results("export")),
    "show": ("which token sees which, at which position", _show),
}
