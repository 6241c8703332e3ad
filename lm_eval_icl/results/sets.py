"""The sets of demonstrations of a cell, and what its repeated runs are: confirmation or copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lm_eval_icl.results.board import PromptSet, TaskRun, grouped

NO_SET = "no demonstrations"
# Log-likelihoods of one model differ by no more than this on other machines, relatively.
_ROUNDING = {"float16": 0.05, "bfloat16": 0.05}
_ROUNDING_FLOAT32 = 1e-4


def prompt_sets(units: Sequence[TaskRun]) -> tuple[tuple[PromptSet, ...], list[str]]:
    """The answers by set of demonstrations, within a set by format and order; and marks about
    repeated runs. Runs with the same prompts count once, unless more was drawn by other seeds. A
    format changes the texts of the demonstrations, so the set in a format is found by its seed."""
    by_seed = {unit.run.seed: unit.answers.demonstrations for unit in units if not unit.run.format}
    counted = []
    marks = []
    cached = sum(unit.run.is_computed is False for unit in units)
    if cached:
        marks.append(
            f"{cached} of {len(units)} runs read answers from a cache, which confirm nothing."
        )
    # If a method sorts the demonstrations, the prompts are the same in all orders of a study.
    same_prompts = grouped(
        units, lambda unit: (unit.answers.prompts, unit.run.order, drawing_seed(unit))
    )
    for repeated in same_prompts.values():
        first, *others = sorted(repeated, key=lambda unit: unit.run.is_computed is not True)
        counted.append(first)
        marks += [_repetition(first, other) for other in others]
    if "differs" in marks:  # then "confirmed" is only true of other prompts
        marks = [mark for mark in marks if mark != "confirmed"]

    def what_is_drawn(unit: TaskRun) -> tuple[str | None, int | None]:
        demonstrations = unit.answers.demonstrations
        if unit.run.format and demonstrations is not None:
            demonstrations = by_seed.get(unit.run.seed, f"seed {unit.run.seed}")
        return demonstrations, drawing_seed(unit)

    by_set = grouped(counted, what_is_drawn)
    seeded = [_prompt_set(demonstrations, same) for (demonstrations, _), same in by_set.items()]
    seeded.sort(key=lambda pair: (pair[0], pair[1].label))
    return tuple(prompt_set for _, prompt_set in seeded), marks


def drawing_seed(unit: TaskRun) -> int | None:
    """The seed, if more than demonstrations is drawn by it: documents or words for a decision rule,
    or rows on which the method is fitted."""
    rule = unit.result.rule
    is_drawn = unit.run.icl.get("fitted") or (rule is not None and rule.draws)
    return unit.run.seed if is_drawn else None


def _prompt_set(demonstrations: str | None, units: Sequence[TaskRun]) -> tuple[int, PromptSet]:
    """A set of demonstrations, and its seed to sort by."""
    answered = sorted(units, key=lambda unit: (unit.run.format, unit.run.order))
    seeds = {unit.run.seed for unit in answered}
    seed = seeds.pop() if len(seeds) == 1 else None
    label = f"set {demonstrations[:6]}" if demonstrations and seed is None else f"seed {seed}"
    if demonstrations is None and drawing_seed(units[0]) is None:
        label = NO_SET
    return -1 if seed is None else seed, PromptSet(label, tuple(answered))


def _repetition(first: TaskRun, other: TaskRun) -> str:
    """A mark that says what a further run with the same prompts is."""
    agree = same_answers(first, other)
    if agree is False:
        return "differs"
    if first.run.date == other.run.date:
        return "A copy of a run counts once."
    if first.run.study_name and first.run.study_name == other.run.study_name:
        return "Cells of one study with the same prompts count once."
    if first.run.is_computed and other.run.is_computed and agree:
        return "confirmed"
    return "A further run with the same prompts does not record that it computed its answers."


def same_answers(first: TaskRun, second: TaskRun) -> bool | None:
    """Whether two runs have the same predictions, and log-likelihoods up to rounding.

    None if that is not known.
    """
    mine = first.answers
    theirs = second.answers
    if not np.array_equal(mine.items, theirs.items, equal_nan=True):
        return False
    if mine.predicted is None or theirs.predicted is None:
        return None
    if mine.predicted != theirs.predicted:
        return False
    if mine.logprobs is None or theirs.logprobs is None:
        return True if mine.predictions is None else None
    if mine.logprobs.shape != theirs.logprobs.shape:
        return False
    rounding = _ROUNDING.get(first.run.dtype, _ROUNDING_FLOAT32)
    return np.allclose(mine.logprobs, theirs.logprobs, rtol=rounding, atol=rounding)
