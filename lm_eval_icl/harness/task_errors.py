"""One-line errors, in this package's commands, for tasks that lm-eval cannot set up: its own errors hide the cause."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import TemplateError

from lm_eval_icl.errors import InputError, did_you_mean


def unknown_task(name: str, known: Iterable[str], include_path: str | None) -> str:
    """The line about the name of a task or group that does not exist.

    Args:
        known: the names of all tasks and groups.
        include_path: the folder of further tasks, if one was given.
    """
    near = did_you_mean(name, known)
    own = f" --include_path {include_path}" if include_path else ""
    advice = "" if include_path else " For tasks in a folder of your own, give --include_path DIR."
    return (
        f"there is no task {name!r}{f': {near}' if near else '.'} `lm-eval-icl ls tasks{own}` lists "
        f"those there are.{advice}"
    )


def named_dataset(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.download`: a dataset that cannot be loaded is one line that names the task."""
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
    """Wrapper of `ConfigurableTask.__init__`, which formats the first document: one line where there is none, where an
    option of it is empty, or where a template cannot be filled in with it."""
    try:
        readable_templates(original, task, *args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        documents = getattr(task, "task_docs", None)
        if documents is None:
            raise
        if len(documents) == 0:
            split = "test" if task.has_test_docs() else "validation"
            why = f"no documents to evaluate: its {split} split is empty, or process_docs leaves none"
        elif task.config.doc_to_choice is not None and "" in task.doc_to_choice(documents[0]):
            why = "an option of its first document is empty, so there is nothing to score: check doc_to_choice"
        else:
            raise
        raise InputError(f"task {task.config.task!r}: {why}.") from error


def readable_templates(original: Callable[..., Any], task: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `ConfigurableTask.fewshot_context`, which fills in the templates of a task: one line where one is
    broken, or names a field that the document does not have."""
    try:
        return original(task, *args, **kwargs)
    except TemplateError as error:
        # The frames between here and the error have the text that was being filled in; lm-eval's error does not say it.
        frames = {frame.f_code.co_name: frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)}
        filling = frames.get("apply_template", {})
        template, fields = filling.get("template"), list(filling.get("doc") or ())
        settings = [*vars(task.config).items()]
        settings += [(f"fewshot_config: {key}", value) for key, value in vars(task.fewshot_cfg).items()]
        key = next((key for key, value in settings if template and value == template), "a template")
        name = str(error).partition("'")[2].partition("'")[0]  # 'name' is undefined
        near = did_you_mean(name, fields)
        source = (task.config.metadata or {}).get("config_source", "inline")
        raise InputError(
            f"task {task.config.task!r}{f' ({source})' if source != 'inline' else ''}: {key}: {template!r}: {error}"
            f"{f': {near}' if near else '.'} A document has the fields {', '.join(fields)}."
        ) from error
