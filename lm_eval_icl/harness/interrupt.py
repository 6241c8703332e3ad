"""Ctrl-C in a command: one line that says what was kept and how to go on.

This module imports nothing of weight, since lm-eval may be interrupted while it is still importing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lm_eval_icl.methods import is_ours


class Unasked(str):
    """The device that lm-eval's command takes if none is asked for: the first GPU, or else the CPU."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which a scheduler warns a process before it kills it."""


def run_until_interrupted(original: Callable[..., None], args: argparse.Namespace) -> None:
    """Wrapper of `Run._execute`, which is the command `lm_eval run`: a Ctrl-C during a run of one of this package's
    models ends it in one line; and a device that was not asked for is marked (`CheckedHFLM` refuses others)."""
    try:
        with suppress(Exception):  # a file of --config that cannot be read, as lm-eval says in a moment
            if is_ours(_given(args, "model") or "") and not _given(args, "device"):
                args.device = Unasked("cuda:0")
        original(args)
    except KeyboardInterrupt as stopped:
        if not is_ours(_given(args, "model") or ""):
            raise
        steps = {frame.f_code.co_name for frame, _ in traceback.walk_tb(stopped.__traceback__)}
        saving = not steps.isdisjoint({"save_results_aggregated", "save_results_samples"})
        end(stopped, lambda: _line(_given(args, "use_cache"), _given(args, "output_path") if saving else None))


def never_ignored(line: Callable[[], str], terminated: bool = False) -> None:
    """Let Ctrl-C be heard where Python or a library ignores its exception, or reports another one: end the process at
    once while a module is imported, and let the signal wait for the end of an object's `__del__`.

    Args:
        line: as of `end`.
        terminated: SIGTERM is heard too, as `Terminated`.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        stopped = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        for frame_above, _ in traceback.walk_stack(frame):
            if frame_above.f_code.co_filename.startswith("<frozen importlib"):
                end(stopped(), line)
            if frame_above.f_code.co_name == "__del__":
                # To the main thread, so that what it waits for is interrupted.
                again = threading.Timer(0.005, signal.pthread_kill, [threading.main_thread().ident, number])
                again.daemon = True
                again.start()
                return
        raise stopped

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `nohup` has it ignored
        signal.signal(signal.SIGINT, heard)
    if terminated and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, heard)


def end(stopped: KeyboardInterrupt, line: Callable[[], str]) -> NoReturn:
    """End the process that Ctrl-C or SIGTERM has interrupted, with one line instead of a traceback.

    The process ends by that signal, which is exit status 130 or 143 in a shell, so that a loop over many runs ends too.

    Args:
        line: what is said. It is called when everything that was interrupted has cleaned up.
    """
    number = signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT
    for ignored in {number, signal.SIGINT}:  # an impatient second Ctrl-C
        signal.signal(ignored, signal.SIG_IGN)
    # Progress bars that are closed leave their line.
    for bar in list(getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())):
        bar.close()
    traceback.clear_frames(stopped.__traceback__)
    if os.environ.get("RANK", "0") == "0":  # of several processes, which all get the signal, one says so
        # A new line begins, since a bar that was just being made or closed, or the terminal's ^C, has left one open.
        print(f"\nlm-eval-icl: {line()}", file=sys.__stderr__)
    with suppress(OSError):  # a reader that was interrupted too
        sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # where that does not end a process


def _given(args: argparse.Namespace, name: str) -> Any:
    """An argument of `lm_eval run`, from the command line or from the file of `--config`."""
    value = getattr(args, name, None)
    if value is None and getattr(args, "config", None):
        from lm_eval.config.evaluate_config import EvaluatorConfig

        value = EvaluatorConfig.load_yaml_config(args.config).get(name)
    return value


def _line(cache: str | None, incomplete: str | None) -> str:
    """The line that says what was kept, and how to go on.

    Args:
        cache: the argument `--use_cache`.
        incomplete: the folder into which results were being written.
    """
    how = "interrupted"
    if incomplete:
        how += f" while the results were saved: a file in {incomplete} may be incomplete"
    if cache is None:
        return (
            f"{how}, and no responses were kept. With --use_cache PATH a run keeps its responses as they come, and the "
            "same command goes on from them."
        )
    where, kept = f"{cache}_rank0.db", 0
    uri = f"{Path(where).resolve().as_uri()}?mode=ro"
    with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True)) as database:
        ((entries,),) = database.execute("SELECT count(*) FROM lm_eval_icl")
        kept = int(entries) - 1  # one entry says whose they are
    if kept == 0:
        return f"{how} before there was a response to keep in {where}: the same command begins again."
    others = ", and those of the other processes beside it" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return f"{how}: {kept} responses are kept in {where}{others}. The same command, with --use_cache {cache}, goes on."
