"""The smoke test on every model type of transformers, each with what is special about it (`model_types`).

    python -m tests.smoke.sweep [--record FILE]

writes the table of docs/reports/model-types.md, in some minutes. Types whose results are in FILE are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.smoke.smoke import refusals, smoke
from lm_eval_icl.smoke.tiny import NoTinyModel, types
from tests.smoke.model_types import NONE, TYPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports" / "model-types.md"
HEADING = "## All types\n"


@dataclass(frozen=True)
class Result:
    """The outcome of the smoke test of a model type.

    Attributes:
        arch: the model type.
        status: "exact": `icl` gives what lm-eval's `hf` gives, and the other methods pass their checks or refuse the
            model; "refused": `icl` refuses the model; "none": there is no tiny model to test; "WRONG": a number or a
            text is wrong, or a method failed, or the test did not end.
        why: the line that says why, unless all is exact.
        ran: the methods that ran.
        refused: method -> the line with which it refuses the model; "METHOD (texts)" -> the line with which it refuses
            to generate with it.
        seconds: how long it took.
    """

    arch: str
    status: str
    why: str = ""
    ran: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def result_of(arch: str, limit: int = 3) -> Result:
    """The result of `smoke` on a model type, run here."""
    if arch in NONE:
        return Result(arch, "none", NONE[arch])
    try:
        scores = smoke(arch, limit, TYPES)
    except NoTinyModel as error:
        return Result(arch, "none", error.why)
    except InputError as error:
        return Result(arch, "WRONG", error.message)
    ran = [name for name, by_task in scores.items() if not isinstance(by_task, str)]
    refused = refusals(scores)
    return Result(arch, "exact" if "icl" in ran else "refused", refused.get("icl", ""), ran, refused)


def sweep(
    archs: Sequence[str], limit: int = 3, time_limit: float = 120, record: Path | None = None
) -> Iterator[Result]:
    """Run `smoke` on several model types, in a process of its own, so that neither a crash nor a hang ends the sweep.

    Args:
        archs: the model types.
        limit: how many documents of each task are run.
        time_limit: how many seconds a type may take.
        record: a file to which each result is appended, as a line of JSON. Types that are in it already are not run
            again, so a sweep that was stopped goes on.

    Yields:
        The result of each type, in order.

    Raises:
        InputError: the file is not such a record, or cannot be written.
    """
    done = {}
    if record is not None and record.exists():
        with refusing(f"{record}: not a record of results", "Remove it, or name another file."):
            lines = record.read_text(encoding="utf-8").splitlines()
            done = {result.arch: result for result in (Result(**json.loads(line)) for line in lines)}
    if record is not None:
        with refusing(f"{record}: results cannot be kept there", "Name another file."):
            record.open("a").close()  # before the first test
    worker = None
    try:
        for arch in archs:
            if arch in done:
                yield done[arch]
                continue
            worker = worker or _Worker(limit)
            began = time.monotonic()
            result = worker.test(arch, time_limit)
            if result is None:
                result, worker = Result(arch, "WRONG", worker.stop(time_limit)), None
            result = dataclasses.replace(result, seconds=round(time.monotonic() - began, 1))
            if record is not None:
                with record.open("a", encoding="utf-8") as file:
                    print(json.dumps(dataclasses.asdict(result)), file=file)
            yield result
    finally:
        if worker is not None:
            worker.stop(0)


class _Worker:
    """A process that tests one type after another, since loading lm-eval and torch takes longer than a test."""

    def __init__(self, limit: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, limit), daemon=True)
        self._process.start()
        theirs.close()

    def test(self, arch: str, time_limit: float) -> Result | None:
        """The result of a type; None if the process died or takes longer than the time limit."""
        try:
            self._connection.send(arch)
            return self._connection.recv() if self._connection.poll(time_limit) else None
        except (EOFError, OSError):
            return None

    def stop(self, time_limit: float) -> str:
        """End the process. Returns why it gave no result."""
        self._connection.close()  # it ends by itself if it is waiting
        self._process.join(5)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        return f"not done after {time_limit:g} seconds" if code is None else f"the process died (exit code {code})"


def _serve(connection: Connection, limit: int) -> None:
    """Test the types that arrive, until the other side is gone."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what libraries print
        os.dup2(nowhere, stream)
    import torch
    import transformers

    torch.set_num_threads(1)  # with models this small, threads only wait for each other
    transformers.logging.set_verbosity_error()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(result_of(connection.recv(), limit))


def row(result: Result) -> str:
    """A type's row of the table."""
    if result.status == "exact":
        refused = [f"`{name}`".replace(" (texts)`", "` (texts)") for name in result.refused]
        only = ", ".join(f"`{name}`" for name in result.ran)
        said = "all" if not refused else f"all but {', '.join(refused)}" if len(refused) < len(result.ran) else only
        return f"| `{result.arch}` | exact | {said} |"
    said, why = {"refused": "refused", "none": "no tiny model"}.get(result.status, result.status), result.why
    if result.status == "refused":  # only what is wrong, without the folder, numbers, and advice
        why = re.sub(r"^pretrained='.*?': | \([^()]*\)", "", why)
        why = re.findall(r"^(?:.*? cannot be used: )?[^:.;]*", why)[0]
    return f"| `{result.arch}` | {said} | {why} |"


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    results = []
    for result in sweep(types(), record=parser.parse_args().record):
        print(row(result), flush=True)
        results.append(result)
    counts = Counter(result.status for result in results)
    summary = f"Of the {len(results)} types of transformers {transformers.__version__}, {counts['exact']} are exact, "
    summary += f"{counts['refused']} are refused, {counts['none']} have no tiny model and {counts['WRONG']} are wrong."
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    table = ["| type | `icl` | methods that run, or why not |", "| --- | --- | --- |", *map(row, results)]
    PAGE.write_text(f"{before}{HEADING}\n{summary}\n\n" + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
