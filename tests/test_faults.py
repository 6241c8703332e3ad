"""The disk fails at every operation of every writer: one line, nothing lost, nothing half written,
and the same command continues when there is room."""

from __future__ import annotations

import ast
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval.loggers.evaluation_tracker as tracker
import numpy as np
import pytest

import lm_eval_icl
from lm_eval_icl import version
from lm_eval_icl.cli import leaderboard
from lm_eval_icl.demonstrations import kept
from lm_eval_icl.demonstrations.chooser import Choice, Chooser
from lm_eval_icl.demonstrations.retrieve import Retriever, Similar, Texts
from lm_eval_icl.demonstrations.selector import SelectionMethod
from lm_eval_icl.demonstrations.selectors import Herding
from lm_eval_icl.errors import CannotWrite, InputError, writing
from lm_eval_icl.files import HALF, write_atomically
from lm_eval_icl.harness.response_cache import Responses
from lm_eval_icl.inference import identity
from lm_eval_icl.leaderboard import figures
from lm_eval_icl.leaderboard import page as pages
from lm_eval_icl.results import read as reading
from lm_eval_icl.results.build import build
from lm_eval_icl.results.collect import collect
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Variant
from lm_eval_icl.studies.targets import Cell, Model
from lm_eval_icl.training import finetune
from lm_eval_icl.training.trainer import last_checkpoint
from tests import boards, tiny
from tests.faults import VANISHES, Disk, faults, files_of, full
from tests.training import test_training

PACKAGE = Path(lm_eval_icl.__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What two evaluations are read as: the first, and both."""
    folder = tmp_path_factory.mktemp("runs")
    boards.write(folder, "icl", 0, n=8)
    first = reading.read([folder], quiet=True)[0]
    boards.write(folder, "star", 0, n=8, says=[0] * 8)
    return [first, reading.read([folder], quiet=True)[0]]


@dataclass(frozen=True)
class Writer:
    """A function that writes into a folder. It is called with 0 first, and then with 1, which
    writes more, or other contents.

    Attributes:
        names_in_error: a text that names the file in the line; None if no error is raised, since
            what could not be kept is made again.
        begin: what the next command does first.
    """

    write: Callable[[Path, int], Any]
    names_in_error: str | None
    begin: Callable[[Path], Any] = str


def board_files(runs: list[Any]) -> Writer:
    """What `lm-eval-icl leaderboard` writes. What a page says takes long and is tested
    elsewhere."""
    made = [build(of_runs, []) for of_runs in runs]

    def write(folder: Path, number: int) -> None:
        files: dict[str, Any] = dict.fromkeys(("md", "tex", "plots", "samples"))
        files |= {"csv": folder / "board.csv", "output": folder / "board.html"}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(figures, "svgs", lambda board: {})
            patched.setattr(pages, "page", lambda board, *_: f"{len(board.entries)} rows\n" * 9)
            leaderboard._write(made[number], SimpleNamespace(**files))  # type: ignore[arg-type]

    return Writer(write, "board.")


def collected(runs: list[Any]) -> Writer:
    def write(folder: Path, number: int) -> None:
        collect(runs[number], folder)

    return Writer(write, "--output")


def file_of_choices(runs: list[Any]) -> Writer:
    """What `lm-eval-icl select --output` does."""

    def write(folder: Path, number: int) -> None:
        with writing(f"--output {folder / 'chosen.json'}"):
            write_atomically(folder / "chosen.json", json.dumps({"tasks": [0] * (10 + number)}))

    return Writer(write, "chosen.json")


class First(Chooser):
    """Chooses the first documents."""

    def __init__(self) -> None:
        pass

    def choose(self, how: SelectionMethod, n: int, seed: int) -> Choice:
        return Choice(tuple(range(n)))


def choices(runs: list[Any]) -> Writer:
    pool: Any = SimpleNamespace(name="t", docs_digest="0" * 64, prompts="")

    def write(folder: Path, number: int) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("LM_EVAL_ICL_CACHE", str(folder))
            for n in range(3, 4 + number):
                made = kept.chosen(First(), pool, Herding(), n, 0, {})
        return made["indices"]

    return Writer(write, None)


def rankings(runs: list[Any]) -> Writer:
    pool = Texts(["one", "two", "three"], ["a", "b", "c"], [""] * 3)
    documents = Texts(["x", "y"], ["a", "b"], [""] * 2)

    def write(folder: Path, number: int) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("LM_EVAL_ICL_CACHE", str(folder))
            for seed in range(1 + number):
                way = Retriever(Similar(by="features"), pool, str(seed) * 64, [0, 1, 0])
                vectors = (np.eye(3), np.ones((2, 3)))
                ranks = way.rank(documents, 2, "", ({}, lambda rows: vectors))  # noqa: B023
        return ranks[0]

    return Writer(write, None)


def digests(runs: list[Any]) -> Writer:
    """Of weights, which are read once."""

    def write(folder: Path, number: int) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("LM_EVAL_ICL_CACHE", str(folder))
            for name in ("config.json", "tokenizer.json")[: 1 + number]:
                digests = identity._tensor_digests(PACKAGE / "demo_model" / name)
        return digests

    return Writer(write, None)


def responses(runs: list[Any]) -> Writer:
    def write(folder: Path, number: int) -> None:
        stored = Responses(str(folder / "cache.jsonl"), {"model": "m"})
        try:
            for i in range(3 + 3 * number):
                stored[str(i)] = (-1.5, False)
        finally:
            try:
                stored._file.close()
            except OSError:  # what the disk did not take is lost with the process
                stored._file.buffer.raw.close()

    return Writer(write, "cache.jsonl")


def training_record(runs: list[Any]) -> Writer:
    def write(folder: Path, number: int) -> None:
        if number:
            finetune.claim(folder / "run", {"steps": 5}, resume=True)

    return Writer(write, "--output")


CELL = {"configs": {}, "config": {"model_args": {"pretrained": "M"}}}


def cells(runs: list[Any]) -> Writer:
    """A cell that is made again, and one more."""
    model = Model({"pretrained": "M"}, None, None)

    def write(folder: Path, number: int) -> None:
        study = StudyFolder(folder)
        with study.locked():
            for seed in range(1 + number):
                cell = Cell(model, Variant("icl", {}, 0), "t", 4, None, seed, 0)
                hashes = dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), "0")
                sample = {"arguments": [], "resps": [], "filtered_resps": [], "target": ""}
                samples = {"t": [{**hashes, **sample, "acc": number} for _ in range(30)]}
                result = {"results": {"t": {"acc": number}}, "samples": samples, **CELL}
                study.write(cell, result)

    def begin(folder: Path) -> None:
        with StudyFolder(folder).locked():
            pass

    return Writer(write, "--output", begin)


def test_samples_that_lm_eval_could_not_write_are_missed(tmp_path, monkeypatch):
    """lm-eval only warns, and a cell without its samples would look whole."""
    with monkeypatch.context() as patched:
        patched.setattr(tracker.EvaluationTracker, "save_results_samples", lambda *_, **__: None)
        with pytest.raises(CannotWrite, match="cannot be written: is the disk full"):
            cells([]).write(tmp_path, 1)
    cells([]).write(tmp_path, 1)
    assert len(list(tmp_path.glob("cells/**/samples_*"))) == 2


WRITERS = {
    writer.__name__: writer
    for writer in (
        board_files,
        collected,
        file_of_choices,
        choices,
        rankings,
        digests,
        responses,
        training_record,
        cells,
    )
}


@pytest.fixture(params=tiny.slow_but(WRITERS.keys() - {"board_files", "cells"}, WRITERS))
def writer(request, runs, monkeypatch):
    monkeypatch.setattr(version, "version", lambda: "1")  # which asks git
    return WRITERS[request.param](runs)


def comparable(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without the seconds of a cell, and the lines of a response cache that are not whole."""
    return {name: b"\n".join(filter(counts, of.splitlines())) for name, of in files.items()}


def counts(line: bytes) -> bool:
    is_unfinished = line.startswith(b'["') and not line.endswith(b"]")
    return bool(line) and not is_unfinished and b"_time" not in line


def test_a_disk_fails_at_every_operation(writer, tmp_path):
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    writer.write(undisturbed, 0)
    before = comparable(files_of(undisturbed))
    disk = Disk(undisturbed)
    with disk.used():
        expected = writer.write(undisturbed, 1)
    after = comparable(files_of(undisturbed))
    assert before != after and disk.counts
    for number, fault in enumerate(faults(disk.counts)):
        folder = tmp_path / f"{number}" / "disk"
        folder.mkdir(parents=True)
        writer.write(folder, 0)
        try:
            with Disk(folder, **fault).used():
                made = writer.write(folder, 1)
        except InputError as error:
            line = str(error)
            assert "\n" not in line, fault
            assert writer.names_in_error and writer.names_in_error in line, (fault, line)
        else:
            assert made == expected, fault
        writer.begin(folder)
        assert_nothing_is_lost(folder, before, after, fault)
        assert writer.write(folder, 1) == expected
        continued = comparable(files_of(folder))
        wiped = {name: of for name, of in after.items() if name in continued}
        assert continued == (wiped if fault["error"] == VANISHES else after), fault


def assert_nothing_is_lost(
    folder: Path, before: dict[str, bytes], after: dict[str, bytes], fault: dict[str, Any]
) -> None:
    """Every file is as it was or as it should be, and none of the earlier ones is missing."""
    files = comparable(files_of(folder))
    for name, content in files.items():
        grows = name.endswith("cache.jsonl") and after[name].startswith(content)
        assert grows or content in (before.get(name), after[name]), (name, fault)
    if fault["error"] != VANISHES:
        assert before.keys() <= files.keys(), fault


@pytest.mark.parametrize("size", [0, 0.5])
def test_after_a_power_failure_a_file_is_read_as_missing(writer, size, tmp_path):
    """Any file that was being written has no bytes, or half of them."""
    writer.write(tmp_path, 0)
    disk = Disk(tmp_path)
    with disk.used():
        expected = writer.write(tmp_path, 1)
    after = comparable(files_of(tmp_path))
    for path in sorted(disk.names):
        place = path if path.exists() else path.with_name(f"{HALF}0")
        if not place.parent.exists() or place.is_dir():
            continue
        content = place.read_bytes() if place.exists() else b"half"
        place.write_bytes(content[: int(size * len(content))])
        assert writer.write(tmp_path, 1) == expected
        assert comparable(files_of(tmp_path)) == after, place


def test_a_library_writes_on_a_full_disk(runs, tmp_path):
    """pyarrow and matplotlib. The old files stay, and the same call writes the new ones."""
    old, new = runs
    for write in (
        lambda board_runs: collect(board_runs, tmp_path / "c"),
        lambda board_runs: figures.draw(build(board_runs, []), tmp_path / "f", ["forest"]),
    ):
        write(old)
        before = files_of(tmp_path)
        with full(100), pytest.raises(InputError, match="cannot be written"):
            write(new)
        assert files_of(tmp_path) == before
        write(new)
        assert files_of(tmp_path) != before


@pytest.mark.slow
def test_a_checkpoint_on_a_full_disk_and_after_a_power_failure(checkpoint, tmp_path):
    """Trainer writes with safetensors and torch, each with an error of its own."""
    run = partial(test_training.tiny_run, checkpoint)
    run(tmp_path / "whole")
    weights = (tmp_path / "whole/model.safetensors").stat().st_size
    for limit in (weights // 2, weights + 1000):  # less than weights have, and than the optimizer
        output = tmp_path / f"{limit}"
        with full(limit), pytest.raises(InputError, match=r"cannot be written.* --resume when"):
            run(output)
        run(output, resume=True)
        assert test_training.weights(output) == test_training.weights(tmp_path / "whole")
    checkpoints = tmp_path / "whole/checkpoints"
    older, last = sorted(checkpoints.iterdir())
    for file in sorted(last.iterdir()):
        content = file.read_bytes()
        for size in (0, len(content) // 2):
            file.write_bytes(content[:size])
            assert last_checkpoint(checkpoints) == older, file
        file.write_bytes(content)
    assert last_checkpoint(checkpoints) == last


def test_a_clock_that_jumps_back_changes_only_dates(tmp_path, monkeypatch):
    """Each look at the clock says a year less than the last one."""
    first = write_cells(tmp_path / "forward")
    years = itertools.count()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - next(years) * 365 * 86400)

    class Backward(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(time.time(), tz)

    monkeypatch.setattr(tracker, "datetime", Backward)
    assert write_cells(tmp_path / "back") == first
    boards.write(tmp_path / "runs", "icl", 0, n=8, put={"date": now})
    boards.write(tmp_path / "runs", "icl", 1, n=8, put={"date": now - 365 * 86400})
    (entry,) = build(reading.read([tmp_path / "runs"], quiet=True)[0], []).entries
    assert len(entry.runs) == 2


def write_cells(folder: Path) -> dict[str, bytes]:
    writer = cells([])
    for number in (0, 1):
        writer.write(folder, number)
    return comparable(files_of(folder))


@pytest.mark.parametrize("share", [0, 0.5])
def test_half_of_a_results_file_of_lm_eval_is_left_out(tmp_path, share):
    """With the reason. lm-eval itself only warns if it cannot write one."""
    whole = boards.write(tmp_path / "whole", "icl", 0, n=8)
    half = boards.write(tmp_path / "half", "star", 0, n=8)
    content = half.read_bytes()
    half.write_bytes(content[: int(share * len(content))])
    runs, left_out = reading.read([tmp_path], quiet=True)
    assert [run.path for run in runs] == [whole]
    assert [file.path for file in left_out] == [half] and left_out[0].why


# Where files are written: a file of the package -> what it calls.
WRITING = {"write_text", "write_bytes", "save_pretrained", "savefig", "write_table", "save_model"}
PLACES = {
    "drawing/picture.py": {"savefig"},
    "files/__init__.py": {"write_text"},
    "leaderboard/figures.py": {"savefig"},
    "results/collect.py": {"write_table"},
    "smoke/tiny.py": {"save_pretrained"},  # into a temporary folder
    "training/losses.py": {"savefig"},
    "training/finetune.py": {"save_pretrained", "save_model"},  # under `saving`
}


def test_every_writer_goes_through_the_one_place():
    """Or is named here. Two files open others for writing: `files`, and the response cache."""
    places: dict[str, set[str]] = {}
    opened = set()
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in WRITING:
                places.setdefault(name, set()).add(node.func.attr)
            first = node.args[0] if node.args else ast.Constant("r")
            reads = isinstance(first, ast.Constant) and first.value in ("r", "rb")
            if node.func.attr == "open" and not reads:
                opened.add(name)
    assert places == PLACES
    assert opened == {"files/__init__.py", "harness/response_cache.py"}
