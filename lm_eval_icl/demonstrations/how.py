"""Reads how demonstrations are chosen, as users write it.

A method that chooses is written `herding`, `lens:m=500:rho=2` or {lens: {m: 500, rho: 2}}.
Retrieval is written `similar:by=bm25`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_icl.declared import read_into, spelled
from lm_eval_icl.demonstrations.draw import DRAWN
from lm_eval_icl.demonstrations.searches import BestRandom, Lens
from lm_eval_icl.demonstrations.selector import SelectionMethod
from lm_eval_icl.demonstrations.selectors import SELECTORS
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError, naming, suggestion

SELECTION_METHODS: Mapping[str, type[SelectionMethod]] = {
    "best_random": BestRandom,
    **SELECTORS,
    "lens": Lens,
}
# What `demonstrations` may name with arguments.
WITH_ARGUMENTS: Mapping[str, type[SelectionMethod | Similar]] = {
    **SELECTION_METHODS,
    "similar": Similar,
}


def make(name: str, arguments: Mapping[str, Any]) -> SelectionMethod | Similar:
    """The method with this name and these arguments, or retrieval.

    Raises:
        InputError: there is no such method or argument, or a value is refused.
    """
    if name not in WITH_ARGUMENTS:
        raise InputError(f"{name!r}: {suggestion(name, WITH_ARGUMENTS)}")
    return read_into(WITH_ARGUMENTS[name], arguments)


def read(written: Any) -> SelectionMethod | Similar | None:
    """The method that the setting `demonstrations` names.

    None if it names a way of drawing (`draw.DRAWN`) or a file.

    Raises:
        InputError: there is no such method, way of drawing or file, or an argument is refused.
    """
    text = written if isinstance(written, str) else json.dumps(written, default=str)
    with naming(f"demonstrations={text}"):
        if isinstance(written, Mapping):
            if len(written) != 1:
                raise InputError(
                    'must be one method with its arguments, such as {"lens": {"m": 500}}.'
                )
            [(name, arguments)] = written.items()
            return make(str(name), arguments or {})
        name = str(written).partition(":")[0]
        if name in WITH_ARGUMENTS:
            return make(*spelled(str(written)))
        if written in DRAWN or Path(str(written)).is_file():
            return None
        ways = suggestion(name, (*DRAWN, *WITH_ARGUMENTS))
        raise InputError(
            f"must be a way of choosing, or a JSON file of indices that exists; {ways}"
        )
