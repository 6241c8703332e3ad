"""The cost of conducting, without models: 10,000 cells whose units sleep, on 64 logical workers of Ray on this machine.

python -m tests.studies.scale [CELLS_A_UNIT] [SECONDS_A_UNIT]
"""

from __future__ import annotations

import random
import sys
import time
from types import SimpleNamespace
from typing import Any

WORKERS, CELLS = 64, 10_000


class Sleeper:
    """A worker that imports nothing."""

    def run(self, seconds: float) -> None:
        import time

        time.sleep(seconds)


def main(cells_a_unit: int = 10, seconds_a_unit: float = 3.0) -> None:
    import ray

    import __main__
    from lm_eval_icl.studies.cells import Grid, StudyTask
    from lm_eval_icl.studies.cluster import Hired, OnRay
    from lm_eval_icl.studies.conduct import DONE, Outcome, Unit, conduct, states
    from lm_eval_icl.studies.grid import Study
    from tests.studies.test_ready import Paths

    class Sleepers(OnRay):
        """Workers are sent how long they sleep, and not the unit, whose classes they would have to import."""

        slept, begun = 0.0, (0.0, 0.0)

        def _answer(self, worker: Hired) -> list[Outcome]:
            unit = worker.unit or ()
            super()._answer(worker)
            return [(target, {}) for target in unit]

        def _dismiss(self, worker: Hired) -> None:
            worker.actor = worker.actor.actor
            super()._dismiss(worker)

    def handle(actor: Any) -> Any:
        """An actor to which a unit is the time that it sleeps."""

        def run(unit: Unit) -> Any:
            if pool.begun[0]:
                pool.slept += (seconds := seconds_a_unit * random.uniform(0.5, 1.5))
                return actor.run.remote(seconds)
            if sum(worker.unit is not None for worker in pool.workers) == WORKERS:  # all have begun
                ray.get([worker.actor.actor.run.remote(0) for worker in pool.workers])
                pool.begun = time.perf_counter(), time.process_time()
            return actor.run.remote(0)

        return SimpleNamespace(actor=actor, run=SimpleNamespace(remote=run))

    random.seed(0)
    units = CELLS // cells_a_unit
    tasks = [f"t{i}" for i in range(units // 10)]
    keys = {"models": "pretrained=m", "methods": {"deepthink": {"T": f"2..{cells_a_unit + 1}"}}, "seeds": "0..9"}
    grid = Grid(
        Study.model_validate({**keys, "tasks": tasks}), {name: StudyTask(name, (2,), {name: ()}) for name in tasks}
    )
    folder, failed = Paths(), dict[str, str]()
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    with Sleepers(ray, Sleeper, (), lambda _: (("num_cpus", 1),)) as pool:
        made = ray.remote(__main__.Sleeper)
        pool._class = SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda: handle(made.options(**options).remote()))
        )
        conduct(grid, folder, pool, failed)
        wall, processor = time.perf_counter() - pool.begun[0], time.process_time() - pool.begun[1]
    assert [state for _, state in states(grid, folder, failed)] == [DONE] * CELLS and not failed
    print(f"{CELLS} cells in {units} units of {seconds_a_unit} s on {WORKERS} workers: {wall:.1f} s")
    print(f"driver: {1000 * processor / CELLS:.2f} ms of processor time a cell")
    print(f"idle: {100 * (1 - pool.slept / (WORKERS * wall)):.1f} % of the workers' time, from when all are busy")


if __name__ == "__main__":
    main(*(float(text) if "." in text else int(text) for text in sys.argv[1:]))
