"""What conducting a study on a cluster costs the driver a cell.

    python scripts/benchmarks/cluster.py [--cells 10000] [--workers 64] [--cells_per_unit 8] [--sleep 0.0]

Units that sleep are run on actors that import nothing heavy, on a Ray of this machine with logical cores. Nothing is
written.
"""

from __future__ import annotations

import argparse
import resource
import time
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--cells_per_unit", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.0)
    given = parser.parse_args()
    driver(given.cells, given.workers, given.cells_per_unit, given.sleep)


if __name__ == "__main__":
    main()
