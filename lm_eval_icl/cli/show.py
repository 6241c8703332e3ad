"""The command `lm-eval-icl show`: the layout that a method runs, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError, one_line


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl show`."""
    parser.description = (
        "Draw the layout that a method runs: which token sees which, at which position; in the terminal, "
        "or as a picture."
    )
    parser.epilog = (
        'A FILE of --prompt is JSON: {"prefix": "...", "demonstrations": ["...", ...], "query": "...", '
        '"answer": "..."}, each with the blanks and line breaks that stand there; prefix and answer may be left out.'
    )
    names = ", ".join(methods.NAMES)
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
    methods.find(options.method)  # first, since an unknown method can be said without importing what draws

    from rich.console import Console

    from lm_eval_icl.drawing import drawing, picture, terminal

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.output is not None:
        picture.check_output(options.output)  # before anything is loaded
    arguments_of_method = {}
    if options.args:
        from lm_eval.utils import simple_parse_args_string

        arguments_of_method = simple_parse_args_string(options.args)
    try:
        method = methods.make(options.method, arguments_of_method)
    except InputError as error:
        raise InputError(f"{'--args: ' if options.args else ''}{error.message}") from error
    if options.prompt is None:
        parts = drawing.example(3 if options.shots is None else options.shots)
    else:
        import transformers

        from lm_eval_icl.smoke import demo

        transformers.logging.set_verbosity_error()
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
