"""Commands in processes that are forked from one with everything imported and lm-eval's task files
read.

Measured on two idle cores: a command that is started takes 12 seconds of processor time before it
does anything, four to import what an evaluation needs and eight to read the task files. Forked, it
takes half a second. What comes of a command's arguments (output, errors, exit status) is tested
here; what comes of starting it (imports, the start-up hook, an interrupt meanwhile) on programs
that are started as users start them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from lm_eval_icl import errors

ROOT = Path(__file__).resolve().parents[1]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preloaded"])
Environment = dict[str, str]


class Process:
    """A function of these arguments in a process of its own; its output and errors go into
    files."""

    def __init__(
        self,
        function: Callable[..., object],
        *args: Any,
        cwd: Path | None = None,
        env: Environment | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name) / name for name in ("output", "errors")]
        for path in self._said:
            path.touch()
        with contextlib.chdir(ROOT):  # where the server finds what it imports
            forkserver.ensure_running()
        place = (cwd or Path.cwd(), {**os.environ, **(env or {})})
        self.process = FORKED.Process(target=_run, args=(function, args, self._said, *place))
        self.process.start()

    def kill(self) -> None:
        assert self.process.exitcode is None
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL

    def completed(self) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` would say of it."""
        self.process.join(900)
        if self.process.exitcode is None:  # in place of a hang
            self.kill()
        return subprocess.CompletedProcess(
            [], self.process.exitcode, *(path.read_text() for path in self._said)
        )

    def finish(self) -> tuple[int, list[str]]:
        """The exit code and all lines."""
        done = self.completed()
        return done.returncode, (done.stdout + done.stderr).splitlines()


def _run(
    function: Callable[..., object],
    args: tuple,
    said: list[Path],
    cwd: Path,
    environment: Environment,
) -> None:
    assert "tests.preloaded" in sys.modules  # else it would be as slow as a command that is started
    for path, number in zip(said, (1, 2), strict=True):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    try:  # end as Python ends, which processes of `multiprocessing` do in a way of their own
        function(*args)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def command(
    *arguments: object, program: str = "lm-eval-icl", **place: Any
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` would say of `lm-eval-icl ARGUMENTS` or `lm_eval ARGUMENTS`."""
    return Process(run_command, [program, *map(str, arguments)], **place).completed()


def refusal(*arguments: object, **kwargs: Any) -> str:
    """The line with which a command ends that refuses something: with exit status 1 and no
    traceback."""
    done = command(*arguments, **kwargs)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def python(code: str, **place: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` would say of `python -c CODE`."""
    return Process(exec, code, {"__name__": "__main__"}, **place).completed()


def ranks(
    function: Callable[[list[str]], object], *arguments: object
) -> list[subprocess.CompletedProcess[str]]:
    """A function of arguments in two processes of one group, which find each other as those of
    torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "ACCELERATE_USE_CPU": "true",
        }
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    line = [str(argument) for argument in arguments]
    both = [Process(function, line, env={**env, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    return [process.completed() for process in both]


def run_command(line: list[str]) -> None:
    """Run `lm-eval-icl ARGUMENTS` or `lm_eval ARGUMENTS` in this process."""
    sys.argv = line
    if line[0] == "lm_eval":
        from lm_eval.__main__ import cli_evaluate

        # Python has started with another program: what the start-up hook does in this one.
        errors.show_as_lines()
        cli_evaluate()
    else:
        from lm_eval_icl.cli import main

        main()
