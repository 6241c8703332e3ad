"""Tiny random models and the tokenizers for them, made on the spot."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import shutil
import signal

# Before anything imports huggingface_hub: tests never ask the Hub, but for
# tests/harness/test_recorded.py.
os.environ["HF_HUB_OFFLINE"] = "0" if os.environ.get("LM_EVAL_RECORDED") else "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ |= {
    # Models this small lose more to threads waiting for each other than they gain; and a command
    # that a test starts rounds as the test does.
    "OMP_NUM_THREADS": "1",
    # lm-eval forks processes to resample scores, which may hang where other threads run.
    "DISABLE_MULTIPROC": "1",
    # Ray's workers would wait for all other tests; and the first cluster that a process starts
    # makes a token and asks for it from then on, of which processes that were made before would not
    # know.
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a token of the tests",
}

from pathlib import Path

import pytest
from hypothesis import settings

from tests import once, plain

# Every run of the tests draws other examples. An hour takes
# pytest --hypothesis-profile=long tests/harness/test_fuzz.py
settings.register_profile("short", max_examples=50)
settings.register_profile("long", max_examples=8_000, print_blob=True)
settings.load_profile("short")

SHARED = Path(__file__).resolve().parents[2] / "shared"

# A shell has background processes ignore Ctrl-C, and so would the commands that the tests start and
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session):
    """The process of pytest-xdist that hands tests out runs none, and need not wait for PyTorch."""
    # What is imported stays, so that looking for garbage there is in vain; it takes a third of a
    # second each time, and accelerate asks for it after every training.
    gc.disable()
    option = session.config.option
    if getattr(option, "dist", "no") == "no" or hasattr(session.config, "workerinput"):
        import torch

        torch.set_num_threads(1)
        once.install()
        if plain.ON:
            plain.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if plain.ON:
        plain.skip(items)
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")


@pytest.fixture(scope="session")
def shared():
    """The folder of real datasets and checkpoints beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no real data beside the checkout ({SHARED})")
    return SHARED


@pytest.fixture(scope="session")
def hub(shared, tmp_path_factory):
    """The real datasets, laid out under their Hub names."""
    import runpy

    out = tmp_path_factory.mktemp("hub")
    runpy.run_path(str(shared / "tools/local_hub.py"))["main"](out)
    return out


@pytest.fixture(scope="module")
def own_tasks():
    """The index of tasks has this package's alone. That of all of lm-eval's takes six seconds, for
    each metadata."""
    from lm_eval.tasks import TaskManager

    from lm_eval_icl.harness.plugin import task_dir

    @functools.cache
    def manager(include_path, metadata):
        paths = [str(task_dir())]
        if include_path:
            paths.append(include_path)
        metadata = json.loads(metadata)
        return TaskManager(include_defaults=False, include_path=paths, metadata=metadata)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lm_eval_icl.harness.training._manager", manager)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function: architecture -> folder of a tiny random checkpoint with its tokenizer."""
    from tests import tiny

    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def saved(name):
        tiny.save(name, root / name)
        return root / name

    return saved


@pytest.fixture(scope="session")
def tried():
    """What models can do, by class, configuration and weights."""
    return {}


@pytest.fixture(scope="module")
def tried_once(tried):
    """What a model can do is found out once for all models that are the same: in class,
    configuration and weights."""
    import torch

    from lm_eval_icl.methods import runner

    probe = runner.probe

    def kept(model):
        if any(weight.is_meta for weight in model.parameters()):
            return probe(model)
        config = model.config
        weights = [float(weight.double().norm()) for weight in model.parameters()]
        autocast = torch.is_autocast_enabled("cpu")
        place = (str(config), config._attn_implementation, autocast, type(model), *weights)
        if place not in tried:
            tried[place] = probe(model)
        return tried[place]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "probe", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What a run's model chooses is not kept in the user's cache. (Commands that tests start
    inherit this.)"""
    os.environ["LM_EVAL_ICL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _quiet():
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    # Commands that ran here before may have set another level.
    for name in ("lm_eval", "lm_eval.icl"):
        logging.getLogger(name).setLevel(logging.NOTSET)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content.strip() }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def chat_checkpoint(checkpoint, tmp_path_factory):
    """As `checkpoint`, with a chat template that strips its messages, as most do."""
    root = tmp_path_factory.mktemp("chat")

    @functools.cache
    def saved(name):
        folder = shutil.copytree(checkpoint(name), root / name)
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return folder

    return saved
