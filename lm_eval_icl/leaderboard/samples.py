"""The documents behind a cell: prompt, options, their values, the answer and the right answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lm_eval_icl.leaderboard.opened import clean
from lm_eval_icl.results.board import Board, BoardCell, TaskRun, results_in
from lm_eval_icl.results.fields import at, sample_facts
from lm_eval_icl.results.tasks import lines, rows_of, samples_path

BUDGET = 5_000_000  # the most characters of all samples in a page
_LONGEST = 20_000  # the most characters of a line


class Sample(NamedTuple):
    """A document as a run met it."""

    doc_id: int
    demonstrations: str  # the prompt up to the query
    query: str
    options: Sequence[str]  # empty if a text is generated
    values: Sequence[float]  # log-likelihoods of the options, or values under a decision rule
    answer: str
    gold: str
    is_right: bool


def _plain(value: object) -> str:
    """A text of a stranger's file with its line breaks, without characters that a terminal obeys or
    that move others."""
    return "\n".join(clean(line, _LONGEST) for line in str(value).split("\n"))


def answered(cell: BoardCell) -> dict[tuple[int | None, int, int], TaskRun]:
    """(seed, order, format) -> the result in these prompts, for all results of a task's cell."""
    units = results_in(cell.sets)
    return {(unit.run.seed, unit.run.order, unit.run.format): unit for unit in units}


def samples_of(unit: TaskRun) -> dict[int, Sample]:
    """Document's number -> its sample. Empty if the file has no texts, as `collect` leaves them
    out."""
    run = unit.run
    result = unit.result
    path = samples_path(run.path, result.task)
    if run.path.suffix == ".parquet" or not path.is_file():
        return {}
    facts = sample_facts(run.results, result.task)
    samples = {}
    for raw in lines(path):
        if raw.get("filter") != result.reported_filter:
            continue
        [row] = rows_of([raw], facts)
        arguments = [at(raw, "arguments", f"gen_args_{place}") for place in range(row.options)]
        options = [_plain(at(pair, "arg_1")).strip() for pair in arguments]
        prompt = _plain(at(raw, "arguments", "gen_args_0", "arg_0"))
        query = prompt
        if facts.shots and facts.delimiter:
            query = prompt.rpartition(facts.delimiter)[2]
        names: dict[Any, str] = dict(enumerate(options))
        answer = names.get(row.prediction, row.prediction)
        gold = names.get(row.gold, row.target)
        is_right = row.prediction == row.gold
        if row.gold is None:
            is_right = bool(row.metrics.get(result.metric))
        samples[row.doc_id] = Sample(
            doc_id=row.doc_id,
            demonstrations=prompt.removesuffix(query),
            query=query,
            options=options,
            values=row.logprobs,
            answer=_plain(answer),
            gold=_plain(gold),
            is_right=is_right,
        )
    return samples


def collected(board: Board, tasks: Collection[str] | None) -> dict[str, Any]:
    """The samples of cells of some tasks (None: of all), as data for the page's script. Of each
    cell, those of the first set of demonstrations and order.

    Returns:
        cells: "ROW/COLUMN" (their numbers) -> "run", the run in words, and "documents".
        left_out: how many cells are left out, since all of them would be larger than `BUDGET`.
    """
    cells = {}
    left_out = 0
    size = 0
    for x, column in enumerate(board.columns):
        is_wanted = column.kind == "task" and (tasks is None or column.name in tasks)
        for y, entry in enumerate(board.entries if is_wanted else ()):
            cell = entry.cells.get(column.name)
            if cell is None or not cell.sets:
                continue
            first = cell.sets[0].answered[0]
            documents = [sample._asdict() for sample in samples_of(first).values()]
            if not documents:
                continue
            size += len(json.dumps(documents))
            if size > BUDGET:
                left_out += 1
                continue
            name = f"seed {first.run.seed}, order {first.run.order}"
            cells[f"{y}/{x}"] = {"run": name, "documents": documents}
    return {"cells": cells, "left_out": left_out}
