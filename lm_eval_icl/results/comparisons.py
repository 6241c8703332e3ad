"""Differences of rows: any two rows with the same documents are compared, by one procedure.

All pairs of rows of a column are one family, with "always one answer" as a row of its own. The
intervals and p-values of a board hold for the whole family at once, so that no two of its sentences
contradict each other (docs/comparing.md).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import Cells, Column, Entry, PromptSet, results_in
from lm_eval_icl.results.cells import SHARE, drawn_sets, one_answer, scores_of
from lm_eval_icl.results.columns import is_share
from lm_eval_icl.results.sets import drawing_seed
from lm_eval_icl.results.statistics import Difference


def compare(first: Cells, second: Cells, column: Column) -> Difference | None:
    """The first row minus the second, as one comparison by itself, from their cells on tasks.

    None if they did not answer the same documents of all tasks of the column.
    """
    parts = []
    for task in column.weights:
        if task not in first or task not in second:
            return None
        part = compare_sets(first[task].sets, second[task].sets)
        if part is None:
            return None
        parts.append(part)
    return _of_column(parts, column)


def _of_column(parts: Sequence[Difference], column: Column) -> Difference:
    """The difference on a column, from those on its tasks."""
    if column.kind == "task":
        return parts[0]
    weights = list(column.weights.values())
    are_shares = all(part.bounds == (-1, 1) for part in parts)
    return statistics.difference_group(parts, weights, bounds=SHARE if are_shares else None)


def compare_sets(first: Sequence[PromptSet], second: Sequence[PromptSet]) -> Difference | None:
    """The first cell minus the second on one task, over all documents.

    None for other documents, and without a common format of the prompts.
    Over the sets of demonstrations that both have, if these are two or more, or all that one of
    them has. Otherwise the sets of each are a sample of their own.
    """
    if not first or not second or _asked(first) != _asked(second):
        return None
    if not _formats(first) & _formats(second):
        return None
    pairs = common(first, second)
    is_paired = len(pairs) > 1 or (len(pairs) == 1 and 1 in (len(first), len(second)))
    if is_paired:
        first = [mine for mine, _ in pairs]
        second = [theirs for _, theirs in pairs]
    aggregation = first[0].answered[0].result.aggregation
    bounds = SHARE if is_share(results_in([*first, *second])) else None
    mine = scores_of(first, aggregation, bounds)
    theirs = scores_of(second, aggregation, bounds)
    return statistics.difference(
        mine.values,
        theirs.values,
        bounds=mine.bounds,
        same_sets=is_paired,
        mean=mine.mean - theirs.mean,
        scope=statistics.scope_of(drawn_sets(first), drawn_sets(second), same_sets=is_paired),
    )


def _asked(sets: Sequence[PromptSet]) -> tuple[str, ...]:
    """What two cells must have in common to be compared."""
    unit = sets[0].answered[0]
    result = unit.result
    return unit.answers.documents, result.metric, result.filter, result.aggregation


def _formats(sets: Sequence[PromptSet]) -> set[int]:
    """The formats of all prompts; 0 for all where formats are rows that are compared."""
    units = results_in(sets)
    return {0 if "format" in unit.result.fields.setting else unit.run.format for unit in units}


def common(
    first: Sequence[PromptSet], second: Sequence[PromptSet]
) -> list[tuple[PromptSet, PromptSet]]:
    """The pairs of sets with the same demonstrations, reduced to the prompts that both have."""
    identity = _texts
    if _setting(first) != _setting(second):
        # The same rows are other texts with other labels, formats or a chat template.
        identity = _draw
        first = _with_own_draw(first)
        second = _with_own_draw(second)
    pairs = []
    for mine, theirs in itertools.product(first, second):
        seeds = {drawing_seed(mine.answered[0]), drawing_seed(theirs.answered[0])} - {None}
        is_same = identity(mine) == identity(theirs)
        if len(seeds) < 2 and (is_same or {*_prompts(mine)} & {*_prompts(theirs)}):
            pairs.append((_with_prompts_of(mine, theirs), _with_prompts_of(theirs, mine)))
    return pairs


def _prompts(prompt_set: PromptSet) -> list[str]:
    return [unit.answers.prompts for unit in prompt_set.answered]


def _setting(sets: Sequence[PromptSet]) -> tuple[object, ...]:
    """What changes the texts of the same rows."""
    fields = sets[0].answered[0].result.fields
    return fields.setting, fields.format


def _texts(prompt_set: PromptSet) -> object:
    return prompt_set.answered[0].answers.demonstrations


def _draw(prompt_set: PromptSet) -> object:
    """How the rows were drawn: which way, how many, and by which seed."""
    unit = prompt_set.answered[0]
    return unit.result.fields.switches["demonstrations"], unit.result.shots, unit.run.seed


def _with_own_draw(sets: Sequence[PromptSet]) -> list[PromptSet]:
    """The sets without those that share a draw with another: the file that it reads has changed."""
    draws = Counter(map(_draw, sets))
    return [prompt_set for prompt_set in sets if draws[_draw(prompt_set)] == 1]


def _with_prompts_of(mine: PromptSet, theirs: PromptSet) -> PromptSet:
    """The set without orders that the other does not have, if they have any prompts in common."""
    prompts = _prompts(theirs)
    both = tuple(unit for unit in mine.answered if unit.answers.prompts in prompts)
    return replace(mine, answered=both) if both else mine


def to_one_answer(cells: Cells, column: Column) -> Difference | None:
    """A row minus always giving the most frequent right answer; None if answers are not known."""
    parts = []
    for task in column.weights:
        sets = cells[task].sets
        if cells[task].majority is None:
            return None
        scores = one_answer([sets[0].answered[0].answers])
        assert scores is not None
        mine = scores_of(sets, "mean", SHARE)
        scope = statistics.scope_of(drawn_sets(sets))
        part = statistics.difference(
            mine.values, scores, bounds=SHARE, same_sets=False, scope=scope
        )
        parts.append(part)
    return _of_column(parts, column)


def comparisons_of(entries: Sequence[Entry], column: Column) -> int:
    """How many pairs of rows of a column there are, with always giving one answer as a row."""
    rows = Counter[tuple[object, ...]]()
    with_one_answer = set()
    for entry in entries:
        cells = [entry.cells[task] for task in column.weights if task in entry.cells]
        if len(cells) == len(column.weights) and all(cell.sets for cell in cells):
            asked = tuple(_asked(cell.sets) for cell in cells)
            rows[asked] += 1
            if all(cell.majority is not None for cell in cells):
                with_one_answer.add(asked)
    pairs = 0
    for key, count in rows.items():
        if key in with_one_answer:
            count += 1
        pairs += count * (count - 1) // 2
    return max(1, pairs)
