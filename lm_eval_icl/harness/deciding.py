"""Decision rules in a run of lm-eval: `--metadata decide=contextual+batch`, for every model.

A rule is one more filter of a task: `acc,none` stays what the model says, and `acc,contextual` stands beside it, of the
same run and the same samples. The queries that a rule asks besides the documents' are requests of the task like any
other, with document numbers below 0, which no metric looks up: they are packed with the documents behind the same
memory, and have keys of their own in a response cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CachingLM, TemplateLM
from lm_eval.api.task import ConfigurableTask, Task

from lm_eval_icl import decisions
from lm_eval_icl.decisions.how import NEIGHBORS, Rule, read
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.distributed import of_all
from lm_eval_icl.harness.metaicl import MetaICLTask
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.rule_queries import Behind, RuleQueries, options_of
from lm_eval_icl.harness.tasks import as_row
from lm_eval_icl.inference.scoring import query_states

# Metrics that mean nothing with the values of any rule; and with values that are no log-probabilities.
_OF_RAW = {"acc_mutual_info"}
_OF_LOGS = {"acc_norm", "acc_bytes", "brier_score", "likelihood"}
_AT_ONCE = 64  # documents that are compared with labeled rows at once: their log-probabilities are of all tokens


def decided(original: Callable[..., Any], lm: LM, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `lm_eval.evaluate`: tasks whose metadata name decision rules have these as filters.

    Raises:
        InputError: a rule cannot be used with a task or a model.
    """
    tasks = task_dict.get("tasks", {}) if isinstance(task_dict, dict) else {}
    model = lm.lm if isinstance(lm, CachingLM) else lm
    before = {name: (type(task), dict(task.__dict__)) for name, task in tasks.items()}
    model.decided = {}  # type: ignore[attr-defined]
    try:
        for task in tasks.values():
            give_rules(task, model)
        deciding = {name: task.deciding for name, task in tasks.items() if isinstance(task, DecidingTask)}
        if deciding and kwargs.get("cache_requests"):
            raise InputError("--cache_requests: stored prompts have not those that decide= needs: leave it out.")
        results = original(lm, task_dict, *args, **kwargs)
    finally:
        for name, (cls, attributes) in before.items():
            if type(tasks[name]) is not cls:
                tasks[name].__class__ = cls
                tasks[name]._filters = attributes["_filters"]
                del tasks[name].deciding
    if not deciding:
        return results
    limit, samples = kwargs.get("limit"), kwargs.get("samples") or {}
    model.decided = {  # type: ignore[attr-defined]
        name: of_task.record(limit, samples.get(name)) for name, of_task in deciding.items()
    }
    if not isinstance(model, ICLModel):
        _say_in_results(model)
    return results


def give_rules(task: Any, model: Any) -> None:
    """Make a task whose metadata name decision rules one that has them as filters, for runs of this model.

    Raises:
        InputError: a rule cannot be used with the task.
    """
    metadata = task.config.metadata or {}
    if "decide" not in metadata or isinstance(task, DecidingTask):
        return
    try:
        rules = read(metadata["decide"])
    except InputError as error:
        raise InputError(f"task {task.config.task!r}: {error.message}") from error
    check_options(task, rules)
    task.__class__ = _deciding_class(type(task))  # type: ignore[arg-type]
    task.deciding = Deciding(task, rules, model)
    task._filters = [*task._filters, *(Filter(task.deciding, rule) for rule in rules)]


def check_options(task: Task, rules: Sequence[Rule]) -> None:
    """Refuse rules for a task that has no options to decide among, or a decision of its own.

    Raises:
        InputError: it is such a task.
    """
    said = f"task {str(task.config.task)!r}: decide={'+'.join(map(str, rules))}"
    if isinstance(task, MetaICLTask):
        raise InputError(f"{said}: MetaICL's tasks have a decision of their own (pmi=True): leave decide out.")
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        raise InputError(f"{said}: decides among options, which this task does not have: leave it out of --tasks.")
    if task.multiple_input:
        raise InputError(f"{said}: every option of this task has a prompt of its own: leave it out of --tasks.")


class DecidingTask(ConfigurableTask):
    """A task with decision rules.

    Attributes:
        deciding: its rules in one run.
    """

    deciding: Deciding

    def build_all_requests(self, **kwargs: Any) -> None:
        with recording():
            super().build_all_requests(**kwargs)
        # A study builds requests once, and evaluates them often.
        if self._instances is not self.deciding.queries.instances:
            names = ("system_instruction", "apply_chat_template", "fewshot_as_multiturn", "chat_template")
            self.deciding.queries.add({name: kwargs[name] for name in names if name in kwargs})

    def process_results(self, doc: Any, results: Any) -> Any:
        metrics = super().process_results(doc, results)
        rule = getattr(results[0], "rule", None)
        without = set() if rule is None else meaningless(rule)
        return {name: value for name, value in metrics.items() if name not in without}


def meaningless(rule: Rule) -> set[str]:
    """The metrics that mean nothing with the values of a rule, and are not reported."""
    return _OF_RAW | (set() if rule.is_logarithmic else _OF_LOGS)


@functools.cache
def _deciding_class(cls: type[Task]) -> type[Task]:
    return type(f"Deciding{cls.__name__}", (DecidingTask, cls), {})


def _say_in_results(model: Any) -> None:
    """Have what was decided written into the results of a model that is not of this package."""
    original = model.__dict__.get("get_model_info_without_decided") or getattr(model, "get_model_info", dict)
    model.get_model_info_without_decided = original

    def info() -> dict[str, Any]:
        facts = original()
        return {**facts, "icl": {**facts.get("icl", {}), "decided": model.decided}} if model.decided else facts

    model.get_model_info = info


class Decided(tuple[Any, ...]):
    """A response (value, greedy) as a rule has it.

    Attributes:
        rule: the rule.
    """

    rule: Rule

    @classmethod
    def by(cls, rule: Rule, value: float, greedy: bool) -> Decided:
        self = cls((value, greedy))
        self.rule = rule
        return self


class Filter:
    """An ensemble of filters of lm-eval's that applies a rule."""

    def __init__(self, deciding: Deciding, rule: Rule) -> None:
        self.deciding, self.rule, self.name = deciding, rule, str(rule)

    def apply(self, instances: Sequence[Instance]) -> None:
        self.deciding.apply(self.rule)


class Deciding:
    """The decisions of a task's rules in one run.

    Args:
        model: what is evaluated.

    Attributes:
        queries: what the rules ask.
    """

    def __init__(self, task: ConfigurableTask, rules: Sequence[Rule], model: Any) -> None:
        self.task, self.model, self.queries = task, model, RuleQueries(task, rules, model)
        self._tokens_run = {str(rule): 0 for rule in rules}  # of rules that compare with labeled rows

    def apply(self, rule: Rule) -> None:
        """Put the rule's values beside the model's."""
        scores = {document: _scores(instances) for document, instances in self.queries.documents.items()}
        if rule.name in NEIGHBORS:
            values = self._compared(rule)
        elif rule.name == "batch" and rule.arguments["of"] == "task":
            values = self._over_documents(rule, scores)
        else:
            values = self._shifted(rule, scores)
        for instance in self.task._instances or []:
            instance.filtered_resps[str(rule)] = instance.resps[0]
        for document, instances in self.queries.documents.items():
            for instance, value in zip(instances, values[document], strict=True):
                instance.filtered_resps[str(rule)] = Decided.by(rule, float(value), instance.resps[0][1])

    def _shifted(self, rule: Rule, scores: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The documents' scores shifted by those of the rule's queries behind the same context."""
        values: dict[int, np.ndarray] = {}
        for group in self.queries.groups[str(rule)]:
            of_queries = [self.queries.prompts[group.place, query] for query in group.queries]
            of_rule = np.stack([_scores([requests[option] for option in group.options]) for requests in of_queries])
            of_documents = np.stack([scores[document] for document in group.documents])
            if rule.name == "batch":
                group.constants = decisions.log_mean_exp(decisions.log_normalized(of_rule))
                shifted = decisions.batch(of_documents, of=of_rule, by=rule.arguments["by"])
            elif rule.name in ("pmi", "dcpmi"):
                group.constants, shifted = of_rule[0], decisions.pmi(of_documents, of_rule[0])
            else:
                group.constants, shifted = decisions.log_mean_exp(of_rule), decisions.contextual(of_documents, of_rule)
            values |= dict(zip(group.documents, shifted, strict=True))
        return values

    def _compared(self, rule: Rule) -> dict[int, np.ndarray]:
        """The values of a rule that compares documents with labeled rows. The rows are read behind each context anew,
        and each document alone: its value is the same in whichever process and beside whichever others it is."""
        runner, values = self.model.runner, dict[int, np.ndarray]()
        before = runner.tokens_run
        for group in self.queries.groups[str(rule)]:
            classes = {"labels": group.labels, "classes": len(group.options)}
            classes |= {"k": rule.arguments["k"]} if rule.name == "knn" else {}
            anchors = self._read(rule, group.place, group.queries)
            for start in range(0, len(group.documents), _AT_ONCE):
                numbers = group.documents[start : start + _AT_ONCE]
                queries = [str(self.queries.documents[number][0].args[0].query) for number in numbers]
                states = np.concatenate([self._read(rule, group.place, [query]) for query in queries])
                values |= zip(numbers, getattr(decisions, rule.name)(states, anchors, **classes), strict=True)
        self._tokens_run[str(rule)] = runner.tokens_run - before
        return values

    def _read(self, rule: Rule, place: Behind, queries: Sequence[str]) -> np.ndarray:
        """(n, d) the hidden states of queries' last tokens, or (n, V) the log-probabilities of the next token."""
        option = str(next(iter(self.queries.documents.values()))[0].args[1])
        requests = [self.queries.fitting(self.queries.alone(place, query, option)) for query in queries]
        context = requests[0].prompt.context
        asked = {request.prompt.query: [request.answer[:1]] for request in requests}
        runner = self.model.runner
        with runner.inference_mode(), query_states(runner.model, log_probs=rule.name == "knn") as states:
            for _ in runner.score({context: asked}):
                pass
        of_queries = [request.prompt.query for request in requests]
        # Where a query ran in one pass with its context, its tokens are behind the context's.
        at = [query if query in states else (*context.tokens, *query) for query in of_queries]
        return np.stack([states[query].double().numpy() for query in at])

    def _over_documents(self, rule: Rule, scores: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Over the documents of all processes, in their order: the same bits however many processes there are."""
        every = {document: row for share in of_all(dict(scores)) for document, row in share.items()}
        numbers = sorted(every)
        stacked = np.stack([every[number] for number in numbers])
        constants = decisions.log_mean_exp(decisions.log_normalized(stacked))
        options = options_of(next(iter(self.queries.documents.values())))
        self.queries.facts[str(rule)] |= {"options": list(options), "constants": constants.tolist()}
        values = decisions.batch(stacked, by=rule.arguments["by"])
        return {number: row for number, row in zip(numbers, values, strict=True) if number in scores}

    def record(self, limit: float | None, samples: Sequence[int] | None) -> dict[str, Any]:
        """What the results say of each rule. Every process calls this."""
        rows = {number: as_row(instances[0].doc) for number, instances in self.queries.documents.items()}
        every = {number: row for share in of_all(rows) for number, row in share.items()}
        digest = hashlib.sha256(json.dumps([every[number] for number in sorted(every)]).encode()).hexdigest()
        return {
            str(rule): {
                "rule": rule.name,
                "arguments": {name: list(v) if isinstance(v, tuple) else v for name, v in rule.arguments.items()},
                "transductive": rule.is_transductive,
                "documents": len(every),
                "documents_sha256": digest,
                "limit": limit,
                "samples": None if samples is None else len(samples),
                **self._of_queries(rule),
                **self.queries.facts[str(rule)],
            }
            for rule in self.queries.rules
        }

    def _of_queries(self, rule: Rule) -> dict[str, Any]:
        """What a rule asked, what that cost in all processes, and the constants of the first document."""
        groups = self.queries.groups[str(rule)]
        prompts = dict.fromkeys((group.place, query) for group in groups for query in group.queries)
        places = len({place for place, _ in prompts})
        if rule.name in NEIGHBORS:  # each document is read once more
            asked = sum(len(group.queries) + len(group.documents) for group in groups)
            cost = (len(groups), asked, self._tokens_run[str(rule)])
        else:
            cost = (places, len(prompts), sum(self._tokens(self.queries.prompts[prompt]) for prompt in prompts))
        # Processes that share every pass (tensor parallelism) ask everything together.
        costs = of_all(cost) if getattr(self.model, "world_size", 1) > 1 else [cost]
        totals = map(sum, zip(*costs, strict=True))
        said: dict[str, Any] = dict(zip(("contexts", "queries", "tokens"), totals, strict=True))
        if not groups or rule.name in NEIGHBORS:
            return said
        if rule.name != "batch":  # whose queries are documents
            said["texts"] = groups[0].queries
        if len({group.options for group in groups}) == 1:
            constants = np.stack([group.constants for group in groups])
            said |= {"options": list(groups[0].options), "constants": constants[0].tolist()}
            if len(groups) > 1:
                said |= {"lowest": constants.min(0).tolist(), "highest": constants.max(0).tolist()}
        return said

    def _tokens(self, requests: Mapping[str, Instance]) -> int:
        """How many tokens a query takes: behind a memory its own and its options', otherwise all of each prompt."""
        count = 0
        for i, instance in enumerate(requests.values()):
            if isinstance(self.model, ICLModel):
                [request] = self.model.tokenize([instance])
                count += (0 if i else len(request.prompt.query)) + request.answer_positions
            elif isinstance(self.model, TemplateLM):
                count += sum(map(len, self.model._encode_pair(*instance.args))) - 1
        return count


def _scores(instances: Iterable[Instance]) -> np.ndarray:
    scores = np.array([float(instance.resps[0][0]) for instance in instances], dtype=np.float64)
    if not all(map(math.isfinite, scores)):
        raise InputError("decide: the model gave an option a log-probability of NaN or infinity.")
    return scores
