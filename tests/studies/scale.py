"""The cost of conducting, without models: 10,000 cells whose units sleep, on 64 logical workers of Ray on this machine.

    python -m tests.studies.scale [CELLS_A_UNIT] [SECONDS_A_UNIT]

Prints the driver's seconds a cell (processor time) and the share of the workers' time in which they were idle.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

WORKERS, CELLS = 64, 10_000


class Sleeper:
    """A worker that imports nothing."""

    def refusal(self) -> str:
        return ""

    def run(self, seconds: float) -> None:
        import time

        time.sleep(seconds)


def main(cells_a_unit: int = 10, seconds_a_unit: float = 3.0) -> None:
    import ray

    import __main__
    from lm_eval_icl.studies.cells import Grid, GridTask
    from lm_eval_icl.studies.cluster import Hired, OnRay
    from lm_eval_icl.studies.conduct import DONE, Outcome, Unit, conduct, states
    from lm_eval_icl.studies.grid import Study
    from tests.studies.test_ready import Paths

    class Sleepers(OnRay):
        """Workers are sent how long they sleep, and not the unit, whose classes they would have to import."""

        slept, begun = 0.0, None

        def _give_unit(self, worker: Hired) -> None:
            super()._give_unit(worker)
            if worker.unit is not None and sum(w.unit is not None for w in self.workers) == WORKERS:
                self.begun = self.begun or (time.perf_counter(), time.process_time())

        def _answer(self, worker: Hired) -> list[Outcome]:
            unit = worker.unit
            super()._answer(worker)
            return [(target, {}) for target in unit.targets] if unit else []

        def _dismiss(self, worker: Hired) -> None:
            worker.actor = worker.actor.actor
            super()._dismiss(worker)

    class Handle:
        """An actor to which a unit is the time that it sleeps."""

        def __init__(self, actor: Any) -> None:
            self.actor, self.refusal, self.run = actor, actor.refusal, self

        def remote(self, unit: Unit) -> Any:
            seconds = seconds_a_unit * random.uniform(0.5, 1.5)
            if pool.begun:
                pool.slept += seconds
            return self.actor.run.remote(seconds)

    class Class:
        def options(self, **options: Any) -> Any:
            made = ray.remote(__main__.Sleeper).options(**options)
            return type("Options", (), {"remote": staticmethod(lambda: Handle(made.remote()))})

    random.seed(0)
    units = CELLS // cells_a_unit
    tasks = [f"t{i}" for i in range(units // 10)]
    keys = {"models": "pretrained=m", "methods": {"deepthink": {"T": f"1..{cells_a_unit}"}}, "seeds": "0..9"}
    grid = Grid(Study.model_validate({**keys, "tasks": tasks}), {t: GridTask(t, (2,), (t,), reported=t) for t in tasks})
    folder, failed = Paths(), dict[str, str]()
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    pool = Sleepers(ray, Sleeper, (), lambda model: {"num_cpus": 1})
    pool._class = Class()
    with pool:
        conduct(grid, folder, pool, failed)
        wall, processor = time.perf_counter() - pool.begun[0], time.process_time() - pool.begun[1]
    cells = [state for _, state in states(grid, folder, failed)]
    assert cells == [DONE] * CELLS and not failed
    print(f"{CELLS} cells in {units} units of {seconds_a_unit} s on {WORKERS} workers: {wall:.1f} s")
    print(f"driver: {1000 * processor / CELLS:.2f} ms of processor time a cell")
    print(f"idle: {100 * (1 - pool.slept / (WORKERS * wall)):.1f} % of the workers' time, from when all are busy")


if __name__ == "__main__":
    main(*(float(text) if "." in text else int(text) for text in sys.argv[1:]))
