"""Tasks that lm-eval fails on, far from where they were asked for: refused in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.errors import InputError
from lm_eval_icl.wrapping import wrap


def refuse_unusable_tasks() -> None:
    """Make lm-eval's `ConfigurableTask` say what is wrong with a task. Twice changes nothing."""
    for name, wrapper in (
        ("download", _download),
        ("__init__", _init),
        ("build_all_requests", _build_all_requests),
        ("fewshot_context", _fewshot_context),
    ):
        wrap(ConfigurableTask, name, wrapper)


def _download(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(task, *args, **kwargs)
    except (FileNotFoundError, ConnectionError, RuntimeError) as error:
        if task.DATASET_PATH is None:  # the task's own loader failed, and knows why
            raise
        raise InputError(
            f"lm-eval-icl: task {task.config.task!r}: dataset {task.DATASET_PATH!r}"
            f"{f' ({task.DATASET_NAME})' if task.DATASET_NAME else ''} could not be loaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}). "
            "Check the network and HF_HUB_OFFLINE, or put a copy into a folder of that name "
            f"(./{task.DATASET_PATH}) and start the command beside it."
        ) from error


def _init(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(task, *args, **kwargs)
    except Exception as error:
        if why := _unusable(task):
            raise InputError(f"lm-eval-icl: task {task.config.task!r}: {why}.") from error
        raise


def _unusable(task: Any) -> str:
    """Why lm-eval could not make a task of its documents, where it tried its first one; empty if for another reason."""
    documents = getattr(task, "task_docs", None)
    if documents is None:
        return ""
    if len(documents) == 0:
        split = "test" if task.has_test_docs() else "validation"
        return f"no documents to evaluate: its {split} split is empty, or process_docs leaves none"
    if task.config.doc_to_choice is not None and "" in task.doc_to_choice(documents[0]):
        return "an option of its first document is empty, so there is nothing to score: check doc_to_choice"
    return ""


def _build_all_requests(original: Callable[..., None], task: Any, **kwargs: Any) -> None:
    limit, shots = kwargs.get("limit"), task.config.num_fewshot
    if limit is not None and limit < 1:
        raise InputError(f"lm-eval-icl: task {task.config.task!r}: --limit leaves no documents: it must be above 0.")
    if shots is not None and shots < 0:
        raise InputError(f"lm-eval-icl: task {task.config.task!r}: num_fewshot={shots}: must be 0 or more.")
    original(task, **kwargs)


def _fewshot_context(original: Callable[..., Any], task: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(task, *args, **kwargs)
    except (AssertionError, ValueError) as error:
        shots = inspect.signature(original).bind(task, *args, **kwargs).arguments["num_fewshot"]
        # Were more demonstrations asked for than there are? The error of a sampler says neither number.
        there = len(list(task.fewshot_docs())) if shots else 0
        if shots and shots >= there:
            raise InputError(
                f"lm-eval-icl: task {task.config.task!r}: num_fewshot={shots}: its few-shot split has {there} "
                "documents (and none may be its own demonstration): lower --num_fewshot."
            ) from error
        raise
