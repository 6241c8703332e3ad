"""What a sample cannot show is said as a mark of the cell."""

from __future__ import annotations

import pytest

from lm_eval_icl.results.build import build
from lm_eval_icl.results.read import read
from tests.boards import write

RETRIEVED = {"metadata": {"demonstrations": "similar"}}


def marks(folder, seeds=(0,), **settings):
    for seed in seeds:
        write(folder, seed=seed, **settings)
    [entry] = build(*read([folder], quiet=True)).entries
    return set(entry.cells["t"].marks)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {"one set"}),
        ({"seeds": range(2)}, {"few seeds"}),
        ({"seeds": range(5)}, set()),
        ({"n": 29, "seeds": range(5)}, {"few documents"}),
        ({"gold": [1] * 40, "seeds": range(5)}, {"one label"}),
        ({"gold": [1] * 39 + [0], "seeds": range(5)}, set()),
        (RETRIEVED, set()),
        ({"shots": 0}, set()),
    ],
)
def test_marks(tmp_path, settings, expected):
    assert marks(tmp_path, **settings) == expected
