"""Decision rules in a run of lm-eval: `--metadata decide=contextual+batch`, for every model.

A rule is one more filter of a task: `acc,none` is still the model's accuracy, and `acc,contextual`
is the accuracy with the rule, of the same run and the same samples. In the order of a run: a task
is given its rules, their queries are added to its requests (`rule_filters`), the filters turn
responses into values, the rules are recorded, and the task loses them again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from lm_eval.api.task import Task

from lm_eval_icl.decisions.rule import Rule
from lm_eval_icl.decisions.rules import read
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.fitting import give_rows, why_no_options
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.private_names import add_filters, remove_filters
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.rule_filters import RulesOfTask
from lm_eval_icl.harness.rule_queries import few_shot_seed
from lm_eval_icl.harness.task_state import state_of

# Metrics that mean nothing with the values of any rule.
_OF_RAW = {"acc_mutual_info"}
# Metrics that mean nothing with values that are not log-probabilities.
_OF_LOGS = {"acc_norm", "acc_bytes", "brier_score", "likelihood"}
# The arguments of `build_all_requests` on which a prompt depends.
_PROMPT = ("system_instruction", "apply_chat_template", "fewshot_as_multiturn", "chat_template")


def give_rules(task: Any, model: Any) -> None:
    """Give a task the decision rules that its metadata name, as filters for runs of this model. A
    task of a study, which has its rules, keeps them.

    Raises:
        InputError: a rule cannot be used with the task.
    """
    is_fitted = isinstance(model, ICLModel) and model.method.rows_wanted
    state_of(task).fitted_model = model if is_fitted else None
    metadata = task.config.metadata or {}
    if "decide" not in metadata or state_of(task).rules is not None:
        return
    with naming(f"task {task.config.task!r}"):
        rules = read(metadata["decide"])
    check_options(task, rules)
    given = RulesOfTask(rules, model, few_shot_seed(task))
    state_of(task).rules = given
    add_filters(task, given.filters)


def check_options(task: Task, rules: Sequence[Rule]) -> None:
    """Raise an `InputError` if a task has no options to decide among, or a decision of its own."""
    why = why_no_options(task)
    if why:
        written = "+".join(map(str, rules))
        raise InputError(f"task {str(task.config.task)!r}: decide={written}: {why}")


def with_queries(original: Callable[..., None], task: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.build_all_requests`: add the requests of a task's decision
    rules. A study's task, whose requests are made, keeps them."""
    state = state_of(task)
    rules = state.rules
    with recording() if rules is not None else nullcontext():
        if not state.requests_are_made:
            original(task, **kwargs)
    arguments = {name: kwargs[name] for name in _PROMPT if name in kwargs}
    if state.fitted_model is not None:
        give_rows(task, state.fitted_model, arguments)
    # A study asks the rules of a task once, and evaluates the task several times.
    if rules is not None and task.instances is not rules.instances:
        rules.ask(task, arguments)


def take_rules(task: Any) -> None:
    """Take away the rules that a task was given, unless it is a study's, which runs again."""
    state = state_of(task)
    if state.rules is not None and not state.requests_are_made:
        remove_filters(task, state.rules.filters)
        state.rules = None


def add_metadata(results: dict[str, Any], task: str, facts: Mapping[str, Any]) -> None:
    """Add facts to a task's metadata in the results."""
    config = results["configs"][task]
    config["metadata"] = {**(config.get("metadata") or {}), **facts}


def meaningless(rule: Rule) -> set[str]:
    """The metrics that mean nothing with the values of a rule, and are not reported."""
    return _OF_RAW if rule.is_logarithmic else _OF_RAW | _OF_LOGS


def record(ruled: Mapping[str, RulesOfTask], results: dict[str, Any]) -> None:
    """Add facts about each task's rules to the results, under the task's metadata. Metrics that
    mean nothing with a rule's values are removed."""
    for name, rules in ruled.items():
        add_metadata(results, name, {"decided": rules.record()})
        without = {applied.name: meaningless(applied.rule) for applied in rules.filters}
        for values in (*results["results"].values(), *results.get("groups", {}).values()):
            for key in list(values):
                metric, _, filter_name = key.partition(",")
                if metric.removesuffix("_stderr") in without.get(filter_name, ()):
                    del values[key]
        for sample in results.get("samples", {}).get(name, ()):
            for metric in without.get(sample["filter"], set()) & set(sample["metrics"]):
                sample["metrics"].remove(metric)
                del sample[metric]
