"""One-line errors, in this package's commands, for tasks that lm-eval cannot set up: its own errors hide the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval_icl.errors import InputError


def named_dataset(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.download`.

    Raises:
        InputError: the dataset could not be loaded; the message names the task.
    """
    try:
        original(task, *args, **kwargs)
    except (FileNotFoundError, ConnectionError, RuntimeError) as error:
        if task.DATASET_PATH is None:  # the task's own loader failed, and its error gives the reason
            raise
        raise InputError(
            f"task {task.config.task!r}: dataset {task.DATASET_PATH!r}"
            f"{f' ({task.DATASET_NAME})' if task.DATASET_NAME else ''} could not be loaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}). "
            "Check the network and HF_HUB_OFFLINE, or put a copy into a folder of that name "
            f"(./{task.DATASET_PATH}) and start the command beside it."
        ) from error


def usable_task(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.__init__`, which formats the first document.

    Raises:
        InputError: the task has no documents, or an option of the first document is empty.
    """
    try:
        original(task, *args, **kwargs)
    except Exception as error:
        if why := _unusable(task):
            raise InputError(f"task {task.config.task!r}: {why}.") from error
        raise


def _unusable(task: Any) -> str:
    """Why lm-eval could not set up a task with its documents; empty if there is another reason."""
    documents = getattr(task, "task_docs", None)
    if documents is None:
        return ""
    if len(documents) == 0:
        split = "test" if task.has_test_docs() else "validation"
        return f"no documents to evaluate: its {split} split is empty, or process_docs leaves none"
    if task.config.doc_to_choice is not None and "" in task.doc_to_choice(documents[0]):
        return "an option of its first document is empty, so there is nothing to score: check doc_to_choice"
    return ""
