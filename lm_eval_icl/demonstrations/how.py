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


def make(name: str, arguments: Mapping[str, Any]) -> SelectionMethod | Similar:
    """The method with this name and these arguments, or retrieval.

    Raises:
        InputError: there is no such method or argument, or a value is refused.
    """
    if name == "similar":
        return read_into(Similar, arguments)
    if name not in SELECTION_METHODS:
        raise InputError(f"{name!r}: {suggestion(name, SELECTION_METHODS)}")
    return read_into(SELECTION_METHODS[name], arguments)


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
        known = (*SELECTION_METHODS, "similar")
        if written in DRAWN or (name not in known and Path(str(written)).is_file()):
            return None
        if name not in known:
            advice = suggestion(name, (*DRAWN, *known), "or a method that chooses: ")
            raise InputError(
                "must be stratified, random, first, or a JSON file of indices that exists; "
                f"{advice}"
            )
        return make(*spelled(str(written)))
