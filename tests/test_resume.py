"""A run with `--use_cache` that is stopped at any moment ends, started again, as if nothing had happened."""

import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from sqlitedict import SqliteDict

from lm_eval_icl import cache, demo
from lm_eval_icl.cache import Responses, ResumableLM
from lm_eval_icl.errors import InputError
from lm_eval_icl.fingerprint import fingerprint
from lm_eval_icl.models import ICL
from lm_eval_icl.prompts import FewShotPrompt
from tests import harness, tiny

# Processes that begin with everything imported, forked from one in which nothing has run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.test_resume"])

KILLS = 20
NAMES = ["resume_choice", "resume_text", "resume_rolling"]


def load(**_):
    return DatasetDict(
        {"train": Dataset.from_list(harness.documents(12, 50)), "test": Dataset.from_list(harness.documents(40, 0))}
    )


for name, config in zip(
    NAMES,
    [
        {**harness.CHOICE, "doc_to_choice": ["very negative indeed", "very negative", "positive"]},
        {
            "output_type": "generate_until",
            "doc_to_target": "{{other}}",
            "generation_kwargs": {"until": ["\n\n", "film"], "max_gen_toks": 12, "do_sample": False},
        },
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    ],
    strict=True,
):
    harness.TASKS[name] = harness.task(name, **config, custom_dataset=load)


def run(path, where, out=None, model="deepthink", seconds=0.0, full=None, **kwargs):
    """Evaluate in small passes, each stored; write what came out, and how much of it was computed."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cache.SECONDS = seconds
    computed = []
    add = cache._Hook.add_partial
    cache._Hook.add_partial = lambda self, *args: (computed.append(args), add(self, *args))
    if full is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    results = harness.run(
        model, path, NAMES, 2, args={"pack_tokens": 64}, batch_size=2, use_cache=where and str(where), **kwargs
    )
    if out is not None:
        found = {key: results[key] for key in ("results", "samples")}
        out.write_text(json.dumps([found, len(computed)], default=str))
    return results


def start(*args, stderr=None, **kwargs):
    process = PROCESSES.Process(target=_quietly, args=(stderr, run, args, kwargs))
    process.start()
    return process


def _quietly(stderr, function, args, kwargs):
    """What the process says goes to a file, as it would to a terminal's."""
    to = os.open(stderr or os.devnull, os.O_WRONLY | os.O_CREAT)
    os.dup2(to, 1)
    os.dup2(to, 2)
    function(*args, **kwargs)


def finish(process, timeout=120):
    process.join(timeout)
    return process.exitcode


def stored(where):
    """How many responses are in a cache (and the line that says whose they are)."""
    if not Path(where).exists():
        return 0
    try:
        with closing(sqlite3.connect(f"file:{where}?mode=ro", uri=True, timeout=60)) as database:
            return max(0, database.execute("SELECT count(*) FROM lm_eval_icl").fetchone()[0] - 1)
    except sqlite3.OperationalError:  # a table that is not there yet; a journal that only a writer may roll back
        return 0


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume") / "gpt2"
    tiny.save("gpt2", path)
    return path


@pytest.fixture(scope="module")
def undisturbed(gpt2):
    """What a run without a cache finds, and the number of its responses."""
    out = gpt2.parent / "undisturbed.json"
    assert finish(start(gpt2, None, out)) == 0
    found, _ = json.loads(out.read_text())
    return found, sum(len(sample["resps"]) for of in found["samples"].values() for sample in of)


def test_twenty_kills(gpt2, undisturbed, tmp_path):
    expected, total = undisturbed
    where, rng = tmp_path / "c_rank0.db", random.Random(0)
    counts, out = [0], tmp_path / "out.json"
    for kill in range(KILLS):
        process = start(gpt2, tmp_path / "c", out)
        goal = counts[-1] + rng.randrange(max(1, 2 * (total - 50 - counts[-1]) // (KILLS - kill)))
        if goal > counts[-1]:  # while it computes or writes
            while stored(where) < goal:
                assert process.exitcode is None
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.004))
        else:  # or while it loads
            late = time.monotonic() + rng.uniform(0, 1)
            while time.monotonic() < late and stored(where) == counts[-1]:
                time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        counts.append(intact(where, tmp_path / "copy"))
        assert counts[-1] >= max(goal, *counts)
    assert len(set(counts)) > KILLS / 2
    assert counts[-1] < total

    assert finish(start(gpt2, tmp_path / "c", out)) == 0
    found, computed = json.loads(out.read_text())
    assert found == expected
    assert computed == total - counts[-1]
    assert stored(where) == total


def intact(where, copy):
    """How many responses a cache holds, all of it being readable; read in a copy, as a kill left it."""
    copy.mkdir()
    for file in where.parent.glob(f"{where.name}*"):  # with its journal
        shutil.copy(file, copy)
    try:
        with cache._database(str(copy / where.name), "", "") as database:
            return len(cache._read(database)) - 1 if database.execute("SELECT * FROM sqlite_master").fetchone() else 0
    except InputError:
        assert not where.exists()
        return 0
    finally:
        shutil.rmtree(copy)


def command(*args, **kwargs):
    line = [str(Path(sys.executable).parent / "lm_eval"), "--model", "icl", "--tasks", "icl_demo_topic"]
    line += ["--model_args", f"pretrained={demo.model_path()},pack_tokens=64", "--device", "cpu", *args]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)
