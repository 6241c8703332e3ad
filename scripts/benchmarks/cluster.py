"""What conducting a study on a cluster costs: the driver's time a cell, and the idle time of many workers.

    python scripts/benchmarks/cluster.py driver [--cells 10000] [--workers 64] [--cells_per_unit 8] [--sleep 0.0]
    python scripts/benchmarks/cluster.py idle --seconds 2 --load 20

`driver` runs units that sleep on actors that import nothing heavy, on a Ray of this machine with logical cores; nothing
is written. `idle` simulates the units of `invicl-table2` (`metaicl`) and of `deep-thinking-table2` (`table2`) as the
queue gives them to workers, with the times that are given: of a unit on the test set, of loading a model, both for a
billion parameters in `table2`, and of a training. A worker that loads is not idle.
"""

from __future__ import annotations

import argparse
import heapq
import resource
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lm_eval_icl.studies.cells import Model
from lm_eval_icl.studies.cluster import Cluster
from lm_eval_icl.studies.order import Queue, Unit


class Sleeper:
    def begin(self) -> str:
        return ""

    def run(self, seconds: float) -> None:
        time.sleep(seconds)


class Sleepers(Cluster):
    """Workers that sleep."""

    sleep = 0.0

    def needs(self, model: Model) -> dict[str, float]:
        return {"num_cpus": 1}

    def begin(self, options: Mapping[str, Any]) -> tuple[Any, Any]:
        actor = self.ray.remote(Sleeper).options(**options).remote()
        return actor, actor.begin.remote()

    def submit(self, actor: Any, unit: Unit) -> Any:
        return actor.run.remote(self.sleep)

    def receive(self, unit: Unit, result: Any) -> None: ...

    def give_up(self, unit: Unit, why: str, log: str) -> None:
        raise RuntimeError(why)

    def show(self, queue: Queue) -> None: ...


def driver(cells: int, workers: int, per_unit: int, sleep: float) -> None:
    import ray
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": workers, "include_dashboard": False})
    queue = Queue()
    for i in range(cells // per_unit):
        queue.add(Unit(Model({"pretrained": f"model{i % 4}"}), "test", str(i)))
    Sleepers.sleep = sleep
    pool = Sleepers(nodes.address)
    with pool:
        pool._hire(queue)
        while not all(hired.ready for hired in pool.hired):
            for hired in pool.hired:
                ray.get(hired.call)
                hired.ready, hired.call = True, None
        begun, used = time.perf_counter(), time.process_time()
        for _ in range(cells // per_unit):
            pool.ended(queue)
        seconds, used = time.perf_counter() - begun, time.process_time() - used
        found = len(pool.hired)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{cells} cells in {cells // per_unit} units on {found} workers: {seconds:.1f} s; the driver's own time")
    print(f"{1000 * used / cells:.2f} ms a cell, {1000 * used * per_unit / cells:.2f} ms a unit; {memory:.0f} MiB")
    nodes.shutdown()


def simulate(study: str, workers: int, seconds: float, load: float, train: float, dev: float) -> float:
    """The share of the workers' time in which they have nothing to do."""
    queue, waits = Queue(), dict[tuple[str, str], list[Unit]]()
    left = Counter[tuple[str, str]]()
    sections = list[tuple[Model, str, int, list[Unit]]]()
    sizes: dict[str, float] = {}
    if study == "metaicl":  # seven settings under six methods; 20 tasks and five seeds, batchicl beside icl
        for i in range(42):
            model = Model({"pretrained": f"m{i}"})
            queue.add(Unit(model, "train"))
            number = 100 * (2 if i % 6 == 0 else 1)
            sections.append((model, "", 1, [Unit(model, "test") for _ in range(number)]))
            sizes[model.folder] = 1.0
    else:  # eight models, five tasks, ten seeds
        for billions in (0.125, 0.35, 0.355, 1.5, 2.7, 2.7, 7.0, 13.0):
            model = Model({"pretrained": f"m{len(sizes)}"})
            sizes[model.folder] = billions
            for task in map(str, range(5)):
                for _ in range(10):
                    queue.add(Unit(model, "dev", task))
                sections.append((model, task, 10, [Unit(model, "test", task) for _ in range(10)]))
    for model, task, number, then in sections:
        waits[model.folder, task], left[model.folder, task] = then, number
    factor = {"dev": dev, "test": 1.0, "train": train / seconds}
    held: dict[int, str | None] = dict.fromkeys(range(workers))
    ends: list[tuple[float, int, Unit]] = []
    now, busy = 0.0, 0.0
    idle = list(range(workers))
    while len(queue) or ends:
        counts = Counter(model for model in held.values() if model)
        for worker in list(idle):
            folder = queue.best(held[worker], counts, lambda model: True)
            if folder is None:
                break
            unit = queue.take(folder)
            cost = sizes[folder] * seconds * factor[unit.kind] + sizes[folder] * load * (
                held[worker] != folder and unit.kind != "train"
            )
            counts[folder] += held[worker] != folder
            held[worker] = folder if unit.kind != "train" else None
            busy += cost
            idle.remove(worker)
            heapq.heappush(ends, (now + cost, worker, unit))
        now, worker, unit = heapq.heappop(ends)
        idle.append(worker)
        key = unit.model.folder, "" if unit.kind == "train" else unit.task
        if unit.kind in ("train", "dev"):
            left[key] -= 1
            if not left[key]:
                for each in waits[key]:
                    queue.add(each)
    return 1 - busy / (now * workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["driver", "idle"])
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--cells_per_unit", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a unit on the test set")
    parser.add_argument("--load", type=float, default=20.0, help="seconds of loading a model")
    parser.add_argument("--dev", type=float, default=23.0, help="how much longer a unit on the dev set takes")
    parser.add_argument("--train", type=float, default=600.0, help="seconds of a training")
    given = parser.parse_args()
    if given.what == "driver":
        driver(given.cells, given.workers, given.cells_per_unit, given.sleep)
        return
    for study in ("metaicl", "table2"):
        for workers in (1, 2, 4, 8, 16, 32, 64):
            share = simulate(study, workers, given.seconds, given.load, given.train, given.dev)
            print(f"{study}: {workers} workers, {share:.1%} idle")


if __name__ == "__main__":
    main()
