"""How numbers are written: the same on the page, in the terminal, in figures and in tables."""

import math
from types import SimpleNamespace

import pytest

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.results.board import Column

ACCURACY = Column("a", "task", "acc", percent=True, higher_is_better=True, weights={"a": 1})
PERPLEXITY = Column(
    "b", "task", "word_perplexity", percent=False, higher_is_better=False, weights={"b": 1}
)
M = numbers.MINUS
D = numbers.DASH


@pytest.mark.parametrize(
    "x, text", [(0.0123456, "0.01235"), (99.996, "100"), (-0.0, "0"), (None, D)]
)
def test_numbers_of_any_size(x, text):
    assert numbers.number(x) == text


@pytest.mark.parametrize(
    "x, column, value, signed",
    [
        (0.1234, ACCURACY, "12.3%", "+12.3 points"),
        (-0.1, ACCURACY, f"{M}10.0%", f"{M}10.0 points"),
        (12.3456, PERPLEXITY, "12.35", "+12.3"),
        (None, PERPLEXITY, D, D),
    ],
)
def test_values_and_differences(x, column, value, signed):
    assert numbers.value(x, column, unit=True) == value
    assert numbers.signed(x, column, unit=True) == signed
    assert numbers.value(x, column) == value.rstrip("%")
    assert numbers.signed(x, column) == signed.removesuffix(" points")


@pytest.mark.parametrize(
    "low, high, plain, signed",
    [
        (0.831, 0.874, f"83.1{D}87.4%", "+83.1 to +87.4 points"),
        (-0.003, 0.027, f"{M}0.3 to 2.7%", f"{M}0.3 to +2.7 points"),
        (-math.inf, math.inf, f"{D}{D}{D}", f"{D} to {D}"),
    ],
)
def test_intervals(low, high, plain, signed):
    of = SimpleNamespace(mean=0, low=low, high=high)
    assert numbers.interval(of, ACCURACY, unit=True) == plain
    assert numbers.interval(of, ACCURACY, sign=True, unit=True) == signed


@pytest.mark.parametrize(
    "mean, low, high, text",
    [
        (0.85, 0.83, 0.87, "± 2.0"),
        (0.715, 0.088, 1.0, f"[8.8{D}100.0]"),
        (1.0, 0.8, 1.0, f"[80.0{D}100.0]"),
        (0.5, 0.0, 1.0, f"[0.0{D}100.0]"),
        (0.9, 0.85, 0.93, f"[85.0{D}93.0]"),
        (0.5, -math.inf, math.inf, ""),
    ],
)
def test_plus_or_minus_is_written_for_even_intervals_inside_the_range_alone(mean, low, high, text):
    estimate = SimpleNamespace(mean=mean, low=low, high=high)
    assert numbers.spread(estimate, ACCURACY) == text


@pytest.mark.parametrize(
    "p, text", [(1e-5, "<0.0001"), (0.0234, "0.023"), (1.0, "1.00"), (None, D)]
)
def test_p_values(p, text):
    assert numbers.p_value(p) == text


def test_numbers_of_things():
    assert numbers.count(1, "set") == "1 set"
    assert numbers.count(1200, "set") == "1,200 sets"


@pytest.mark.parametrize(
    "verdict, column, judged",
    [
        ("higher", ACCURACY, "better"),
        ("higher", PERPLEXITY, "worse"),
        ("lower", PERPLEXITY, "better"),
        ("undecided", ACCURACY, "undecided"),
        ("equivalent", PERPLEXITY, "equivalent"),
    ],
)
def test_what_a_difference_says(verdict, column, judged):
    assert column.judged(SimpleNamespace(verdict=lambda margin: verdict)) == judged
