"""A study works like a makefile: the study and its folder determine which targets are missing and
can be made, and one loop has them made."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from tqdm import tqdm

from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.targets import Cell, Checkpoint, Grid, Target, units_of

# States of a target. Any other text is the reason why it cannot be made.
DONE = "done"
READY = "ready"
WAITING = "waiting"
KNOWN = (DONE, READY, WAITING)

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Failure(str):
    """The reason why a target could not be made."""


# The targets that are made together: one training, or cells of a model that are scored together.
Unit = Sequence[Target]
# A target, and its results (None for a training) or its `Failure`.
Outcome = tuple[Target, Any]


class Executor(ABC):
    """Runs units, in this process or in others."""

    def __init__(self) -> None:
        # Model's folder -> its units that no process runs yet, in the order in which they were
        # submitted.
        self.waiting: dict[str, deque[Unit]] = defaultdict(deque)
        # The paths of the targets that were submitted, and whose outcomes were not returned yet.
        self.running = set[str]()

    def submit(self, unit: Unit) -> None:
        """Add a unit to those that will be run."""
        self.waiting[unit[0].model.folder].append(unit)
        self.running |= {target.path for target in unit}

    def take(self, held: str, holders: Mapping[str, int], among: Iterable[str]) -> Unit | None:
        """The unit that an idle process runs next, or None: a unit of the model that the process
        holds, or else of the model in `among` that the fewest processes hold (`holders`). Models
        are named by their folders."""
        folders = [folder for folder in among if self.waiting[folder]]
        if not folders:
            return None
        return self.waiting[
            min(folders, key=lambda folder: (folder != held, holders.get(folder, 0)))
        ].popleft()

    @abstractmethod
    def wait(self) -> Sequence[Outcome]:
        """Wait for outcomes that were not returned yet, and return some of them."""


class Here(Executor):
    """Runs units in this process, all units of a model before the next model is loaded. Returns the
    outcome of each target as soon as it is done."""

    def __init__(self, run: Callable[[Unit], Iterator[Outcome]]) -> None:
        super().__init__()
        self.run = run
        self._held = ""
        self._outcomes: Iterator[Outcome] = iter(())

    def wait(self) -> list[Outcome]:
        while (outcome := next(self._outcomes, None)) is None:
            unit = self.take(self._held, {}, self.waiting)
            assert unit is not None
            self._held = unit[0].model.folder
            self._outcomes = self.run(unit)
        self.running.discard(outcome[0].path)
        return [outcome]


def conduct(grid: Grid, folder: StudyFolder, executor: Executor, failed: dict[str, str]) -> None:
    """Make the missing targets of a study. `failed` gets the reasons of targets that fail, by
    path."""
    missing = [
        target
        for target, state in states(grid, folder, failed)
        if state != DONE and isinstance(target, Cell)
    ]
    begun = time.perf_counter()
    seconds = []  # for each cell that ran
    reasons = set[str]()
    more = True  # whether more units may be ready; no target waits for a cell on the test set
    with tqdm(total=len(missing), desc="cells", bar_format=_BAR) as bar:
        while True:
            for unit in units_to_start(grid, folder, executor.running, failed) if more else ():
                executor.submit(unit)
            if not executor.running:
                return
            outcomes = executor.wait()
            more = any(
                not isinstance(target, Cell) or target.split == "dev" for target, _ in outcomes
            )
            for target, outcome in outcomes:
                if isinstance(outcome, Failure):
                    failed[target.path] = outcome
                    if outcome not in reasons:  # once, and not for each cell
                        tqdm.write(f"failed: {target.path}: {outcome}", file=sys.stderr)
                    reasons.add(outcome)
                else:
                    folder.write(target, outcome)
                    now = time.perf_counter()
                    seconds.append(now - begun)
                    begun = now
                bar.update(isinstance(target, Cell))
                bar.set_postfix_str(time_left(seconds, bar.total - bar.n))


def time_left(seconds: Sequence[float], cells: int) -> str:
    """How long further cells take if they are like those that ran, with two standard errors. Cells
    of one unit have its time divided among them, however long each took."""
    if len(seconds) < 2:
        return "time left not known yet"
    mean = fmean(seconds)
    error = 2 * stdev(seconds) / math.sqrt(len(seconds))
    low = cells * max(mean - error, 0) / 60
    high = cells * (mean + error) / 60
    return f"{low:.0f} to {high:.0f} min left, by {len(seconds)} cells"


def units_to_start(
    grid: Grid, folder: StudyFolder, running: Collection[str], failed: Mapping[str, str]
) -> list[Unit]:
    """The units that can be run now: trainings, and cells whose inputs are in the folder
    and whose outputs are not, without targets that are running or have failed."""
    known = states(grid, folder, failed)
    makeable = [target for target, state in known if state == READY and target.path not in running]
    trainings = [(target,) for target in makeable if isinstance(target, Checkpoint)]
    return [*trainings, *units_of(target for target in makeable if isinstance(target, Cell))]


def states(grid: Grid, folder: StudyFolder, failed: Mapping[str, str]) -> list[tuple[Target, str]]:
    """The cells of a study and the checkpoints that missing cells need, each with its state:
    `DONE`, `READY` (its inputs are there), `WAITING` (for other targets), or the reason why it
    cannot be made. Until the dev set can choose, the last candidate's cells on the test set, often
    those of most passes, stand for the chosen ones, and wait."""
    known: dict[str, tuple[Target, str]] = {}

    def state_of(target: Target) -> str:
        path = target.path
        if path not in known:
            state = DONE if folder.has(target) else failed.get(path) or by_checkpoint(target)
            known[path] = (target, state)
        return known[path][1]

    def by_checkpoint(target: Target) -> str:
        if isinstance(target, Checkpoint) or not target.model.training:
            return READY
        checkpoint = Checkpoint(target.model)
        state = state_of(checkpoint)
        if state == DONE:
            return READY
        return WAITING if state in KNOWN else f"{checkpoint.path} failed: {state}"

    for candidates in grid.alternatives:
        on_dev = {}
        for candidate in candidates:
            for cell in candidate.dev:
                on_dev[cell.path] = state_of(cell)
        tested = candidates[-1].test
        if len(candidates) > 1 and all(state == DONE for state in on_dev.values()):
            tested = folder.choice(grid, candidates)
        elif len(candidates) > 1:
            why = WAITING
            broken = [path for path, state in on_dev.items() if state not in KNOWN]
            if broken:
                first = f"{broken[0]} failed: {on_dev[broken[0]]}"
                why = f"nothing can be chosen on the dev set, as {first}"
            for cell in tested:
                known[cell.path] = cell, why
            continue
        for cell in tested:
            state_of(cell)
    return list(known.values())
