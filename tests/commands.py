"""Our commands, run in this process."""

from __future__ import annotations

import pytest

from lm_eval_icl import cli
from lm_eval_icl.errors import InputError


def run(*arguments: object) -> None:
    """Run `lm-eval-icl ARGUMENTS`."""
    cli.run([str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The one line with which `lm-eval-icl ARGUMENTS` ends, without the name of the command."""
    with pytest.raises(InputError) as refusal:
        run(*arguments)
    line = str(refusal.value)
    begin = f"lm-eval-icl: {arguments[0]}: "
    assert line.startswith(begin)
    assert "\n" not in line
    return line.removeprefix(begin)
