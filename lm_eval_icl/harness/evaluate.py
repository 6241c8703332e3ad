"""Wrappers of `lm_eval.evaluate` and of its response cache, which `lm_eval_icl.harness.patches` installs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import LM, CacheHook, CachingLM
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import get_sample_size

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.choosing import give_chosen
from lm_eval_icl.harness.distributed import check_shares
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.response_cache import ResumableLM


def announced(original: Callable[..., Any], lm: LM, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `lm_eval.evaluate`: tell a model of this package that a run over some tasks begins, and that it ends.
    In between, before lm-eval builds requests, the model chooses the demonstrations of tasks that ask for it.

    Raises:
        InputError: a run with these numbers of documents, demonstrations or processes, or with these arguments, is not
            possible.
    """
    model = lm.lm if isinstance(lm, CachingLM) else lm
    if not isinstance(model, ICLModel):
        return original(lm, task_dict, *args, **kwargs)
    call = inspect.signature(original).bind(lm, task_dict, *args, **kwargs).arguments
    if call.get("cache_requests") and not call.get("rewrite_requests_cache"):
        raise InputError(
            "--cache_requests: lm-eval finds stored prompts by task and number of demonstrations, not by seed or "
            "choice of demonstrations, so that a run would be given the demonstrations of another: leave it out."
        )
    template = call.get("apply_chat_template", False)
    if template:
        model.chat_template(template)
    elif model.chat_template_args and not model.enable_thinking:  # True is refused where log-likelihoods are asked for
        name = "chat_template_args" if model.enable_thinking is None else "enable_thinking"
        raise InputError(
            f"model argument {name} has an effect only with --apply_chat_template: give that, or leave it out."
        )
    tasks, limit, samples = task_dict.get("tasks", {}), call.get("limit"), call.get("samples") or {}
    for name, task in tasks.items():
        shots = task.config.num_fewshot
        if limit is not None and limit <= 0:
            raise InputError(f"task {name!r}: --limit leaves no documents: it must be above 0.")
        if shots is not None and shots < 0:
            raise InputError(f"task {name!r}: num_fewshot={shots}: must be 0 or more.")
    check_shares(tasks, limit, samples, model.world_size)
    if lm is model:
        model.set_cache_hook(CacheHook(None))  # removes that of an earlier run, which may have had other weights
    model.chosen = give_chosen(model, tasks.values())
    if model.chosen and template and model.rank == 0:
        log.warning("The model chooses demonstrations by prompts without the chat template, and is evaluated with it.")
    documents = functools.cache(lambda name: _documents(tasks[name], limit, samples.get(name)))
    model.begin(list(tasks.values()), documents)
    with recording():
        results = original(lm, task_dict, *args, **kwargs)
    model.finish()
    return results


def _documents(task: Task, limit: float | None, samples: list[int] | None) -> Sequence[int]:
    """The indices of a run's documents among all documents of a task: a range, or a list if --samples chooses them."""
    if samples:
        return sorted(set(samples))
    n = len(task.eval_docs)
    return range(n if limit is None else min(n, get_sample_size(task, limit)))


def resumable(
    original: Callable[..., CachingLM], cls: type[CachingLM], lm: Any = None, *_: Any, **__: Any
) -> CachingLM:
    """Wrapper of `CachingLM.__new__`: for a model of this package, make a `ResumableLM`."""
    return object.__new__(ResumableLM if isinstance(lm, ICLModel) else cls)
