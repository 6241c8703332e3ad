"""Decision rules: which option wins, given the log-probabilities of all. Pure functions of arrays.

A rule is imported when it is first used, since scipy takes half a second: a study is checked without it.
"""

import importlib
from typing import Any

_MODULES = {
    "additive": ("batch", "contextual", "log_mean_exp", "log_normalized", "pmi"),
    "neighbors": ("hidden", "knn"),
}


def __getattr__(name: str) -> Any:
    for module, rules in _MODULES.items():
        if name in rules:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
