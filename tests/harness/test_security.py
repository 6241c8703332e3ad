"""Nothing of ours asks the network, and no code of a checkpoint runs unless asked for
(`test_bad_input.py`)."""

import os
import subprocess
import sys

import pytest

# Refuses and counts what Python tells of the network, from before anything else is imported.
GUARD = """
import sys
tried = []
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        tried.append((event, arguments[1:] if event == "socket.connect" else arguments))
        raise OSError("no network here")
sys.addaudithook(refuse)
"""
EVALUATE = """
import lm_eval, logging
from lm_eval.tasks import TaskManager
from lm_eval_icl.smoke import demo
from lm_eval_icl.harness.plugin import task_dir
demo_tasks = TaskManager(include_defaults=False, include_path=str(task_dir() / "demo"))
lm_eval.simple_evaluate(model="icl", model_args={"pretrained": str(demo.model_path())},
                        tasks=["icl_demo_short"], task_manager=demo_tasks,
                        limit=1, device="cpu", bootstrap_iters=0)
"""
COMMAND = "import sys; sys.argv = ['lm-eval-icl', *{!r}]; from lm_eval_icl.cli import main; main()"


def tried(code, cwd):
    """What a Python process tried of the network."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    line = [sys.executable, "-c", f"{GUARD}\n{code}\nprint('tried', tried)"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_no_network(tmp_path):
    """An evaluation and our own commands, in one process. (The guard sees who does ask.)"""
    code = [EVALUATE, COMMAND.format(["show", "invicl"]), COMMAND.format(["smoke", "--limit", "1"])]
    assert tried("\n".join(code), tmp_path) == "tried []"
    code = "import urllib.request\ntry: urllib.request.urlopen('http://127.0.0.1:9')\n"
    code += "except OSError: pass"
    assert "socket.getaddrinfo" in tried(code, tmp_path)
