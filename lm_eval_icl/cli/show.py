"""The command `lm-eval-icl show`: draws the layout of a method, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from lm_eval_icl import methods
from lm_eval_icl.errors import naming
from lm_eval_icl.harness.arguments import pairs


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl show`."""
    parser.description = "Draw which token sees which, and at which position, under a method."
    names = ", ".join(methods.NAMES)
    parser.add_argument("method", metavar="METHOD", help=f"{names}, or MODULE:CLASS")
    parser.add_argument(
        "--args", default="", metavar="K=V,...", help="the method's arguments, as in --model_args"
    )
    parser.add_argument(
        "--shots", type=int, default=3, help="the number of demonstrations (default: 3)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the file of a picture, .svg or .png"
    )
    options = parser.parse_args(arguments)
    methods.find(options.method)  # an unknown method is refused before the slow imports

    from rich.console import Console

    from lm_eval_icl.drawing import drawing, picture, terminal

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.output is not None:
        picture.check_output(options.output)  # before anything is loaded
    method_arguments = pairs("args", options.args)
    with naming("--args"):
        method = methods.make(options.method, method_arguments)
    drawn = drawing.draw(method, options.shots)
    if options.output is not None:
        picture.save(drawn, options.output)
        print(f"{method.name}: drawn in {options.output}")
        return
    console = Console()
    text = terminal.as_text(drawn, width=console.width if console.is_terminal else None)
    console.print(text, soft_wrap=True, end="\n\n")
    print("As a picture: --output FILE.svg or FILE.png")
