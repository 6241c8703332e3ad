"""The console command `lm-eval-icl`: lm-eval's own command line with our models, a smoke test, and drawings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from lm_eval_icl import plugin
from lm_eval_icl.errors import InputError


def main() -> None:
    """`smoke ...`, `show ...`, or whatever `lm_eval` takes, also where the start-up shim is not installed."""
    if sys.argv[1:2] == ["smoke"]:
        _smoke(sys.argv[2:])
        return
    if sys.argv[1:2] == ["show"]:
        _show(sys.argv[2:])
        return
    from lm_eval.__main__ import cli_evaluate

    plugin.register_models()
    plugin.add_task_dir()
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print("lm-eval-icl smoke --help: a smoke test of every method")
        print("lm-eval-icl show --help: which token sees which, at which position; all else is lm-eval's own:\n")
    try:
        cli_evaluate()
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        raise InputError(f"lm-eval-icl: --tasks: {error}. `lm-eval-icl ls tasks` lists those there are.") from error


def _smoke(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lm-eval-icl smoke",
        description="Make a tiny random model and run every method on it through lm-eval. "
        "Exit code 0, or one line that says what broke.",
    )
    parser.add_argument("--arch", default="llama", help="a transformers model type (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=3, help="documents a task (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error(f"--limit {options.limit}: must be 1 or more")

    import logging
    import os

    # Offline, and with fewer progress bars: those that lm-eval switches by itself stay.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval_icl.smoke import smoke

    for name, scores in smoke(options.arch, options.limit).items():
        said = f"refused ({scores})" if isinstance(scores, str) else f"ok ({', '.join(scores)})"
        print(f"{name} on {options.arch}: {said}")


class _OneLine(argparse.ArgumentParser):
    """Refuses with one line, as the rest of the package does, in place of the usage and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog.replace(' ', ': ')}: {message} ({self.prog} --help).")


def _show(arguments: list[str]) -> None:
    parser = _OneLine(
        prog="lm-eval-icl show",
        description="Draw the layout that a method runs: which token sees which, at which position; in the terminal, "
        "or as a picture.",
        epilog='A FILE of --prompt is JSON: {"prefix": "...", "demonstrations": ["...", ...], "query": "...", '
        '"answer": "..."}, each with the blanks and line breaks that stand there; prefix and answer may be left out.',
        allow_abbrev=False,
    )
    parser.add_argument("method", metavar="METHOD", help=f"{', '.join(plugin.MODELS)}, or MODULE:CLASS")
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

    import logging

    import transformers
    from rich.console import Console

    from lm_eval_icl import demo, picture, show, terminal

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    if options.output is not None:
        picture.check_output(options.output)  # before anything is loaded
    method = show.make_method(options.method, options.args)
    if options.prompt is None:
        parts = show.example(3 if options.shots is None else options.shots)
    else:
        parts = show.read_prompt(options.prompt, options.pretrained or str(demo.model_path()), method)
    drawing = show.draw(method, parts)
    if options.output is not None:
        picture.save(drawing, options.output)
        print(f"{method.name}: drawn in {options.output}")
        return
    console = Console()
    text = terminal.as_text(
        drawing,
        room=console.width if console.is_terminal else None,
        glyphs=terminal.UNICODE if "utf" in console.encoding else terminal.ASCII,
    )
    console.print(text, soft_wrap=True)
    print("\nAs a picture: --output FILE.svg or FILE.png")
