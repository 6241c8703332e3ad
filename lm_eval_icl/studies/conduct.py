"""A study is a makefile: what is missing and can be made is a function of the study and its folder, and one loop has it
made."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from lm_eval_icl.studies.cells import Cell, Checkpoint, Grid, Target, batches
from lm_eval_icl.studies.folder import StudyFolder

# States of a target. Any other text is the reason why it cannot be made.
DONE, READY, WAITING = KNOWN = "done", "ready", "waiting"


class Failure(str):
    """Why a target could not be made."""


# What is run at a time: a training, or cells of a model that are scored together.
Unit = Sequence[Target]
# A target, and what came of it.
Outcome = tuple[Target, Any]


class Executor:
    """Runs units, here or elsewhere."""

    def __init__(self) -> None:
        # The units that no process runs yet, in the order in which they were submitted, by the model's folder.
        self.waiting: dict[str, deque[Unit]] = defaultdict(deque)
        # The paths of the targets that were submitted and not yet handed over.
        self.running = set[str]()

    def submit(self, unit: Unit) -> None:
        """Have a unit run, sooner or later."""
        self.waiting[unit[0].model.folder].append(unit)
        self.running |= {target.path for target in unit}

    def take(self, held: str, holders: Mapping[str, int], among: Iterable[str]) -> Unit | None:
        """The unit that an idle process runs next: of the model that it holds, or else of one of these that few others
        hold. Models are told by their folders; `holders` counts the processes."""
        folders = [folder for folder in among if self.waiting[folder]]
        if not folders:
            return None
        return self.waiting[min(folders, key=lambda folder: (folder != held, holders.get(folder, 0)))].popleft()

    def wait(self) -> Sequence[Outcome]:
        """What was made since, or has failed; at least one target."""
        raise NotImplementedError


class Here(Executor):
    """Runs units in this process, all of a model before the next one is loaded, and hands over each target as it is
    done."""

    def __init__(self, run: Callable[[Unit], Iterator[Outcome]]) -> None:
        super().__init__()
        self.run, self._held = run, ""
        self._outcomes: Iterator[Outcome] = iter(())

    def wait(self) -> list[Outcome]:
        while (outcome := next(self._outcomes, None)) is None:
            unit = self.take(self._held, {}, self.waiting)
            assert unit is not None
            self._held, self._outcomes = unit[0].model.folder, self.run(unit)
        self.running.discard(outcome[0].path)
        return [outcome]


def conduct(grid: Grid, folder: StudyFolder, executor: Executor, failed: dict[str, str]) -> None:
    """Make what is missing of a study. Targets that fail are added to `failed`, with the reason, by path."""
    missing = [target for target, state in states(grid, folder, failed) if state != DONE and isinstance(target, Cell)]
    more = True  # may be ready: what is done on the test set, nothing waits for
    with tqdm(total=len(missing), desc="cells") as bar:
        while True:
            for unit in ready(grid, folder, executor.running, failed) if more else ():
                executor.submit(unit)
            if not executor.running:
                return
            outcomes = executor.wait()
            more = any(not isinstance(target, Cell) or target.split == "dev" for target, _ in outcomes)
            for target, outcome in outcomes:
                if isinstance(outcome, Failure):
                    failed[target.path] = outcome
                    tqdm.write(f"failed: {target.path}: {outcome}", file=sys.stderr)
                else:
                    folder.write(target, outcome)
                bar.update(isinstance(target, Cell))


def ready(grid: Grid, folder: StudyFolder, running: Collection[str], failed: Mapping[str, str]) -> list[Unit]:
    """The units whose inputs are there and whose outputs are not, without targets that are running or have failed:
    trainings, and cells."""
    known = states(grid, folder, failed)
    makeable = [target for target, state in known if state == READY and target.path not in running]
    trainings = [(target,) for target in makeable if isinstance(target, Checkpoint)]
    return [*trainings, *batches(target for target in makeable if isinstance(target, Cell))]


def states(grid: Grid, folder: StudyFolder, failed: Mapping[str, str]) -> list[tuple[Target, str]]:
    """The cells of a study and all that they need, each with its state: `DONE`, `READY` (its inputs are there),
    `WAITING` (for others), or the reason why it cannot be made. A checkpoint is among them only if a missing cell needs
    it; a cell on the test set that waits for a choice on the dev set stands for any that may be chosen."""
    known: dict[str, tuple[Target, str]] = {}

    def state_of(target: Target) -> str:
        if (path := target.path) not in known:
            known[path] = target, DONE if folder.has(target) else failed.get(path) or of_checkpoint(target)
        return known[path][1]

    def of_checkpoint(target: Target) -> str:
        if isinstance(target, Checkpoint) or not target.model.training:
            return READY
        state = state_of(checkpoint := Checkpoint(target.model))
        return READY if state == DONE else WAITING if state in KNOWN else f"{checkpoint.path} failed: {state}"

    for candidates in grid.alternatives:
        on_dev = {cell.path: state_of(cell) for candidate in candidates for cell in candidate.dev}
        tested = candidates[0].test
        if len(candidates) > 1 and all(state == DONE for state in on_dev.values()):
            tested, _ = folder.choice(grid, candidates)
        elif len(candidates) > 1:
            broken = [f"{path} failed: {state}" for path, state in on_dev.items() if state not in KNOWN]
            why = f"nothing can be chosen on the dev set, as {broken[0]}" if broken else WAITING
            known |= {cell.path: (cell, why) for cell in tested}
            continue
        for cell in tested:
            state_of(cell)
    return list(known.values())
