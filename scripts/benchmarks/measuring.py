"""Clocks, memory and other common parts of the benchmark's commands."""

from __future__ import annotations

import ctypes
import gc
import math
import platform
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.table import Table
from torch import nn

from lm_eval_icl.harness.models import ICLModel


class Measurement(NamedTuple):
    seconds: float
    outside: float  # seconds that the model did not run; NaN on a GPU
    tokens: int  # through the model, padding included
    peak: int  # bytes above what was there before


def run(lm: Any, instances: list[Instance]) -> list[Any]:
    """All requests, from what lm-eval has built to responses; nothing is kept of an earlier run."""
    if isinstance(lm, ICLModel):
        everything: Any = SimpleNamespace(instances=instances)
        lm.begin([everything])  # as one task: a run that knows what is to come
    by_kind: dict[str, list[Instance]] = defaultdict(list)
    for instance in instances:
        by_kind[instance.request_type].append(instance)
    return [getattr(lm, kind)(of_kind, disable_tqdm=True) for kind, of_kind in by_kind.items()]


@contextmanager
def watched(
    model: nn.Module, begin: Callable[[torch.Tensor], None], end: Callable[[], None]
) -> Iterator[None]:
    """Inside this context, `begin` is called with the token ids before each pass of the model, and `end` after it."""

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        begin(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

    before = model.register_forward_pre_hook(enter, with_kwargs=True)
    after = model.register_forward_hook(lambda *_: end())
    yield
    before.remove()
    after.remove()


def measure(lm: Any, instances: list[Instance]) -> Measurement:
    tokens = 0
    inside = 0.0

    # On a GPU a pass is only begun between these two: waiting for it there would take away what runs meanwhile.
    def begin(ids: torch.Tensor) -> None:
        nonlocal tokens, inside
        tokens += ids.numel()
        inside -= math.nan if torch.cuda.is_available() else time.perf_counter()

    def end() -> None:
        nonlocal inside
        inside += time.perf_counter()

    with watched(lm.model, begin, end):
        before = reset_peak()
        start = now()
        run(lm, instances)
        seconds = now() - start
    return Measurement(seconds, seconds - inside, tokens, peak() - before)


def time_encoding(lm: Any, instances: list[Instance]) -> float:
    """Seconds to encode the demonstrations that all requests share; 0 where they are encoded with each query."""
    lm.begin([])
    start = now()
    with lm.runner.inference_mode():
        if not lm.method.memory_depends_on_query:
            lm.runner.store.several([lm.run.requests(instances[:1])[0].prompt.context])
    return now() - start


def now() -> float:
    """Seconds, everything before being done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def busy() -> float:
    """Seconds that the processor has worked for this process; on a GPU, `now`."""
    return now() if torch.cuda.is_available() else time.process_time()


def reset_peak() -> int:
    """Forget the largest memory so far; returns the present one, in bytes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _status(field: str) -> int:
    found = re.search(
        rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    assert found
    return int(found[1]) * 1024


def table_of(title: str, *columns: str) -> Table:
    """A table of numbers, but for the column of the model."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    return table


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same one as the same bytes."""
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def spread(values: Sequence[float] | np.ndarray) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    named = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = named[1] if named else platform.processor()
    return f"{cpu}, {torch.get_num_threads()} threads"
