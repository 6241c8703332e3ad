"""What comes out of a study as numbers: order sensitivity, the table, the CSV file."""

from __future__ import annotations

import csv
import itertools
import json
import re
import statistics
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.studies.row import Row

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

AVERAGE = "average"
_RESAMPLES = 10_000

Sensitivity = tuple[float, float, float]
Key = TypeVar("Key")


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """The rows by a key, in the order in which keys come up."""
    found: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)


# ---------------------------------------------------------------------------------------------------------------
# Order sensitivity.


def flips(predictions: Sequence[Sequence[Hashable]]) -> list[float]:
    """For each document, the probability that two random orders give different predictions.

    Args:
        predictions: for each of two or more orders, those for the documents.
    """
    pairs = len(predictions) * (len(predictions) - 1)
    return [
        1 - sum(n * (n - 1) for n in Counter(of_document).values()) / pairs
        for of_document in zip(*predictions, strict=True)
    ]


def flip_rate(predictions: Sequence[Sequence[Hashable]]) -> float:
    """The probability that two random orders give different predictions: the mean over documents and pairs of orders.

    It does not depend on how many orders there are, but for chance.

    Args:
        predictions: for each of two or more orders, those for the documents.
    """
    return statistics.fmean(flips(predictions))


def order_sensitivity(rows: Sequence[Row]) -> Sensitivity | None:
    """The flip rate between orders of the same demonstrations, the mean over all sets of demonstrations.

    Returns:
        The mean and its 95% interval, or None if no set of demonstrations was given in two orders. The interval is the
        percentile bootstrap over documents, with a fixed seed: of each task as many documents are drawn with
        replacement as it has, the same ones for all sets of demonstrations. It is thus for these sets of
        demonstrations and says nothing about other ones. It is NaN if a task has one document only.
    """

    def of_set(row: Row) -> tuple[Hashable, ...]:
        settings = json.dumps(row.arguments, sort_keys=True, default=str)
        of_task = row.task, row.split, len(row.predictions)  # the first three
        of_model = row.model, row.training, row.method, settings
        return *of_task, *of_model, row.num_fewshot, row.demonstrations, row.seed

    tasks: dict[tuple[Hashable, ...], list[list[float]]] = defaultdict(list)
    for key, orders in grouped((row for row in rows if row.predictions), of_set).items():
        if len(orders) > 1:
            tasks[key[:3]].append(flips([row.predictions for row in orders]))
    if not tasks:
        return None
    rng, sets = np.random.default_rng(0), sum(map(len, tasks.values()))
    mean, drawn = 0.0, np.zeros(_RESAMPLES)
    for of_sets in tasks.values():
        weight, of_documents = len(of_sets) / sets, np.mean(of_sets, axis=0)
        mean += weight * float(of_documents.mean())
        # Documents with one value are exchangeable: it is enough to draw how many there are of each.
        values, counts = np.unique(of_documents, return_counts=True)
        n = len(of_documents)
        drawn += weight * (rng.multinomial(n, counts / n, size=_RESAMPLES) @ values / n if n > 1 else np.nan)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return mean, float(low), float(high)


# ---------------------------------------------------------------------------------------------------------------
# Methods with their arguments, some of which were chosen on dev.


@dataclass(frozen=True)
class Variant:
    """A model under a method with arguments.

    Attributes:
        arguments: those that were not chosen, as text: "T=3, eta=0.01".
        chosen: the names of those that were chosen on dev and may differ from task to task; "seed" may be among them.
        training: the name of the training, if each training makes variants of its own.
    """

    model: str
    method: str
    arguments: str
    chosen: tuple[str, ...]
    training: str = ""

    @property
    def details(self) -> list[str]:
        """The arguments, what was chosen, and the training, if there are any."""
        chosen = f"({', '.join(self.chosen)} chosen on dev)" if self.chosen else ""
        training = f"trained: {self.training}" if self.training else ""
        return [part for part in (self.arguments, chosen, training) if part]

    @property
    def label(self) -> str:
        """The method with its details."""
        return " ".join([self.method, *self.details])


def shown(arguments: Mapping[str, Any]) -> str:
    """Arguments as text."""
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def variants(rows: Sequence[Row], apart: bool = False) -> dict[Variant, list[Row]]:
    """The chosen rows of the test split by variant.

    Args:
        rows: all rows: those that were not chosen show what was to be chosen.
        apart: whether each training makes variants of its own.
    """
    found: dict[Variant, list[Row]] = defaultdict(list)
    for (model, method, _), some in grouped(
        rows, lambda row: (row.model, row.method, frozenset(row.arguments))
    ).items():
        names = (*some[0].arguments, "seed")
        kept = _kept(some, names)
        chosen = tuple(name for name in names if name not in kept)
        for row in _tested(some):
            arguments = {name: value for name, value in row.arguments.items() if name in kept}
            training = row.training if apart else ""
            found[Variant(model, method, shown(arguments), chosen, training)].append(row)
    return dict(found)


def _tested(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.split == "test" and row.chosen]


def _kept(rows: Sequence[Row], names: Sequence[str]) -> tuple[str, ...]:
    """The names of the arguments that were not chosen on dev: as many as there can be.

    For every task, shots and demonstrations, the chosen rows have all values of these, and for each value one of all
    the others.

    Args:
        rows: of one model and method, all with the same names of arguments.
        names: of the arguments, and "seed".
    """

    def setting(row: Row, some: Sequence[str]) -> str:
        values = {**row.arguments, "seed": row.seed}
        return json.dumps([values[name] for name in some], default=str)

    cells = []
    for cell in grouped(rows, lambda row: (row.training, row.task, row.num_fewshot, row.demonstrations)).values():
        # Dev rows of what was chosen show nothing: a study that is not finished may lack their test rows.
        if tested := _tested(cell):
            cells.append((tested, [row for row in cell if row.split == "test" or not row.chosen]))
    for size in range(len(names), -1, -1):
        for kept in itertools.combinations(names, size):
            if all(
                {setting(row, kept) for row in tested} == {setting(row, kept) for row in there}
                and len({setting(row, kept) for row in tested}) == len({setting(row, names) for row in tested})
                for tested, there in cells
            ):
                return kept
    return tuple(names)


# ---------------------------------------------------------------------------------------------------------------
# The table's numbers.


@dataclass(frozen=True)
class Cell:
    """A number of the table.

    Attributes:
        mean: over seeds, of the means over orders.
        spread: the standard deviation over seeds (n - 1); None with one seed, or if tasks have different ones.
        paper: the paper's number.
    """

    mean: float
    spread: float | None
    paper: float | None


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        num_fewshot: None if tasks differ and each has a number of its own.
        cells: by column; None where a task is missing.
        sensitivity: the order sensitivity over all tasks of the columns, see `order_sensitivity`.
        codes: how many of its cells are of other code, or of unknown code: "2 of 6 cells by other code".
    """

    variant: Variant
    num_fewshot: int | None
    demonstrations: str
    cells: Mapping[str, Cell | None]
    sensitivity: Sensitivity | None
    codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The table's numbers.

    Attributes:
        columns: with the averages, if there are any.
    """

    columns: tuple[str, ...]
    lines: tuple[Line, ...]


Trained = tuple[str, str]  # the name of a training, and a task


def summarize(
    rows: Sequence[Row],
    expected: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Sequence[str]],
    alike: Collection[str] = (),
) -> Summary:
    """A line for each model, method, arguments, shots and demonstrations; of the test split, after choosing.

    If several trainings have a column, each has lines of its own; otherwise every column is of one training.

    Args:
        expected: the paper's numbers, as in the study file. The first that matches and has the
            column counts.
        columns: the columns of each part of the table. They are tasks, or groups: the mean over a group's tasks
            weighted by documents, as lm-eval's groups. If a part has several, their unweighted mean is added.
        alike: the groups whose tasks are not weighted.
    """
    averages = {part: f"{AVERAGE}, {part}" if part else AVERAGE for part, some in columns.items() if len(some) > 1}
    every = [each for part, some in columns.items() for each in (*some, averages.get(part)) if each is not None]
    in_columns: dict[str, set[Trained]] = {
        column: {(row.training, row.task) for row in rows if column in (row.task, *row.groups)}
        for some in columns.values()
        for column in some
    }
    tasks = set().union(*in_columns.values())
    apart = any(len({training for training, _ in some}) > 1 for some in in_columns.values())
    by_variant = {
        variant: some
        for variant, of_all in variants(rows, apart).items()
        if (some := [row for row in of_all if (row.training, row.task) in tasks])
    }
    # Shots make lines of their own, but not if they only differ from task to task.
    shots = grouped((row for some in by_variant.values() for row in some), lambda row: row.task)
    own = all(len({row.num_fewshot for row in some}) == 1 for some in shots.values())
    lines = []
    for variant, some in by_variant.items():
        parts = grouped(some, lambda row: (None if own else row.num_fewshot, row.demonstrations))
        for (_, demonstrations), part in parts.items():
            used = {row.num_fewshot for row in part}
            mine = in_columns
            if variant.training:
                mine = {column: {each for each in some if each[0] == variant.training} for column, some in mine.items()}
            parts_of = {name: columns[part] for part, name in averages.items()}
            papers = [entry for entry in expected if _marked(entry, variant)]
            cells = _cells(part, every, mine, parts_of, papers, alike)
            sensitivity = order_sensitivity(part)
            marks = Counter(row.code for row in part if row.code)
            codes = tuple(f"{number} of {len(part)} cells by {code}" for code, number in sorted(marks.items()))
            shots_of = used.pop() if len(used) == 1 else None
            lines.append(Line(variant, shots_of, demonstrations, cells, sensitivity, codes))
    return Summary(tuple(every), tuple(lines))


_Scores = Mapping[int | None, float]  # by seed; by None if it is the mean over seeds that differ from task to task


def _cells(
    rows: Sequence[Row],
    columns: Sequence[str],
    in_columns: Mapping[str, set[Trained]],
    averages: Mapping[str, Sequence[str]],
    expected: Sequence[Mapping[str, Any]],
    alike: Collection[str],
) -> dict[str, Cell | None]:
    """The cells of a line.

    Args:
        columns: all, with averages.
        in_columns: the tasks of each column that is no average.
        averages: the columns that each average is of.
    """
    by_task: dict[Trained, list[Row]] = grouped(rows, lambda row: (row.training, row.task))
    scores: dict[str, _Scores] = {}
    for column, tasks in in_columns.items():
        if tasks and tasks <= by_task.keys():
            some = [by_task[task] for task in by_task if task in tasks]
            weights = [1 if column in alike else of_task[0].documents for of_task in some]
            scores[column] = _together(list(zip(weights, map(_by_seed, some), strict=True)))
    for average, of in averages.items():
        if scores.keys() >= {*of}:
            scores[average] = _together([(1, scores[column]) for column in of])
    cells: dict[str, Cell | None] = {}
    for column in columns:
        if column in scores:
            values = list(scores[column].values())
            spread = statistics.stdev(values) if len(values) > 1 else None
            tasks = set().union(*(in_columns[each] for each in averages.get(column, [column])))
            of_column = [row for row in rows if (row.training, row.task) in tasks]
            cells[column] = Cell(statistics.fmean(values), spread, _paper(expected, of_column, column))
        else:
            cells[column] = None
    return cells


def _by_seed(rows: Iterable[Row]) -> _Scores:
    """The means over orders."""
    return {seed: statistics.fmean(row.score for row in some) for seed, some in grouped(rows, lambda r: r.seed).items()}


def _together(parts: Sequence[tuple[float, _Scores]]) -> _Scores:
    """The weighted mean of scores, seed by seed if all have the same seeds."""
    weights = [weight for weight, _ in parts]
    seeds = parts[0][1].keys()
    if all(scores.keys() == seeds for _, scores in parts):
        return {seed: statistics.fmean([scores[seed] for _, scores in parts], weights) for seed in seeds}
    return {None: statistics.fmean([statistics.fmean(scores.values()) for _, scores in parts], weights)}


def _marked(entry: Mapping[str, Any], variant: Variant) -> bool:
    """Whether the paper's numbers are after choosing on dev, as the variant's are, or do not say so."""
    return entry.get("chosen") is None or entry["chosen"] == bool(variant.chosen)


def _paper(expected: Iterable[Mapping[str, Any]], rows: Sequence[Row], column: str) -> float | None:
    for entry in expected:
        if column in entry["values"] and all(_matches(entry, row) for row in rows):
            return float(entry["values"][column])
    return None


def _matches(entry: Mapping[str, Any], row: Row) -> bool:
    """Whether a row has all that an entry of `expected` names."""
    for name in ("model", "training", "method", "num_fewshot", "demonstrations"):
        if entry.get(name) is not None and entry[name] != getattr(row, name):
            return False
    wanted = entry.get("arguments") or {}
    return all(name in row.arguments and row.arguments[name] == value for name, value in wanted.items())


# ---------------------------------------------------------------------------------------------------------------
# The table as it is printed.

_WIDTH = 80
_NUMBER, _INTERVAL = 8, 9  # the widths of "57.9±1.2" and "36.3-38.6"
_AT_A_TIME = 7  # columns of numbers side by side: five tasks, their average, the order sensitivity


def table(summary: Summary, title: str, notes: Sequence[str] = ()) -> Table:
    """The table, 80 columns wide at most: a part for each model, and for columns that do not fit beside the others.

    Args:
        notes: further sentences of the legend.
    """
    from rich import box  # imported here, since only the command prints
    from rich.table import Table
    from rich.text import Text

    percent = _in_percent(summary)
    sensitive = any(line.sensitivity for line in summary.lines)
    columns: list[str | None] = [*summary.columns, *([None] if sensitive else [])]  # None: the order sensitivity
    blocks = -(-len(columns) // _AT_A_TIME)
    size = -(-len(columns) // blocks)
    longest = max((len(part) for line in summary.lines for part in _name(line, summary)), default=0)
    models: dict[str, list[Line]] = defaultdict(list)
    for line in summary.lines:
        models[line.variant.model].append(line)

    grid = Table.grid()
    grid.add_column(max_width=_WIDTH, overflow="fold")
    grid.add_row(Text(_plain(title), style="bold"))
    for start in range(0, len(columns), size):
        some = columns[start : start + size]
        # The parts of all models have columns of the same width, so that their numbers are below each other.
        widths = [_NUMBER if column else _INTERVAL for column in some]
        width = min(longest, _WIDTH - sum(widths) - len(widths))
        for model, lines in models.items():
            part = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
            part.add_column("", width=width, overflow="fold")
            for column, wide in zip(some, widths, strict=True):
                heading = Text(_broken(_plain(column or "order flips"), wide))
                part.add_column(heading, width=wide, justify="right", overflow="fold")
            for line in lines:
                cells = (_number(line.cells[c], percent) if c else _flips(line.sensitivity) for c in some)
                method, *details = (_broken(text, width) for text in _name(line, summary))
                part.add_row(Text("\n").join([Text(method), *(Text(each, style="dim") for each in details)]), *cells)
            grid.add_row("")
            grid.add_row(Text(_plain(model), style="bold"))
            grid.add_row(part)
    grid.add_row("")
    grid.add_row(Text(" ".join([_legend(summary), *map(_plain, notes)]), style="dim"))
    return grid


def _plain(text: str) -> str:
    """The text without what a terminal would obey. It is shown as `Text`, whose brackets are no markup."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _name(line: Line, summary: Summary) -> list[str]:
    """The method, and what sets the line apart."""
    details = line.variant.details
    if len({other.num_fewshot for other in summary.lines}) > 1:
        details.append(
            "own shots" if line.num_fewshot is None else f"{line.num_fewshot} shot{'s' * (line.num_fewshot != 1)}"
        )
    if len({other.demonstrations for other in summary.lines}) > 1:
        details.append(line.demonstrations)
    details += line.codes
    return [_plain(text) for text in (line.variant.method, *details)]


def _broken(text: str, width: int) -> str:
    """The text in lines, broken after underscores, blanks and equals signs."""
    lines = [""]
    for part in re.findall(r"[^_ =]*[_ =]?", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _number(cell: Cell | None, percent: bool) -> Text:
    """A mean with its spread, and the paper's number below it."""
    from rich.text import Text

    if cell is None:
        return Text("-", style="dim")
    text = Text(_digits(cell.mean, percent))
    if cell.spread is not None:
        wide = percent and 100 * cell.spread >= 9.95  # two digits are enough
        spread = "±" + (f"{100 * cell.spread:.0f}" if wide else _digits(cell.spread, percent))
        text.append("\n" * (len(text) + len(spread) > _NUMBER) + spread, style="dim")
    if cell.paper is not None:
        text.append(f"\n({_digits(cell.paper, percent)})", style="cyan")
    return text


def _flips(sensitivity: Sensitivity | None) -> Text:
    """A share in percent, and its interval below it."""
    from rich.text import Text

    if sensitivity is None:
        return Text("-", style="dim")
    mean, low, high = (_digits(value, True) for value in sensitivity)
    return Text.assemble(mean, (f"\n{low}-{high}", "dim"))


def _digits(value: float, percent: bool) -> str:
    """At most four characters in percent: "57.9", "100"."""
    if not percent:
        return f"{value:.3g}"
    return f"{100 * value:.1f}" if 100 * value < 99.95 else f"{100 * value:.0f}"


def _in_percent(summary: Summary) -> bool:
    return all(0 <= cell.mean <= 1 for line in summary.lines for cell in line.cells.values() if cell)


def _legend(summary: Summary) -> str:
    """What the numbers are."""
    cells = [cell for line in summary.lines for cell in line.cells.values() if cell]
    shots = {line.num_fewshot for line in summary.lines}
    ways = {_plain(line.demonstrations) for line in summary.lines}
    parts = []
    if len(shots) == 1:
        number = shots.pop()
        parts.append(
            "Each task has its own number of demonstrations." if number is None else f"{number} demonstrations."
        )
    if len(ways) == 1:
        parts.append(f"Demonstrations are drawn {ways.pop()}.")
    text = "Means"
    if any(cell.spread is not None for cell in cells):
        text += " ± the standard deviation over seeds"
    if _in_percent(summary):
        text += ", in percent"
    if any(cell.paper is not None for cell in cells):
        text += "; in parentheses, the paper's"
    parts.append(text + ".")
    if any(line.sensitivity for line in summary.lines):
        parts.append(
            "Order flips: how often two orders of the same demonstrations give different predictions, in percent, "
            "with a 95% interval over documents."
        )
    if any(line.codes for line in summary.lines):
        parts.append(
            "Cells by other code were made before the code that their numbers come from has changed, those by unknown "
            "code do not say which made them; --rerun runs both again."
        )
    return " ".join(parts)


# ---------------------------------------------------------------------------------------------------------------
# The CSV file.


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write a line for each row, without its predictions. The file is there whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    names = [field.name for field in fields(Row) if field.name != "predictions"]
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # several processes may finish at once
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for row in rows:
                line = {name: getattr(row, name) for name in names}
                line["arguments"] = json.dumps(dict(row.arguments), ensure_ascii=False, default=str)
                line["groups"] = json.dumps(row.groups, ensure_ascii=False)
                writer.writerow(line.values())
        part.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error}).") from error
    finally:
        part.unlink(missing_ok=True)
