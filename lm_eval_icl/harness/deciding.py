"""Decision rules in a run of lm-eval: `--metadata decide=contextual+batch`, for every model.

A rule is one more filter of a task: `acc,none` stays what the model says, and `acc,contextual` stands beside it, of the
same run and the same samples. The queries that a rule asks besides the documents' are requests of the task like any
other, with document numbers below 0, which no metric looks up: they are packed with the documents behind the same
memory, and have keys of their own in a response cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CachingLM
from lm_eval.api.task import ConfigurableTask, Task

from lm_eval_icl.decisions.how import read
from lm_eval_icl.decisions.rule import Rule
from lm_eval_icl.errors import InputError, log, naming
from lm_eval_icl.harness.distributed import of_all
from lm_eval_icl.harness.metaicl import MetaICLTask
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.rule_queries import RuleQueries
from lm_eval_icl.harness.rules import Decided, rule_filter
from lm_eval_icl.harness.tasks import as_row

# Metrics that mean nothing with the values of any rule; and with values that are no log-probabilities.
_OF_RAW = {"acc_mutual_info"}
_OF_LOGS = {"acc_norm", "acc_bytes", "brier_score", "likelihood"}


def decided(original: Callable[..., Any], lm: LM, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `lm_eval.evaluate`: MetaICL's tasks are told which model is evaluated, and tasks whose metadata name
    decision rules have these as filters.

    Raises:
        InputError: a task or a rule cannot be used with the model, or a rule with a task.
    """
    tasks = task_dict.get("tasks", {}) if isinstance(task_dict, dict) else {}
    model = lm.lm if isinstance(lm, CachingLM) else lm
    given = []
    model.decided = {}
    try:
        for task in tasks.values():
            if isinstance(task, MetaICLTask):
                task.bind(model)
            if give_rules(task, model):
                given.append(task)
        deciding = {name: task.deciding for name, task in tasks.items() if is_deciding(task)}
        if deciding and kwargs.get("cache_requests"):
            raise InputError("--cache_requests: stored prompts have not those that decide= needs: leave it out.")
        results = original(lm, task_dict, *args, **kwargs)
    finally:
        for task in given:
            del task._filters[-len(task.deciding.filters) :], task.deciding
    limit, samples = kwargs.get("limit"), kwargs.get("samples") or {}
    for name, rules in deciding.items():
        model.decided[name] = rules.record(limit, samples.get(name))
    if deciding and not isinstance(model, ICLModel):
        _record_in_results(model)
    return results


def give_rules(task: Any, model: Any) -> bool:
    """Give a task whose metadata name decision rules these as filters, for runs of this model.

    Returns:
        Whether it was given them now; a task that has them keeps them.

    Raises:
        InputError: a rule cannot be used with the task.
    """
    metadata = task.config.metadata or {}
    if "decide" not in metadata or is_deciding(task):
        return False
    with naming(f"task {task.config.task!r}"):
        rules = read(metadata["decide"])
    check_options(task, rules)
    task.deciding = Deciding(rules, model)
    task._filters = [*task._filters, *task.deciding.filters]
    return True


def is_deciding(task: Any) -> bool:
    return isinstance(getattr(task, "deciding", None), Deciding)


def check_options(task: Task, rules: Sequence[Rule]) -> None:
    """Refuse rules for a task that has no options to decide among, or a decision of its own."""
    why = ""
    if isinstance(task, MetaICLTask):
        why = "MetaICL's tasks have a decision of their own (pmi=True): leave decide out."
    elif not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        why = "decides among options, which this task does not have: leave it out of --tasks."
    elif task.multiple_input:
        why = "every option of this task has a prompt of its own: leave it out of --tasks."
    if why:
        raise InputError(f"task {str(task.config.task)!r}: decide={'+'.join(map(str, rules))}: {why}")


def with_queries(original: Callable[..., None], task: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.build_all_requests`: those of a task's decision rules are added."""
    if not is_deciding(task):
        return original(task, **kwargs)
    with recording():
        original(task, **kwargs)
    # A study builds requests once, and evaluates them often.
    if task._instances is not task.deciding.instances:
        names = ("system_instruction", "apply_chat_template", "fewshot_as_multiturn", "chat_template")
        task.deciding.ask(task, {name: kwargs[name] for name in names if name in kwargs})
    return None


def without_meaningless(original: Callable[..., Any], task: Any, doc: Any, results: Any, *args: Any) -> Any:
    """Wrapper of `ConfigurableTask.process_results`: metrics that mean nothing with a rule's values are left out."""
    metrics = original(task, doc, results, *args)
    without = meaningless(results[0].rule) if results and isinstance(results[0], Decided) else set()
    return {name: value for name, value in metrics.items() if name not in without} if without else metrics


def meaningless(rule: Rule) -> set[str]:
    """The metrics that mean nothing with the values of a rule, and are not reported."""
    return _OF_RAW | (set() if rule.is_logarithmic else _OF_LOGS)


def _record_in_results(model: Any) -> None:
    """Have what was decided written into the results of a model that is not of this package."""
    original = model.__dict__.get("get_model_info_without_decided") or getattr(model, "get_model_info", dict)
    model.get_model_info_without_decided = original

    def get_model_info() -> dict[str, Any]:
        info = original()
        return {**info, "icl": {**info.get("icl", {}), "decided": model.decided}} if model.decided else info

    model.get_model_info = get_model_info


class Deciding:
    """The decisions of a task's rules in one run.

    Args:
        model: what is evaluated.

    Attributes:
        filters: the rules.
        instances: the task's requests with those of the rules; None before they are made.
        queries: what the rules ask.
    """

    queries: RuleQueries

    def __init__(self, rules: Sequence[Rule], model: Any) -> None:
        self.filters, self.model = [rule_filter(rule) for rule in rules], model
        self.instances: list[Instance] | None = None

    def ask(self, task: ConfigurableTask, arguments: Mapping[str, Any]) -> None:
        """Add the queries of all rules to a task's requests.

        Args:
            arguments: as of `Queries`.

        Raises:
            InputError: a rule does not fit the task, or a query does not fit the model.
        """
        self.queries = queries = RuleQueries(task, self.model, arguments)
        for rule in self.filters:
            rule.queries = queries
            with naming(f"task {queries.name!r}: decide={rule.name}"):
                if rule.rule.fixed_options:
                    queries.check_fixed_options(rule.rule.fixed_options)
                rule.ask()
        task._instances = self.instances = queries.instances
        if queries.prompts:
            n = len({place for place, _ in queries.prompts})
            log.info("%s: decide asks %d further queries behind %d contexts.", queries.name, len(queries.prompts), n)

    def record(self, limit: float | None, samples: Sequence[int] | None) -> dict[str, Any]:
        """What the results say of each rule. Every process calls this."""
        rows = {number: as_row(instances[0].doc) for number, instances in self.queries.documents.items()}
        rows = {number: row for share in of_all(rows) for number, row in share.items()}
        digest = hashlib.sha256(json.dumps([rows[number] for number in sorted(rows)]).encode()).hexdigest()
        record = {}
        for applied in self.filters:
            arguments = applied.rule.arguments
            record[applied.name] = {
                "rule": applied.rule.name,
                "arguments": {name: list(v) if isinstance(v, tuple) else v for name, v in arguments.items()},
                "transductive": applied.rule.is_transductive,
                "documents": len(rows),
                "documents_sha256": digest,
                "limit": limit,
                "samples": None if samples is None else len(samples),
                **applied.record(),
            }
        return record
