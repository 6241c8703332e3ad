"""Studies on a cluster of Ray: the files of one process, whatever is killed meanwhile.

LM_EVAL_ICL_KILLS=5 kills the driver five times, and then workers five times.
"""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import socket
import sys
import time
from io import StringIO
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console

from lm_eval_icl.cli.train import training
from lm_eval_icl.errors import InputError
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies import cluster, grid, screen
from lm_eval_icl.studies.cells import Grid, Model
from lm_eval_icl.studies.conduct import Conductor
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.order import Queue, Unit
from lm_eval_icl.studies.run import Options
from tests import commands
from tests.processes import Process, run_command
from tests.studies import running

ray = pytest.importorskip("ray")
KILLS = int(os.environ.get("LM_EVAL_ICL_KILLS", "1"))
STUDY = {
    "models": f"pretrained={model_path()}",
    "methods": ["icl", {"deepthink": {"T": "1..2", "eta": 0.1}}],
    "tasks": ["icl_demo_short", "icl_demo_four"],
    "num_fewshot": 2,
    "seeds": "0..1",
    "demonstrations": ["stratified", "herding:unit=True"],
    "dev": {"size": 4, "choose": "T"},
    "train": {"tasks": "icl_demo_short", "steps": 2, "num_fewshot": 2, "batch_size": 2, "eval_steps": 0},
}
OPTIONS = Options("cpu", "8", 4)  # as the command has them, since results say so
APART = {*running.TIMES, *running.COUNTS}
if KILLS > 1:  # a driver that is killed while it writes a unit leaves cells that are run without the others
    APART |= {"cells", "orders", "passes"}

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


def opened(output: Path, **keys: object) -> Conductor:
    return Conductor(running.opened(output, OPTIONS, **{**STUDY, **keys}), None, training)


def written(output: Path) -> dict[str, object]:
    """The files of cells, choices and checkpoints, without what may differ."""
    files = running.contents(output, APART)
    return {name: content for name, content in files.items() if name.startswith(("cells", "choices", "checkpoints"))}


class Sabotaged(cluster.StudyCluster):
    """Kills workers, and then removes a node, as the study goes on."""

    kills, remove, last = KILLS, None, 2

    def show(self, queue):  # called when units have been given to all that were idle
        super().show(queue)
        if self.conductor.cells_ended <= self.last:
            return
        self.last = self.conductor.cells_ended
        mine = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::Actor")]
        if self.kills and mine:
            random.choice(mine).kill()
            self.kills -= 1
        elif self.remove:
            self.remove()
            self.remove = None


def test_the_files_are_those_of_one_process(nodes, tmp_path, monkeypatch):
    """Although the driver is killed, and then a worker, and then a node goes. The first driver's workers see the
    folder; the second's get the trained checkpoints through the object store."""
    one, two = tmp_path / "one", tmp_path / "two"
    conductor = opened(one)
    with conductor.folder.locked():
        conductor.run()
    expected = written(one)
    assert any(name.startswith("choices") for name in expected) and any("safetensors" in name for name in expected)

    file = two.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(STUDY))
    options = ["--device", "cpu", "--batch_size", "8", "--limit", "4", "--output", str(two), "--ray", nodes.address]
    for i in range(KILLS):
        driver = Process(run_command, ["lm-eval-icl", "study", str(file), *options])
        there = len(list(two.glob("cells/**/results*.json")))
        until = time.monotonic() + 240
        while len(list(two.glob("cells/**/results*.json"))) < there + (1 if i else 0) or not list(
            two.glob("checkpoints/*")
        ):
            assert time.monotonic() < until, driver.said
            time.sleep(0.05)
        driver.kill()
    before = {path: path.stat().st_mtime_ns for path in two.glob("cells/**/results*.json")}

    monkeypatch.setattr(cluster, "stamp", lambda folder: (0, 0))
    conductor = opened(two)
    with conductor.folder.locked(), Sabotaged(conductor, nodes.address) as pool:
        pool.remove = lambda: nodes.remove_node(nodes.removable.pop())
        conductor.run(pool.ended)
        assert pool.remove is None and not pool.kills and pool.losses
    assert written(two) == expected
    assert before.items() <= {path: path.stat().st_mtime_ns for path in two.glob("cells/**/results*.json")}.items()
    nodes.add_node(num_cpus=1)


# Light actors.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # by name, each would import all that is imported here


class Sleeper:
    """An actor that imports nothing heavy."""

    def begin(self) -> str:
        return ""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def run(self, task: str) -> str:
        if task == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        return task


class Sleepers(cluster.Cluster):
    received: list[str]

    def needs(self, model):
        return {"num_cpus": 1}

    def begin(self, options):
        actor = ray.remote(Sleeper).options(**options, max_restarts=0).remote()
        return actor, actor.begin.remote()

    def submit(self, actor, unit):
        return actor.run.remote(unit.task)

    def receive(self, unit, result):
        self.received.append(result)

    def give_up(self, unit, why, log):
        self.received.append(f"{unit.task}: {why}")

    def show(self, queue):
        pass


def test_a_unit_that_kills_its_worker_is_given_up_and_the_others_are_run(nodes):
    queue = Queue()
    for task in ("a", "deadly", "b", "full", "c"):
        queue.add(Unit(Model({"pretrained": "m"}), "test", task))
    with Sleepers(nodes.address) as pool:
        pool.received = []
        ended = [pool.ended(queue).task for _ in range(5)]
    assert sorted(ended) == ["a", "b", "c", "deadly", "full"]
    *others, deadly, full = sorted(pool.received)
    assert others == ["a", "b", "c"] and pool.losses.total() == 6
    last = "its worker was lost 3 times; the last time:"
    assert deadly.startswith(f"deadly: {last} its worker process has died.") and "\n" not in deadly
    assert full == f"full: {last} OSError: [Errno 28] No space left on device"


def test_one_worker_on_each_node_is_asked(nodes, tmp_path, monkeypatch):
    def begin(self, options):
        actor = ray.remote(Sleeper).options(**options).remote()
        return actor, actor.node.remote()

    monkeypatch.setattr(cluster.StudyCluster, "begin", begin)
    with cluster.StudyCluster(opened(tmp_path / "o"), nodes.address) as pool:
        asked = pool.ask()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
    assert len(asked) == 2 and set(asked) == alive


def test_dry_run_names_the_worker_that_has_no_such_model(nodes, tmp_path, monkeypatch, capsys):
    """Workers begin in this process, in which the path then is no more, as on a machine with other disks."""
    here, exists = tmp_path / "model", Path.exists
    here.symlink_to(model_path())

    def begin(self, options):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(Path, "exists", lambda path: path != here and exists(path))
            return None, ray.put(cluster.Actor().begin(cluster.versions(), [self._setup]))

    monkeypatch.setattr(cluster.StudyCluster, "begin", begin)
    keys = {"methods": "icl", "tasks": "icl_demo_short", "num_fewshot": 2}
    for model, number in ((here, 2), (tmp_path / "nobody", 3)):  # the plan lacks what nobody has, too
        (file := tmp_path / "s.yaml").write_text(yaml.safe_dump({**keys, "models": f"pretrained={model}"}))
        dry_run = [str(file), "--dry_run", "--device", "cpu", "--limit", "2", "--ray", nodes.address]
        assert f"cannot be run as it is: {number} missing" in commands.refused("study", *dry_run)
        counted, *missing = capsys.readouterr().out.splitlines()[-3:]
        assert counted == "workers: 0 of 2 nodes can run the study"
        for line in missing:
            assert re.fullmatch(rf"missing: worker on \S+ \(node \w+\): there is no {model}, which the study .*", line)


def test_an_address_where_nothing_answers_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InputError, match=rf"--ray {address}: nothing answers there \(ConnectionRefused.*refused\)\.$"):
        Sleepers(address)


def test_what_a_worker_refuses(nodes, tmp_path):
    conductor = opened(tmp_path / "o")
    ray.init(nodes.address, log_to_driver=False)
    try:
        contents = cluster.contents_of(conductor.worker)

        def answer(versions=None, paths=(), **other):
            facts = conductor.progress.study, OPTIONS, None, False, training, tmp_path / "o", (0, 0), paths
            setup = ray.put(cluster.Setup(*facts, {**contents, **other}))
            return cluster.Actor().begin({**cluster.versions(), **(versions or {})}, [setup])

        assert answer() == ""
        assert "has torch" in answer({"torch": "0.1"}) and "started with 0.1" in answer({"torch": "0.1"})
        assert "started with 9" in answer({"lm-eval-icl": "9"}) and "worker on " in answer({"lm-eval-icl": "9"})
        assert "there is no /of/another/machine, which the study needs" in answer(paths=("/of/another/machine",))
        assert "another code of icl than" in answer(**{"code of icl": "0"})
        assert "another data of task icl_demo_four than" in answer(**{"data of task icl_demo_four": "0"})
    finally:
        ray.shutdown()


# Without Ray.


def test_the_status_of_a_study_that_runs_says_why_cells_have_failed(tmp_path):
    """And of one that was killed: what its process has noted is there until the next one begins."""
    conductor = opened(tmp_path / "o")
    folder, (cell, *_) = conductor.folder, conductor.progress.all_cells()

    def status() -> str:
        console = Console(file=StringIO(), width=80)
        screen.print_status(conductor.progress, console, verbose=False)
        return console.file.getvalue()

    with folder.locked():
        folder.note_running("cell 1 of 2: 2 workers", {cell.path: "out of memory"})
        running = status()
        noted = (folder.path / ".running.json").read_bytes()
    assert "running: process " in running and "(at cell 1 of 2: 2 workers)" in running
    assert "1 failed\n" in running and f"failed: {cell.path}: out of memory\n" in running
    assert "failed" not in status()
    (folder.path / ".running.json").write_bytes(noted)  # as a killed process leaves it
    assert "running" not in status() and f"failed: {cell.path}: out of memory\n" in status()
    with folder.locked():
        assert "failed" not in status()


def test_ray_is_not_imported_without_the_option(tmp_path, monkeypatch, capsys):
    keys = {"methods": "icl", "dev": None, "train": None, "demonstrations": None, "tasks": "icl_demo_short", "seeds": 0}
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **keys}))
    monkeypatch.setitem(sys.modules, "ray", None)
    commands.run("study", file, "--dry_run")
    assert "1 cells" in capsys.readouterr().out
    said = commands.refused("study", str(file), "--dry_run", "--ray")
    assert said == "--ray: Ray is not installed: pip install 'lm-eval-icl[cluster]'."


def test_which_unit_a_worker_takes():
    first, second = Model({"pretrained": "a"}), Model({"pretrained": "b"})
    queue = Queue()
    for model, kind in ((first, "test"), (first, "dev"), (second, "test"), (second, "train"), (second, "dev")):
        queue.add(Unit(model, kind, kind))
    a, b = first.folder, second.folder

    def best(held, workers=(), fits=lambda model: True):
        return queue.best(held, dict.fromkeys(workers, 1), fits)

    assert best(a) == b and queue.take(b).kind == "train"  # for which everybody waits
    assert best(a) == a and best(b) == b  # what it holds
    assert best(None, [a]) == b and best(None, [b]) == a  # what few hold
    assert best(a, fits=lambda model: model is second) == b and best(a, fits=lambda model: False) is None
    assert queue.take(a).kind == "dev" and best(None) == b  # for which others wait
    again = Unit(second, "dev", "again")
    queue.add(again, again=True)
    assert [queue.take(b).task for _ in range(3)] == ["again", "dev", "test"]
    assert best(b) == a and queue.waiting() == {a: 3}


def test_resources_are_of_a_model_and_change_nothing(tmp_path):
    def read(models, overrides=None, **keys):
        file = tmp_path / "s.yaml"
        file.write_text(yaml.safe_dump({"methods": "icl", "tasks": "t", "models": models, **keys}))
        study = grid.read(str(file), overrides or {})
        return study, Grid(study, {}).models

    plain, (model,) = read("pretrained=m")
    study, (large,) = read([{"pretrained": "m", "resources": {"num_gpus": 2}}], resources={"num_cpus": 4})
    assert large.resources == {"num_gpus": 2, "num_cpus": 4} and not model.resources
    assert study.model_dump() == plain.model_dump() and large.folder == model.folder
    assert read([{"pretrained": "m", "resources": {"memory": 1}}], {"model_args": "pretrained=n"})[1][0].resources == {}
    refusals = [({"gpus": 1}, "gpus"), ({"num_gpus": -1}, "must be greater than or equal to 0"), (3, "be a mapping")]
    for resources, why in refusals:
        with pytest.raises(InputError, match=why):
            read([{"pretrained": "m", "resources": resources}])


def test_what_a_folder_receives_is_there_whole(tmp_path):
    folder = StudyFolder(tmp_path / "o")
    files = {"cells/m/icl/t/results_1.json": b"1", "cells/m/icl/t/samples_1.jsonl": b"2", "choices/m/t.json": b"3"}
    files["checkpoints/c/sub/x.safetensors"] = b"4"
    more = {"choices/m/other.json": b"5", "cells/m/icl/u/results_2.json": b"6"}  # beside the others
    with folder.locked():
        (folder.cells / "m/icl/t").mkdir(parents=True)
        (folder.cells / "m/icl/t/before.json").write_text("0")
        for received, expected in ((files, files), (files, files), (more, files | more)):
            folder.receive(received)
            there = {str(p.relative_to(folder.path)): p.read_bytes() for p in folder.path.rglob("*/*") if p.is_file()}
            assert there == expected
