"""The documents behind a cell: prompt, options, their values, the answer and the right answer."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from lm_eval_icl.leaderboard.opened import clean
from lm_eval_icl.results.board import Board, BoardCell, TaskRun
from lm_eval_icl.results.records import at
from lm_eval_icl.results.tasks import lines, rows_of, sample_facts, samples_path

BUDGET = 5_000_000  # the most characters of all samples in a page
_LONGEST = 20_000  # the most characters of a line
_DECIMALS = 4  # of the values in a page


@dataclass(frozen=True)
class Sample:
    """A document as a run met it."""

    doc_id: int
    demonstrations: str  # the prompt up to the query
    query: str
    options: tuple[str, ...]  # () if a text is generated
    values: tuple[float, ...]  # log-likelihoods of the options, or values under a decision rule
    answer: str
    gold: str
    is_right: bool


def answered(cell: BoardCell) -> dict[tuple[int | None, int, int], TaskRun]:
    """(seed, order, format) -> the result in these prompts, for all results of a task's cell."""
    units = [unit for prompt_set in cell.sets for unit in prompt_set.answered]
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
        texts = [
            str(at(raw, "arguments", f"gen_args_{place}", "arg_1")).strip()
            for place in range(row.options)
        ]
        prompt = str(at(raw, "arguments", "gen_args_0", "arg_0"))
        start = prompt.rfind(facts.delimiter) + len(facts.delimiter) if facts.shots else 0
        is_option = isinstance(row.prediction, int) and texts
        score = row.metrics.get(result.metric)
        samples[row.doc_id] = Sample(
            doc_id=row.doc_id,
            demonstrations=prompt[:start],
            query=prompt[start:],
            options=tuple(texts),
            values=row.logprobs,
            answer=texts[int(row.prediction or 0)] if is_option else str(row.prediction),
            gold=row.target if row.gold is None or not texts else texts[row.gold],
            is_right=row.prediction == row.gold if is_option else bool(score),
        )
    return samples


def collected(board: Board, tasks: Collection[str] | None) -> dict[str, Any]:
    """The samples of cells of some tasks (None: of all), as data for the page's script. Of each
    cell, those of the first set of demonstrations and order.

    Returns:
        cells: "ROW/COLUMN" (their numbers) -> "run", the run in words, and "documents".
        left_out: how many cells are left out, since all of them would be larger than `BUDGET`.
    """
    cells: dict[str, Any] = {}
    left_out = 0
    size = 0
    for x, column in enumerate(board.columns):
        is_wanted = column.kind == "task" and (tasks is None or column.name in tasks)
        for y, entry in enumerate(board.entries if is_wanted else ()):
            cell = entry.cells.get(column.name)
            units = list(answered(cell).values()) if cell is not None else []
            samples = samples_of(units[0]) if units else {}
            if not samples:
                continue
            documents = [_cleaned(asdict(sample)) for sample in samples.values()]
            size += len(json.dumps(documents))
            if size > BUDGET:
                left_out += 1
                continue
            run = units[0].run
            name = f"seed {run.seed}, order {run.order}"
            cells[f"{y}/{x}"] = {"run": name, "documents": documents}
    return {"cells": cells, "left_out": left_out}


def _cleaned(value: Any) -> Any:
    """Data in which the lines of texts are clean, and numbers are short."""
    if isinstance(value, dict):
        return {name: _cleaned(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_cleaned(inner) for inner in value]
    if isinstance(value, str):
        return "\n".join(clean(line, _LONGEST) for line in value.split("\n"))
    return round(value, _DECIMALS) if isinstance(value, float) else value
