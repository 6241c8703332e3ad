"""How much of their time the workers of a cluster have nothing to do in a study, with measured times.

    python scripts/benchmarks/cluster_idle.py STUDY --keys YAML --part YAML (docs/reports/clusters.md has what was run)

The study with the keys of --part is run on --limit documents a task, with a small checkpoint. What its units take is
measured in processor seconds of one thread, as are loading the model and a step of training. A unit of the study with
--keys takes the measured seconds for a token of its kind and methods, times its tokens in the product's plan. Each of
--sizes is a model of which all takes as many times longer. A simulation gives the units to workers as the product does.
Workers that load a model are not idle.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from itertools import groupby, pairwise
from pathlib import Path

import torch
import yaml
from torch.optim import optimizer

from lm_eval_icl.cli.train import training
from lm_eval_icl.studies import grid
from lm_eval_icl.studies.cells import Model
from lm_eval_icl.studies.conduct import Conductor, Here
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.order import Queue, Unit, batches
from lm_eval_icl.studies.plan import Plan
from lm_eval_icl.studies.progress import open_study
from lm_eval_icl.studies.run import Options


class Timed(Here):
    """Runs units here, and keeps the processor seconds that they take, without the loading of their models."""

    def ended(self, queue: Queue) -> Unit:
        unit = queue.take(next(iter(queue.waiting())))
        if unit.kind != "train":
            self.worker._load(unit.model)
        begun = time.process_time()
        self.worker.run(unit)
        measured[unit] = time.process_time() - begun
        return unit


def tokens(plan: Plan, unit: Unit) -> int:
    plan.cells = lambda model: unit.cells  # type: ignore[method-assign]
    work = plan.work(unit.model)
    assert work, plan.lacking
    return work[0].tokens


def like(unit: Unit) -> tuple[str, ...]:
    """What units have in common that take the same time for a token."""
    return unit.kind, *sorted({cell.variant.method for cell in unit.cells})


def stage(unit: Unit) -> tuple[str, str, str]:
    return unit.model.folder, unit.task, unit.kind


def simulate(seconds: dict[Unit, float], load: dict[str, float], workers: int) -> float:
    """The share of the workers' time in which they have nothing to do."""
    queue, waiting, left = Queue(), defaultdict[tuple[str, str, str], list[Unit]](list), Counter(map(stage, seconds))
    for unit in seconds:
        model = unit.model.folder
        before = [(model, unit.task, "dev"), (model, "", "train")][("test", "dev", "train").index(unit.kind) :]
        key = next((key for key in before if left[key]), None)
        waiting[key].append(unit) if key else queue.add(unit)
    held: dict[int, str | None] = dict.fromkeys(range(workers))
    loaded = held.copy()  # which a training ends
    idle, ends, now, busy = set(held), list[tuple[float, int, Unit]](), 0.0, 0.0
    while len(queue) or ends:
        for worker in sorted(idle):
            workers_with = Counter(model for model in held.values() if model)
            if (folder := queue.best(held[worker], workers_with, lambda model: True)) is None:
                break
            unit = queue.take(folder)
            cost = seconds[unit] + load[folder] * (unit.kind != "train" and loaded[worker] != folder)
            held[worker], loaded[worker] = folder, folder if unit.kind != "train" else None
            busy += cost
            idle.remove(worker)
            heapq.heappush(ends, (now + cost, worker, unit))
        now, worker, unit = heapq.heappop(ends)
        idle.add(worker)
        left[stage(unit)] -= 1
        for then in [] if left[stage(unit)] else waiting.pop(stage(unit), []):
            queue.add(then)
    return 1 - busy / (now * workers)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("study")
parser.add_argument("--keys", type=yaml.safe_load, default={}, help="of the study, as YAML")
parser.add_argument("--part", type=yaml.safe_load, default={}, help="keys in place of those, for what is run")
parser.add_argument("--limit", type=int, default=10, help="documents of each task that are run")
parser.add_argument("--sizes", type=float, nargs="+", default=[])
given = parser.parse_args()
torch.set_num_threads(1)
measured, rates, steps = dict[Unit, float](), defaultdict[tuple[str, ...], list[float]](list), list[float]()
optimizer.register_optimizer_step_post_hook(lambda *_: steps.append(time.process_time()))
with tempfile.TemporaryDirectory() as path:
    study = grid.read(given.study, {**given.keys, **given.part})
    progress = open_study(study, StudyFolder(Path(path)), Options("cpu", 8, given.limit), None)
    conductor, plan = Conductor(progress, None, training), Plan(progress.grid, progress.leaves)
    with progress.folder.locked():
        conductor.run(Timed(conductor.worker))
    conductor.worker._forget()
    begun = time.process_time()
    conductor.worker._load(progress.models[0])
    loading = time.process_time() - begun
    for unit in filter(lambda unit: unit.cells, measured):
        rates[like(unit)].append(measured[unit] / tokens(plan, unit))
    progress = open_study(grid.read(given.study, given.keys), StudyFolder(Path(path) / "all"), Options("cpu"), None)
step = statistics.median([after - before for before, after in pairwise(steps)] or [0.0])
plan, seconds, load = Plan(progress.grid, progress.leaves), dict[Unit, float](), dict[str, float]()
for model in progress.models:
    sizes = [(Model({"pretrained": str(i)}), n) for i, n in enumerate(given.sizes)] or [(model, 1.0)]
    load |= {each.folder: n * loading for each, n in sizes}
    if model.training:
        seconds |= {Unit(each, "train"): n * int(model.training.options["steps"]) * step for each, n in sizes}
    for _, some in groupby(batches(Plan.cells(plan, model)), lambda batch: batch.requests):
        first, *others = some
        unit = Unit(model, first.cells[0].split, first.cells[0].task, (first, *others))
        cost = statistics.median(rates[like(unit)]) * tokens(plan, unit)
        seconds |= {Unit(each, unit.kind, unit.task): n * cost for each, n in sizes}
print(f"{given.study}: {len(seconds)} units; loading {loading:.2f} s, a step of training {step:.2f} s")
for kind in Queue.KINDS:
    if costs := [cost for unit, cost in seconds.items() if unit.kind == kind]:
        print(f"{kind}: {len(costs)}, {min(costs):.3g} to {max(costs):.3g} s, {sum(costs) / 3600:.3g} h in all")
print({workers: f"{simulate(seconds, load, workers):.1%}" for workers in (1, 2, 4, 8, 16, 32, 64)})
