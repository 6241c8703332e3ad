"""The documents that a task of lm-eval's takes demonstrations from, as prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.demonstrations.draw import pool_digest, too_few
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.tasks import among, as_row, evaluated, pool_of, template_of
from lm_eval_icl.harness.training import Examples
from lm_eval_icl.prompts.prompt import FewShotPrompt


class PoolOfTask:
    """The documents that a task takes demonstrations from (`demonstrations.choosing.TaskPool`).

    Args:
        task: a task with options to choose from.
        without: documents that are not chosen, besides those that the task evaluates.

    Raises:
        InputError: it has no options, no few-shot documents, or none that it does not evaluate.
    """

    def __init__(self, task: ConfigurableTask, without: Sequence[Mapping[str, Any]] = ()) -> None:
        self.name = str(getattr(task, "task_name", None) or type(task).__name__)
        if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
            raise InputError(f"task {self.name!r}: demonstrations are chosen for tasks with options alone.")
        self.task, self.docs = task, pool_of(task)
        if not self.docs:
            raise InputError(f"task {self.name!r}: has no few-shot documents to choose from.")
        closed = {as_row(doc) for doc in without}
        self.rows = [row for row, doc in enumerate(self.docs) if not (closed and as_row(doc) in closed)]
        is_evaluated, is_without = evaluated(task), among(task, lambda: without)
        self.is_closed = cache(lambda row: is_evaluated(self.docs[row]) or is_without(self.docs[row]))
        if all(self.is_closed(row) for row in self.rows):
            raise InputError(f"task {self.name!r}: {too_few(1, 0).message}")
        self.demonstration = cache(self._demonstration)
        self.query = cache(self._query)

    @cached_property
    def _examples(self) -> Examples:
        return Examples(self.task, self.docs)

    @cached_property
    def sha256(self) -> str:
        return pool_digest(self.docs)

    @cached_property
    def prompts(self) -> str:
        """What a choice depends on besides these documents: the templates, and which documents are evaluated."""
        return template_of(self.task) + pool_digest(list(self.task.eval_docs))

    def _query(self, row: int) -> tuple[FewShotPrompt, tuple[str, ...], int]:
        example = self._examples.example((), row)
        return example.prompt, example.options, example.right

    def _demonstration(self, row: int) -> str:
        return self._examples.example((row,), row).prompt.demonstrations[0]
