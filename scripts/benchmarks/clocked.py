"""`lm_eval ARGUMENTS` with clocks around its parts: python -m benchmarks.clocked FILE START ARGUMENTS

FILE becomes one line of JSON: of each part the seconds of wall time, and those that the processor worked, its finished
child processes included. START is the `time.monotonic()` at which this process was started.
"""

from __future__ import annotations

import functools
import importlib._bootstrap
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMPORTING, REST = "importing", "the rest"
PARTS = (
    IMPORTING,
    "lm-eval's index of all tasks",
    "making the model",
    "loading tasks and datasets",
    "building the requests",
    "responses",
    REST,
)
_, INDEX, MODEL, LOADING, BUILDING, RESPONSES, _ = PARTS


class Clocks:
    """Wall time and processor time by part. Every second is counted once: in the innermost part that runs."""

    def __init__(self, start: float) -> None:
        self.seconds = {part: [0.0, 0.0] for part in PARTS}
        self.running = [IMPORTING]
        self.last = (start, 0.0)

    def charge(self) -> None:
        """Count the time since the last call in the part that runs."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        now = time.monotonic(), time.process_time() + children.ru_utime + children.ru_stime
        for kind, (before, after) in enumerate(zip(self.last, now, strict=True)):
            self.seconds[self.running[-1]][kind] += after - before
        self.last = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.charge()
        self.running.append(name)
        try:
            yield
        finally:
            self.charge()
            self.running.pop()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return clocked

    def around_imports(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """A clock around what Python calls to import a module, where that is new and the main thread's."""

        def clocked(name: str, *args: Any) -> Any:
            known = name in sys.modules or self.running[-1] == IMPORTING
            if known or threading.current_thread() is not threading.main_thread():
                return load(name, *args)
            with self.part(IMPORTING):
                return load(name, *args)

        return clocked


def put_in(clocks: Clocks) -> None:
    """Put the clocks around lm-eval's functions, for the rest of this process."""
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task
    from lm_eval.tasks.manager import TaskManager

    make = clocks.around(MODEL, LM.create_from_arg_obj.__func__)  # type: ignore[attr-defined]

    def made(*args: Any, **kwargs: Any) -> LM:
        lm: LM = make(*args, **kwargs)
        for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(lm, kind, clocks.around(RESPONSES, getattr(lm, kind)))
        return lm

    LM.create_from_arg_obj = classmethod(made)  # type: ignore[method-assign, assignment]
    for owner, name, part in (
        (TaskManager, "__init__", INDEX),
        (TaskManager, "load", LOADING),
        (Task, "build_all_requests", BUILDING),
    ):
        setattr(owner, name, clocks.around(part, getattr(owner, name)))
    # Every import of a module that is not there yet goes through it, whether by statement or by `import_module`.
    bootstrap: Any = importlib._bootstrap
    bootstrap._find_and_load = clocks.around_imports(bootstrap._find_and_load)


def main() -> None:
    _, file, start, *arguments = sys.argv
    clocks = Clocks(float(start))
    from lm_eval.__main__ import cli_evaluate

    put_in(clocks)
    sys.argv = ["lm_eval", *arguments]
    with clocks.part(REST):
        cli_evaluate()
    Path(file).write_text(json.dumps(clocks.seconds) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
