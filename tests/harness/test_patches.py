"""Every change made to lm-eval: that what it changes is still there, and that other models do not
notice."""

import functools
import importlib
import inspect
import subprocess
import sys

import lm_eval.evaluator
import pytest
from lm_eval._cli.run import Run
from lm_eval.api.model import LM, CachingLM
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import patches, shim
from tests import evaluation

# What the wrappers rely on: the arguments that they name, of the functions that they wrap.
ARGUMENTS = {
    "TaskManager.__init__": {"include_path", "include_defaults"},
    "get_model": {"model_name"},
    "evaluate": {"lm", "task_dict", "limit", "samples"},
    "TemplateLM._encode_pair": {"context", "continuation"},
    "ConfigurableTask.build_qa_turn": set(),
    "ConfigurableTask.fewshot_context": {"num_fewshot", "chat_template"},
    "apply_template": {"template", "doc"},
    "ConfigurableTask.__init__": set(),
    "ConfigurableTask.build_all_requests": set(),
}


def place(patch: patches.Patch) -> tuple[object, str]:
    module, _, path = patch.place.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.place)
def test_what_is_patched_is_there(patch):
    owner, name = place(patch)
    function = inspect.unwrap(getattr(owner, name))
    expected = ARGUMENTS[patch.place.partition(":")[2]]
    if expected:
        assert expected <= inspect.signature(function).parameters.keys()
    assert callable(function)
    where, _, ours = patch.wrapper.partition(":")
    wrapper = getattr(importlib.import_module(f"lm_eval_icl.harness.{where}"), ours)
    assert next(iter(inspect.signature(wrapper).parameters)) == "original"
    assert patch.what.endswith(".")
    assert patch.until.endswith(".")


def test_every_patch_is_in_the_table():
    """At most nine, each of another function, put in when its module is imported; no object has a
    method replaced."""
    assert set(ARGUMENTS) == {patch.place.partition(":")[2] for patch in patches.PATCHES}
    assert len(ARGUMENTS) == len(patches.PATCHES) <= 9
    assert {patch.module for patch in patches.PATCHES} < {*shim.MODULES}
    assert {patch.door for patch in patches.PATCHES} == {patches.EVERY_DOOR, patches.EARLY_DOORS}


def source(function):
    return inspect.getsource(inspect.unwrap(function))


def test_what_is_relied_on_inside_functions_is_there():
    """`fewshot_context` makes every turn, the last one too, with `build_qa_turn`; tasks are read
    before anything is evaluated."""
    assert source(ConfigurableTask.fewshot_context).count("self.build_qa_turn(") >= 2
    execute = source(Run._execute)
    assert execute.index("process_tasks(") < execute.index("simple_evaluate(\n")


def test_patching_twice_changes_nothing():
    def state():
        return [getattr(*place(patch)) for patch in patches.PATCHES], sys.excepthook

    patches.install()
    before = state()
    patches.install()
    for module in shim.MODULES:
        patches.install(module)
    shim.register()
    assert state() == before


class Other(LM):
    """A model of lm-eval that is not ours."""

    def loglikelihood(self, requests):
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests):
        return [-1.0] * len(requests)

    def generate_until(self, requests):
        return ["a"] * len(requests)


def test_other_models_run_as_without_us(tmp_path):
    """No check of ours, no parts in a prompt, no cache of ours."""
    task = evaluation.manager(False).load([{**evaluation.TASKS["one_token"]}])
    with pytest.raises(ValueError, match="did not find any docs") as error:
        lm_eval.evaluator.evaluate(Other(), task, limit=0.0, bootstrap_iters=0)
    assert not isinstance(error.value, InputError)
    assert type(CachingLM(Other(), str(tmp_path / "cache.db"))) is CachingLM
    results = lm_eval.evaluator.evaluate(Other(), task, limit=2, bootstrap_iters=0)
    for sample in results["samples"]["one_token"]:
        assert all(type(prompt) is str for prompt, _ in sample["arguments"])


def ended(code):
    """A program of this code, in which refusals are lines."""
    code = f"from lm_eval_icl import errors, methods; errors.show_as_lines(); {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_refusal_that_nobody_catches_is_a_line():
    done = ended("errors.show_as_lines(); methods.make('icl', {'repeat': 0})")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "lm-eval-icl: icl: repeat=0: must be a whole number, 1 or more.\n"


def test_another_error_has_its_traceback():
    done = ended("1 / 0")
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr
