"""Studies on a cluster of Ray: what one process makes, whatever is killed meanwhile."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lm_eval_icl.cli.train import training
from lm_eval_icl.errors import InputError
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies import cluster
from lm_eval_icl.studies.conduct import Here, Outcome, Unit
from lm_eval_icl.studies.grid import Variant
from lm_eval_icl.studies.targets import Cell, Model
from lm_eval_icl.studies.unit_runner import Options
from tests import commands
from tests.processes import Process, run_command
from tests.studies import running

STUDY: dict[str, Any] = {
    "models": f"pretrained={model_path()}",
    "methods": ["icl", {"deepthink": {"T": "1..2", "eta": 0.1}}],
    "tasks": ["icl_demo_short", "icl_demo_four"],
    "num_fewshot": 2,
    "seeds": 0,
    "demonstrations": "herding:unit=True",
    "dev": {"size": 4, "choose": "T"},
    "train": {
        "tasks": "icl_demo_short",
        "steps": 2,
        "num_fewshot": 2,
        "batch_size": 2,
        "eval_steps": 0,
    },
}
ray = pytest.importorskip("ray", reason="tests of Ray need: pip install -e '.[cluster]'")

OPTIONS = Options("cpu", "8", 4)  # as the command has them

pytestmark = pytest.mark.usefixtures("own_tasks")


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes with a core each, besides a head without any."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.removable = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def one(tmp_path_factory, own_tasks) -> running.Ran:
    """The study in one process."""
    return running.conduct(tmp_path_factory.mktemp("one") / "one", OPTIONS, **STUDY)


def assert_alike(study: running.Ran, one: running.Ran) -> None:
    """The same choices, the same cells, and the same predictions."""
    assert study.folder.there == one.folder.there
    assert len(one.cells()) == 2 * (3 + 2)
    for cell in one.cells():
        assert study.facts(cell)["indices"] == one.facts(cell)["indices"]
        mine = study.samples(cell)
        theirs = one.samples(cell)
        running.assert_alike(mine, theirs)
        assert [sample["acc"] for sample in mine] == [sample["acc"] for sample in theirs]


def on_ray(study: running.Ran, address: str, kind: type = cluster.OnRay) -> Any:
    made = cluster.study_on_ray(
        address, study.grid, study.options, study.folder.path, training, None
    )
    made.__class__ = kind
    return made


class Sabotaged(cluster.OnRay):
    """A worker is killed, and then a node is removed, as the study goes on."""

    kills = 1
    remove = None

    def _answer(self, worker: cluster.Worker) -> Sequence[Outcome]:
        outcomes = super()._answer(worker)
        mine = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                mine += (
                    [process]
                    if process.name() in ("ray::StudyWorker", "ray::StudyWorker.run")
                    else []
                )
        if outcomes and self.kills and mine:
            random.choice(mine).kill()
            self.kills -= 1
        elif outcomes and not self.kills and self.remove:
            self.remove()
            self.remove = None
        return outcomes


def run_here(
    monkeypatch, worker: type, cores: int, *arguments: object
) -> tuple[dict[str, Any], int]:
    """The outcomes of two units of one cell each by task, and how many workers there were at
    once."""
    monkeypatch.setattr(
        ray, "init", lambda address, init=ray.init, **keys: init(address, num_cpus=cores, **keys)
    )
    model = Model({"pretrained": "m"})
    outcomes: dict[str, Any] = {}
    workers = 0
    with cluster.OnRay(
        cluster.connected(""), worker, arguments, lambda _: (("num_cpus", 1),)
    ) as pool:
        for task in ("icl_demo_four", "icl_demo_short"):
            pool.submit((Cell(model, Variant("icl", {}, 0), task, 2, None, 0),))
        while pool.running:
            outcomes |= {target.task: outcome for target, outcome in pool.wait()}
            workers = max(workers, len(pool.workers))
    return outcomes, workers


@pytest.mark.slow
def test_a_unit_whose_workers_are_lost_fails_on_this_machine(monkeypatch):
    """The other units go on."""

    class Deadly:
        def run(self, unit: Unit) -> list[Outcome]:
            import os

            if unit[0].task == "icl_demo_four":
                os._exit(1)
            return [(target, {}) for target in unit]

    outcomes, workers = run_here(monkeypatch, Deadly, 2)
    assert workers == 2
    assert outcomes["icl_demo_short"] == {}
    assert "its worker was lost 3 times" in outcomes["icl_demo_four"]


@pytest.mark.slow
def test_losses_of_other_units_do_not_count(monkeypatch, tmp_path):
    """A worker that was restarted as often as it may be is lost once more."""

    class Unlucky:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def run(self, unit: Unit) -> list[Outcome]:
            import os

            lost = self.folder / unit[0].task
            if not lost.exists():
                lost.touch()
                os._exit(1)
            return [(target, {}) for target in unit]

    monkeypatch.setattr(cluster, "_RESTARTS", 1)
    outcomes, _ = run_here(monkeypatch, Unlucky, 1, tmp_path)
    assert outcomes == {"icl_demo_four": {}, "icl_demo_short": {}}


@pytest.mark.slow
def test_workers_whose_processes_end_at_once_fail_all_units(monkeypatch, tmp_path):
    class Stillborn:
        def __init__(self, folder: Path) -> None:
            import os

            folder.joinpath(str(os.getpid())).touch()
            os._exit(1)

        def run(self, unit: Unit) -> list[Outcome]:
            return [(target, {}) for target in unit]

    monkeypatch.setattr(cluster, "_RESTARTS", 1)
    outcomes, _ = run_here(monkeypatch, Stillborn, 1, tmp_path)
    assert outcomes.keys() == {"icl_demo_four", "icl_demo_short"}
    for outcome in outcomes.values():
        assert outcome.startswith("a worker cannot begin (its worker process has died")
    assert len(list(tmp_path.iterdir())) == 2  # not twice for each unit


@pytest.mark.slow
def test_a_driver_a_worker_and_a_node_are_lost(nodes, one, tmp_path):
    """The driver is killed, then a worker, then a node goes.

    What was done is not run again, and what comes out is the same.
    """
    two = tmp_path / "two"
    file = two.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(STUDY))
    options = [
        "--device",
        "cpu",
        "--batch_size",
        "8",
        "--limit",
        "4",
        "--output",
        str(two),
        "--ray",
        nodes.address,
    ]

    def there() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in two.glob("cells/*/*/[!.]*/results_*")}

    driver = Process(run_command, ["lm-eval-icl", "study", str(file), *options])
    until = time.monotonic() + 900
    while not there():
        assert time.monotonic() < until
        assert driver.process.is_alive(), driver.finish()
        time.sleep(0.05)
    driver.kill()
    before = there()
    pools = list[Sabotaged]()

    def executor(study: running.Ran) -> Sabotaged:
        pools.append(on_ray(study, nodes.address, Sabotaged))
        pools[0].remove = lambda: nodes.remove_node(nodes.removable.pop())
        return pools[0]

    study = running.conduct(two, OPTIONS, None, executor, **STUDY)
    pools[0].__exit__()
    assert pools[0].kills == 0
    assert pools[0].remove is None
    assert len(nodes.removable) == 1
    assert before.items() <= there().items()
    assert_alike(study, one)


@pytest.mark.slow
def test_a_worker_that_fits_no_node_is_refused(nodes, tmp_path):
    large = {"pretrained": str(model_path()), "max_length": 500, "resources": {"num_cpus": 64}}
    study = running.opened(tmp_path / "o", OPTIONS, **{**STUDY, "models": [STUDY["models"], large]})
    with pytest.raises(InputError, match=r"resources: .*: no node of the cluster has num_cpus=64"):
        on_ray(study, nodes.address)


@pytest.mark.slow
def test_a_study_whose_workers_cannot_begin_says_which_cells_it_lacks(nodes, tmp_path, monkeypatch):
    """Here, the workers have another version of torch."""
    file = running.write(tmp_path / "s.yaml", methods="icl")
    line = ["study", file, "--output", tmp_path / "o", "--limit", 4, "--device", "cpu"]
    commands.run(*line, "--seeds", 0)
    ours = cluster.versions()
    monkeypatch.setattr(cluster, "versions", lambda: {**ours, "torch": "0.1"})
    why = r"a worker cannot begin \(on \S+: torch .* the study was started with 0\.1\)"
    said = commands.refused(*line, "--ray", nodes.address)
    assert re.match(rf"1 of 2 cells failed; the first: {why}", said)
    record = json.loads((tmp_path / "o/study.json").read_text())
    assert len(record["cells"]) == 1
    (failure,) = record["failures"].values()
    assert re.fullmatch(why, failure)


# Without a cluster.


def test_which_unit_a_worker_takes():
    a = Model({"pretrained": "a"})
    b = Model({"pretrained": "b"})
    executor = Here(lambda unit: iter(()))
    for model, task in ((a, "1"), (a, "2"), (b, "1"), (b, "2")):
        executor.submit((Cell(model, Variant("icl", {}, 0), task, 2, None, 0),))

    def take(held: str, *holders: Model) -> str:
        ((cell,),) = [
            executor.take(
                held, dict.fromkeys((model.folder for model in holders), 1), executor.waiting
            )
        ]
        return f"{cell.model.name} {cell.task}"

    assert take(b.folder) == "b 1"  # of the model that it holds
    assert take("", a) == "b 2"  # of one that few hold
    assert executor.take("", {}, [b.folder]) is None
    assert take(b.folder, b) == "a 1"
    assert take("") == "a 2"
    assert executor.take("", {}, executor.waiting) is None
