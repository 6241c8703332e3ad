"""Labeled rows of a task, on which a method is fitted that learns from more than demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.documents import label_of
from lm_eval_icl.harness.metaicl_task import MetaICLTask
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.rule_queries import RuleQueries, few_shot_seed, options_of
from lm_eval_icl.methods.moicl import LabeledRow


def why_no_options(task: Any) -> str:
    """Why a task has no options to decide among after one query. Empty if it has."""
    if isinstance(task, MetaICLTask):
        return "MetaICL's tasks decide in their own way (pmi=True): leave the task out of --tasks."
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        return "it decides among options, and this task has none: leave the task out of --tasks."
    if task.multiple_input:
        return "every option of this task has its own prompt: leave the task out of --tasks."
    return ""


def give_rows(task: Any, model: ICLModel, arguments: Mapping[str, Any]) -> None:
    """Give a model the labeled rows for each set of demonstrations of a task.

    They are few-shot documents that are neither demonstrations nor evaluated, with the prompt's
    demonstrations before them.

    Args:
        task: the task, whose requests are made.
        arguments: as for `RuleQueries`.

    Raises:
        InputError: the task has no options that are the same for all documents, or too few rows.
    """
    method = model.method
    with naming(f"task {str(task.config.task)!r}: {method.name}"):
        why = why_no_options(task)
        if why:
            raise InputError(why)
        queries = RuleQueries(task, model, arguments, few_shot_seed(task))
        queries.check_fixed_options("fitting weights")
        for start in dict.fromkeys(queries.starts.values()):
            if len(start[1]) > 1:
                _fit(queries, start)


def _fit(queries: RuleQueries, start: Any) -> None:
    """Draw and tokenize the rows for the demonstrations of `start`."""
    model = queries.model
    wanted = model.method.rows_wanted
    options = options_of(next(iter(queries.documents.values())))
    numbers = []
    rows = []
    for number, query in queries.drawn(model.method.name, start):
        label = label_of(queries.task, queries.pool[number])
        if label is None:
            continue  # its answer is none of the options
        requests = [queries.request(start, query, option) for option in options]
        answers = [request.answer for request in requests]
        numbers.append(number)
        rows.append(LabeledRow(requests[0].prompt.query, answers, label))
        if len(rows) == wanted:
            break
    if len(rows) < wanted:
        raise InputError(
            f"rows={wanted}: only {len(rows)} few-shot documents are neither demonstrations nor "
            "evaluated: lower rows."
        )
    context = requests[0].prompt.context
    if context in model.fitted and model.runner.rows[context] != rows:
        raise InputError(
            f"task {model.fitted[context]['task']!r} has the same demonstrations and is fitted on "
            "other rows: run the two tasks one after the other."
        )
    model.runner.rows[context] = rows
    model.fitted[context] = {"task": queries.name, "labels": numbers}
