"""The private names of lm-eval that this package uses. No other file reads or writes one at an
object of lm-eval's. (`loading.CheckedHFLM` overrides methods of `HFLM`, as a subclass may.)"""

import copy
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._index import Kind  # noqa: F401 (of an entry of lm-eval's index)

# The only attribute that this package adds to a task (`task_state.TaskState`).
STATE = "lm_eval_icl"


def copied(task: ConfigurableTask) -> ConfigurableTask:
    """A copy of a task, with a configuration and a sampler of its own, and nothing remembered."""
    task_copy = copy.copy(task)
    task_copy._config = copy.copy(task.config)
    if hasattr(task, "sampler"):
        task_copy.sampler = copy.copy(task.sampler)
    vars(task_copy).pop(STATE, None)
    return task_copy


def set_requests(task: ConfigurableTask, instances: list[Instance]) -> None:
    """Replace a task's requests."""
    task._instances = instances


def add_filters(task: ConfigurableTask, filters: Sequence[Any]) -> None:
    """Append filters to those of a task."""
    task._filters = [*task._filters, *filters]


def remove_filters(task: ConfigurableTask, filters: Sequence[Any]) -> None:
    """Remove the filters that `add_filters` has appended last."""
    task._filters = task._filters[: -len(filters)]


def encodes_like_all(model: TemplateLM) -> bool:
    """Whether a model divides context and continuation into tokens as lm-eval's base class does."""
    return type(model)._encode_pair is TemplateLM._encode_pair
