"""The tests under plain mode (`make test-plain`): its default is switched on, in this process and in forked ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

import pytest

ON = os.environ.get("PLAIN") == "1"

# Why tests cannot pass under plain mode -> the tests: a file, or a file and the beginning of a name.
SKIPPED: dict[str, tuple[str, ...]] = {}


@functools.cache
def install() -> None:
    """Make `plain=True` the default of models, of runners and of `Predictor`."""
    from lm_eval_icl.harness.arguments import CommonArguments
    from lm_eval_icl.methods.predictor import Predictor
    from lm_eval_icl.methods.runner import MethodRunner

    *defaults, plain = CommonArguments.__init__.__defaults__
    assert plain is False
    CommonArguments.__init__.__defaults__ = (*defaults, True)
    for cls in (MethodRunner, Predictor):
        cls.__init__.__kwdefaults__["plain"] = True


def skip(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of `SKIPPED`."""
    for item in items:
        for reason, tests in SKIPPED.items():
            if any(item.nodeid.startswith(f"tests/{test}") for test in tests):
                item.add_marker(pytest.mark.skip(reason=f"plain mode: {reason}"))
