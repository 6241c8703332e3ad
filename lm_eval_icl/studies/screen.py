"""What `--dry_run` and `--status` print: a study on one screen, and the long lists only if they are asked for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.studies.cells import Cell
from lm_eval_icl.studies.plan import Plan
from lm_eval_icl.studies.progress import StudyProgress

_MODELS = 6  # rows of the table of models that fit on a screen with all else
_NAME = 26  # characters of a model's name in it
_LINE = 150  # characters of a list of methods or tasks


def print_plan(
    progress: StudyProgress, plan: Plan, lacking: Mapping[str, str], console: Console, verbose: bool
) -> None:
    """Print what a study would run: how many cells, forward passes and tokens, how long, and what is missing.

    Args:
        lacking: why tasks and trainings cannot be had, by name.
        verbose: list all cells, models and checkpoints.
    """
    models = progress.models
    cells = [cell for model in models for cell in plan.cells(model)]
    trained = [model.checkpoint for model in models if model.training]
    if verbose:
        for checkpoint in trained:
            _print(console, f"to be trained: {checkpoint}")
        for cell in cells:
            _print(console, cell.path)
    dev = sum(cell.split == "dev" for cell in cells)
    _print(console, f"{len(cells):,} cells: {len(cells) - dev:,} on the test set, {dev:,} on the dev set")
    _print(console, _counted("methods", (cell.variant.method for cell in cells), verbose))
    _print(console, _counted("tasks", (cell.task for cell in cells), verbose))
    if trained:
        _print(console, f"to be trained first, which is not counted: {len(trained)} checkpoints")
    table = Table(title="estimate of forward passes and tokens", title_justify="left", box=None, pad_edge=False)
    table.add_column("model", width=_NAME, no_wrap=True)
    for column in ("cells", "passes", "tokens", "one by one", "weights", "time"):
        table.add_column(column, justify="right")
    shown = models if verbose else models[:_MODELS]
    for model in shown:
        work, speed = plan.work(model), progress.tokens_per_second(model)
        shared, alone = work or (Counter(), Counter())
        name, folder = model.title, Path(model.name)
        files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        table.add_row(
            Text(name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"),
            f"{len(plan.cells(model)):,}",
            *([f"{shared['passes']:,}", f"{shared['tokens']:,}", f"{alone['tokens']:,}"] if work else ["?"] * 3),
            filesize.decimal(sum(file.stat().st_size for file in files)) if files else "?",
            _duration(shared["tokens"] / speed) if work and speed else "?",
        )
    console.print(table)
    if len(shown) < len(models):
        _print(console, f"and {len(models) - len(shown)} more models (--verbose)")
    for sentence in (
        "Tokens of the study, and of its cells run one by one; `hf` is not counted.",
        "Cells that depend on the dev set are counted with the values that take most." if progress.study.dev else "",
        "What the models take to choose demonstrations is not counted."
        if any(isinstance(how, How) for how in progress.study.demonstrations)
        else "",
        f"Every cell has the decision rules {', '.join(map(str, progress.study.rules))}; their queries are not counted."
        if progress.study.rules
        else "",
        ""
        if any(map(progress.tokens_per_second, shown))
        else "No time is estimated: it needs finished cells in the folder of --output.",
    ):
        if sentence:
            _print(console, sentence)
    for name, why in {**lacking, **plan.lacking}.items():
        _print(console, f"missing: {name}: {why}")


def print_status(progress: StudyProgress, console: Console, verbose: bool) -> None:
    """Print how many cells are in which state, what is running, why cells have failed, and how long the others take.

    Args:
        verbose: list all cells that are not simply done.
    """
    failed = progress.folder.failed()
    cells = progress.all_cells()
    states = {cell.path: progress.state(cell) for cell in cells}
    # Damaged cells are found now; what a cell on the dev set has kept from being chosen is no cell yet.
    failed = {path: why for path, why in failed.items() if states.get(path, "missing") == "missing"} | progress.failed
    states |= dict.fromkeys(failed, "failed")
    for state, number in Counter(states.values()).most_common():
        _print(console, f"{number} {state}")
    if running := progress.folder.running():
        _print(console, f"running: {running}")
    for path, why in failed.items():
        _print(console, f"failed: {path}: {why}")
    left = [cell for cell in cells if states[cell.path] in ("missing", "failed")]
    if left:
        _print(console, _time_left(progress, cells, left))
    if verbose:
        for path, state in states.items():
            if state not in ("done", "failed"):
                _print(console, f"{state}: {path}")


def _time_left(progress: StudyProgress, cells: Sequence[Cell], left: Sequence[Cell]) -> str:
    """How long cells take, by the mean of those of the same model and method that are done, or of all."""
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cell in filter(progress.is_done, cells):
        if (seconds := progress.seconds(cell)) is not None:
            measured[cell.model.folder, cell.variant.method].append(seconds)
    if not measured:
        return f"{len(left)} left; no cell is done that was timed, from which their time could be estimated"
    every = fmean(seconds for of_method in measured.values() for seconds in of_method)
    means = {key: fmean(of_method) for key, of_method in measured.items()}
    total = sum(means.get((cell.model.folder, cell.variant.method), every) for cell in left)
    return f"{len(left)} left: about {_duration(total)} of scoring, by the cells that are done"


def _duration(seconds: float) -> str:
    length, unit = next(part for part in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= part[0] or part[0] == 1)
    return f"{seconds / length:.1f} {unit}"


def _counted(what: str, names: Iterable[str], verbose: bool) -> str:
    """How many cells have each name, in a line that may be cut."""
    parts = [f"{name} {number:,}" for name, number in Counter(names).most_common()]
    for shown in range(1, len(parts)):
        line = f"{what}: {', '.join(parts[:shown])}, "
        if not verbose and len(line) + len(parts[shown]) > _LINE:
            return f"{line}and {len(parts) - shown} more (--verbose)"
    return f"{what}: {', '.join(parts)}"


def _print(console: Console, text: str) -> None:
    # Reasons have the texts of other people's tasks: nothing that a terminal would obey.
    console.print(Text("".join(c if c.isprintable() else "\ufffd" for c in text)), soft_wrap=True)
