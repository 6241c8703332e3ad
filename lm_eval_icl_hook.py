"""Makes `lm_eval --model icl` work as typed with lm-eval 0.4.13, which does not look for plugins.

Python imports this module when it starts, in every program of the environment: lm_eval_icl.pth says
so and, from Python 3.15 on, lm_eval_icl.start. Here the command line is read, and in every program
but lm-eval's command that is all. `os` is there already: site has imported it.
"""

import os
import sys


def program_of(arguments: list[str]) -> str:
    """What Python runs, by the words after its own name: "-m MODULE", or the path of a script.
    Empty for -c, for standard input, and without a program."""
    words = iter(arguments)
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, "")
        elif word == "--":
            return next(words, "")
        elif word == "-":
            return ""
        elif not word.startswith("-"):
            return word
        elif not word.startswith("--"):
            # Options of one letter may share a word: -um lm_eval, -uXutf8.
            for place, letter in enumerate(word):
                value = word[place + 1 :]
                if letter == "m":
                    return f"-m {value or next(words, '')}"
                if letter == "c":
                    return ""
                if letter in "WX":
                    if not value:
                        next(words, "")
                    break
    return ""


def is_lm_eval(program: str) -> bool:
    """Whether a program (see `program_of`) is lm-eval's command: `-m lm_eval`, the package's folder
    or file, or one of its two scripts, which Windows calls lm_eval.exe or lm_eval-script.py."""
    if program.startswith("-m "):
        return program in ("-m lm_eval", "-m lm_eval.__main__")
    path = program.replace("\\", "/").removesuffix("/").removesuffix("/__main__.py")
    script = path.rpartition("/")[2].removesuffix(".exe").removesuffix("-script.py")
    return script in ("lm_eval", "lm-eval")


def start() -> None:
    """Register this package with lm-eval if the program is lm-eval's command.

    LM_EVAL_ICL=1 in the environment says that it is, and LM_EVAL_ICL=0 that it is not. A second
    call changes nothing.
    """
    answer = os.environ.get("LM_EVAL_ICL")
    if answer == "1" or (answer != "0" and is_lm_eval(program_of(sys.orig_argv[1:]))):
        from lm_eval_icl import errors  # importing the package registers it

        errors.show_as_lines()


start()
