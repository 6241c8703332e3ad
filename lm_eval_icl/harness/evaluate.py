"""Wrappers of `lm_eval.evaluate` and of its response cache, which `lm_eval_icl.harness.patches` installs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from lm_eval.api.model import LM, CacheHook, CachingLM
from lm_eval.api.task import Task

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import deciding
from lm_eval_icl.harness.choosing import give_chosen, give_rankings, retrieving
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.response_cache import ResumableLM
from lm_eval_icl.harness.tasks import bind


def announced(original: Callable[..., Any], lm: LM, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `lm_eval.evaluate`: tell the tasks which model is evaluated, and a model of this package that a run
    over some tasks begins, and that it ends. Before requests are built, the model chooses the demonstrations of tasks
    that ask for it, and those that are retrieved are ranked. Tasks whose metadata name decision rules have these as
    filters during the run.

    Raises:
        InputError: a run with these tasks, rules or arguments is not possible.
    """
    model = lm.lm if isinstance(lm, CachingLM) else lm
    call = inspect.signature(original).bind(lm, task_dict, *args, **kwargs).arguments
    tasks: Mapping[str, Task] = task_dict.get("tasks", {}) if isinstance(task_dict, dict) else {}
    is_ours = isinstance(model, ICLModel)
    given = []
    try:
        for task in tasks.values():
            bind(task, model)
            if deciding.give_rules(task, model):
                given.append(task)
        ruled = {name: task.deciding for name, task in tasks.items() if deciding.is_deciding(task)}
        samplers = retrieving(tasks)
        if call.get("cache_requests") and (ruled or samplers or (is_ours and not call.get("rewrite_requests_cache"))):
            raise InputError(
                "--cache_requests: lm-eval finds stored prompts by task and number of demonstrations, not by seed, "
                "choice of demonstrations or decision rule, so that a run would get those of another: leave it out."
            )
        give_rankings(model, tasks, call.get("limit"))
        if is_ours:
            model.chosen = give_chosen(model, tasks.values())
            model.begin(list(tasks.values()))
            if lm is model:
                model.set_cache_hook(
                    CacheHook(None)
                )  # removes that of an earlier run, which may have had other weights
        with recording() if is_ours else nullcontext():
            results = original(lm, task_dict, *args, **kwargs)
    finally:
        for task in given:
            deciding.take_rules(task)
    if is_ours:
        model.finish()
    if results is not None:  # of several processes, one has them
        deciding.record(ruled, results)
        for name, sampler in samplers.items():
            config = results["configs"][name]
            config["metadata"] = {**(config.get("metadata") or {}), "retrieved": sampler.facts}
    return results


def resumable(
    original: Callable[..., CachingLM], cls: type[CachingLM], lm: Any = None, *_: Any, **__: Any
) -> CachingLM:
    """Wrapper of `CachingLM.__new__`: for a model of this package, make a `ResumableLM`."""
    return object.__new__(ResumableLM if isinstance(lm, ICLModel) else cls)
