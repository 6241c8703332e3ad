"""Processes that begin with everything imported, forked from one in which nothing has run.

A command takes twelve seconds of processor time before it does anything: four to import what an evaluation needs, eight
to read lm-eval's task files. Here it takes half a second, and the tests start some eighty. What comes of a command's
arguments is tested here: its output, its errors, its exit status. What comes of starting it (the imports, the start-up
hook, an interrupt meanwhile) is tested on programs that are started as users start them.
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

ROOT = Path(__file__).resolve().parents[1]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preloaded"])


def start(function: Callable[..., object], *args: Any) -> Any:
    """A function in a process that is forked from one with everything imported."""
    with contextlib.chdir(ROOT):  # where it finds what is to be imported
        forkserver.ensure_running()
    process = FORKED.Process(target=function, args=args)
    process.start()
    return process


class Process:
    """A function in a process of its own, and what that says."""

    def __init__(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self.said, to = FORKED.Pipe(duplex=False)
        self.process = start(_saying, to, function, args, kwargs)
        to.close()

    def kill(self) -> None:
        assert self.process.exitcode is None
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL

    def finish(self) -> tuple[int, list[str]]:
        """The exit code and the lines."""
        with open(self.said.fileno(), closefd=False) as pipe:
            lines = pipe.read().splitlines()
        self.process.join()
        return self.process.exitcode, lines


def _saying(to: Any, function: Callable[..., object], args: tuple, kwargs: dict) -> None:
    os.dup2(to.fileno(), 1)
    os.dup2(to.fileno(), 2)
    to.close()
    _ending(function, *args, **kwargs)


def _ending(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Run a function; end as Python ends, which processes of this kind do in a way of their own."""
    assert "tests.preloaded" in sys.modules  # or each of them would be as slow as one that is started
    try:
        function(*args, **kwargs)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def command(
    *arguments: object, program: str = "lm-eval-icl", cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` says of `lm-eval-icl ARGUMENTS` or `lm_eval ARGUMENTS`."""
    return completed(run_command, [program, *map(str, arguments)], cwd, env)


def refusal(*arguments: object, **kwargs: Any) -> str:
    """The line with which a command ends that refuses something: with exit status 1 and no traceback."""
    done = command(*arguments, **kwargs)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def python(
    code: str, *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` says of `python -c CODE ARGUMENTS`."""
    return completed(run_python, ["-c", code, *map(str, arguments)], cwd, env)


def ranks(function: Callable[[list[str]], object], *arguments: object) -> list[subprocess.CompletedProcess[str]]:
    """A function of arguments in two processes of one group, which find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "ACCELERATE_USE_CPU": "true"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    line = [str(argument) for argument in arguments]
    return _completed_all(function, line, None, [{**env, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"])


def completed(
    function: Callable[[list[str]], object], line: list[str], cwd: Path | None, env: dict[str, str] | None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` says of a function of a command's line."""
    (done,) = _completed_all(function, line, cwd, [env or {}])
    return done


def _completed_all(
    function: Callable[[list[str]], object], line: list[str], cwd: Path | None, environments: list[dict[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """The function in as many processes at once as there are environments."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, env in enumerate(environments):
            said = [Path(folder) / f"{name}{number}" for name in ("output", "error")]
            for path in said:
                path.touch()
            running.append((start(as_started, function, line, said, cwd or Path.cwd(), {**os.environ, **env}), said))
        done = []
        for process, said in running:
            process.join(900)
            if process.exitcode is None:  # in place of a hang
                process.kill()
                process.join()
            done.append(subprocess.CompletedProcess(line, process.exitcode, *(path.read_text() for path in said)))
        return done


def as_started(
    function: Callable[[list[str]], object], line: list[str], said: list[Path], cwd: Path, environment: dict[str, str]
) -> None:
    for path, number in zip(said, (1, 2), strict=True):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    _ending(function, line)


def run_command(line: list[str]) -> None:
    """Run `lm-eval-icl ARGUMENTS` or `lm_eval ARGUMENTS` in this process."""
    sys.argv = line
    if line[0] == "lm_eval":
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    else:
        from lm_eval_icl.cli import main

        main()


def run_python(line: list[str]) -> None:
    _, code, *arguments = line
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
