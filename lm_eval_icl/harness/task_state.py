"""What this package remembers about a task of lm-eval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_eval_icl.harness.private_names import STATE

if TYPE_CHECKING:
    from lm_eval_icl.harness.models import ICLModel
    from lm_eval_icl.harness.rule_filters import RulesOfTask


@dataclass
class TaskState:
    """All that this package remembers about a task, in the only attribute that it adds to it."""

    # The decision rules in a run. `deciding.give_rules` sets them before the requests are built,
    # and `deciding.take_rules` removes them after the run. `deciding.with_queries`, which adds
    # their requests, and `evaluate.announced`, which records them, read them.
    rules: RulesOfTask | None = None
    # Whether a study has built the documents' requests, which it then evaluates several times.
    # `studies.cell_tasks.prepare` sets it; `deciding.with_queries` and `metaicl_task.MetaICLTask`,
    # which would build them again, read it.
    requests_are_made: bool = False
    # The model that is fitted on labeled rows of the task. `deciding.give_rules` sets it, and
    # `deciding.with_queries`, which gives the model these rows, reads it.
    fitted_model: ICLModel | None = None


def state_of(task: Any) -> TaskState:
    """The state of a task. A task without one gets one with the default values."""
    return vars(task).setdefault(STATE, TaskState())
