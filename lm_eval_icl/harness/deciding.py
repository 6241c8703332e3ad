"""Decision rules in a run of lm-eval: `--metadata decide=contextual+batch`, for every model.

A rule is one more filter of a task: `acc,none` is still the model's accuracy, and `acc,contextual` is the accuracy with
the rule, of the same run and the same samples. The queries that a rule needs besides the documents are requests of the
task like any other. Their document numbers are below 0, which no metric looks up. They are packed with the documents
that have the same memory, and a response cache stores them too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask, Task

from lm_eval_icl.decisions.how import read
from lm_eval_icl.decisions.rule import Comparison, Rule, Shift
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.distributed import from_all
from lm_eval_icl.harness.fitting import give_rows
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.rule_queries import PromptStart, RuleQueries, few_shot_seed, options_of
from lm_eval_icl.harness.tasks import label_of, why_no_options
from lm_eval_icl.inference.scoring import States
from lm_eval_icl.methods.several import Several

_AT_ONCE = 64  # documents compared with labeled rows at once, each by the log-probabilities of the whole vocabulary
# Metrics that mean nothing with the values of any rule; and with values that are not log-probabilities.
_OF_RAW = {"acc_mutual_info"}
_OF_LOGS = {"acc_norm", "acc_bytes", "brier_score", "likelihood"}
# A document's number -> (C,) the log-likelihoods of its options.
Scores = Mapping[int, np.ndarray]
AnyRule = TypeVar("AnyRule", bound=Rule)


@dataclass(eq=False)
class Group:
    """Documents whose decisions need the same queries, since they have the same context and the same options.

    Attributes:
        start: the prefix and the demonstrations before the queries.
        queries: the queries.
        options: the continuations that are scored.
        documents: the documents' numbers.
        labels: the classes of the queries, if these are labeled rows.
    """

    start: PromptStart
    queries: list[str]
    options: tuple[str, ...]
    documents: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


class RuleFilter(ABC, Generic[AnyRule]):
    """A rule in one run of a task, in the place of a filter ensemble of lm-eval.

    Attributes:
        groups: the documents, grouped by the queries that the rule needs.
        facts: facts about the rule for the results file, such as the constants for the first context.
    """

    queries: RuleQueries

    def __init__(self, rule: AnyRule) -> None:
        self.rule, self.name = rule, str(rule)
        self.groups: list[Group] = []
        self.facts: dict[str, Any] = {}

    def apply(self, instances: Sequence[Instance]) -> None:
        """Add the rule's values to the instances, as the responses under the rule's name."""
        documents = self.queries.documents
        values = self.values(
            {document: _scores(requests) for document, requests in documents.items()}
        )
        for instance in instances:
            instance.filtered_resps[self.name] = instance.resps[0]
        for document, requests in documents.items():
            for instance, value in zip(requests, values[document], strict=True):
                instance.filtered_resps[self.name] = (float(value), instance.resps[0][1])

    @abstractmethod
    def ask(self) -> None:
        """Make the rule's requests. Raises an `InputError` if the rule does not fit the task."""

    @abstractmethod
    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """Document -> (C,) the values of its options under the rule, from the log-likelihoods `scores`."""


class DocumentShiftFilter(RuleFilter[Shift]):
    """A rule that shifts log-likelihoods by those of all documents of the task, and needs no other queries."""

    def ask(self) -> None:
        if sum(from_all(len(self.queries.documents))) < 2:
            raise InputError(
                "the mean over one document is the document itself: raise --limit, or give of=pool."
            )

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """The values, from the sorted documents of all processes, so that the number of processes changes no bit."""
        rows = {
            document: row for share in from_all(dict(scores)) for document, row in share.items()
        }
        numbers = sorted(rows)
        stacked = np.stack([rows[number] for number in numbers])
        options = options_of(next(iter(self.queries.documents.values())))
        self.facts = {"options": list(options), "constants": self.rule.constants(stacked).tolist()}
        values = self.rule.values(stacked, stacked)
        return {
            number: row for number, row in zip(numbers, values, strict=True) if number in scores
        }


class ShiftFilter(RuleFilter[Shift]):
    """A rule that shifts a document's log-likelihoods by those of queries after the same demonstrations."""

    def ask(self) -> None:
        rule, queries = self.rule, self.queries
        if rule.bare and queries.arguments.get("apply_chat_template"):
            raise InputError(
                "its premise is a text without messages: leave --apply_chat_template out."
            )
        texts: dict[Any, list[str]] = {}
        groups: dict[Any, Group] = {}
        for document, instances in queries.documents.items():
            doc, start = instances[0].doc, ("", ()) if rule.bare else queries.starts[document]
            # In most tasks, all documents have the same content-free query, and it is made once.
            key = queries.signature(doc) if rule.by_document else start
            if key not in texts:
                texts[key] = rule.queries(queries, doc, start, self.facts)
            options = options_of(instances)
            if (start, key, options) not in groups:
                groups[start, key, options] = Group(start, texts[key], options)
                for query in texts[key]:
                    queries.ask(start, query, options)
            groups[start, key, options].documents.append(document)
        self.groups = list(groups.values())
        if self.groups and rule.by_document:  # otherwise the queries are documents
            self.facts["texts"] = self.groups[0].queries

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        values = dict[int, np.ndarray]()
        for group in self.groups:
            by_query = [self.queries.prompts[group.start, query] for query in group.queries]
            query_scores = np.stack(
                [_scores([requests[option] for option in group.options]) for requests in by_query]
            )
            document_scores = np.stack([scores[document] for document in group.documents])
            if group is self.groups[0]:
                self.facts |= {
                    "options": list(group.options),
                    "constants": self.rule.constants(query_scores).tolist(),
                }
            values |= zip(
                group.documents, self.rule.values(document_scores, query_scores), strict=True
            )
        return values


class ComparisonFilter(RuleFilter[Comparison]):
    """A rule that compares documents with labeled rows, by the model's state before any option."""

    def ask(self) -> None:
        rule, queries, model = self.rule, self.queries, self.queries.model
        if not isinstance(model, ICLModel):
            raise InputError(
                "needs hidden states or log-probabilities of all tokens: take a model of this package (--model icl "
                f"gives the same as hf), or leave {rule.name} out."
            )
        method = model.method
        if method.memory_depends_on_query or isinstance(method, Several):
            raise InputError(
                f"a query has no single state under {method.name} with this model: leave {rule.name} out."
            )
        options = options_of(next(iter(queries.documents.values())))
        groups: dict[PromptStart, Group] = {}
        for document, start in queries.starts.items():
            if start not in groups:
                groups[start] = self._labeled(start, options)
            queries.fitting(
                queries.alone(start, queries.documents[document][0].args[0].query, options[0])
            )
            groups[start].documents.append(document)
        self.groups = list(groups.values())
        self.facts |= {"seed": queries.seed, "labels": rule.m * len(options)}

    def _labeled(self, start: PromptStart, options: tuple[str, ...]) -> Group:
        """m labeled few-shot documents of each class, as queries after the demonstrations of `start`."""
        queries, m = self.queries, self.rule.m
        group, rows, missing = Group(start, [], options), list[int](), [m] * len(options)
        for row, query in queries.drawn(self.rule.name, start):
            if (label := label_of(queries.task, queries.pool[row])) is None:
                target = queries.task.doc_to_target(queries.pool[row])
                raise InputError(f"a few-shot document has no class among its options: {target!r}.")
            if missing[label]:
                missing[label] -= 1
                rows.append(row)
                group.queries.append(query)
                group.labels.append(label)
            if not any(missing):
                break
        if most := max(missing):
            raise InputError(
                f"m={m}: only {m - most} few-shot documents of the class {options[missing.index(most)]!r} are neither "
                "demonstrations nor evaluated: lower m."
            )
        self.facts.setdefault("rows", rows)
        for query in group.queries:
            queries.fitting(queries.alone(start, query, options[0]))
        return group

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        values = dict[int, np.ndarray]()
        for group in self.groups:
            labels, anchors = np.array(group.labels), self._states(group.start, group.queries)
            for first in range(0, len(group.documents), _AT_ONCE):
                numbers = group.documents[first : first + _AT_ONCE]
                queries = [
                    str(self.queries.documents[number][0].args[0].query) for number in numbers
                ]
                states = self._states(group.start, queries)
                values |= zip(
                    numbers,
                    self.rule.values(states, anchors, labels, len(group.options)),
                    strict=True,
                )
        return values

    def _states(self, start: PromptStart, queries: Sequence[str]) -> np.ndarray:
        """(n, d) the hidden states of n queries' last tokens, or (n, V) the log-probabilities of their next tokens."""
        option = self.groups[0].options[0]
        requests = [
            self.queries.fitting(self.queries.alone(start, query, option)) for query in queries
        ]
        context, runner = requests[0].prompt.context, self.queries.model.runner
        answers = {request.prompt.query: [request.answer[:1]] for request in requests}
        kind: States = "log_probs" if self.rule.reads_log_probs else "hidden"
        states: dict[tuple[int, ...], np.ndarray] = {}
        with runner.inference_mode():
            for pairs, scores in runner.score({context: answers}, states=kind):
                states |= {
                    query: s.double().numpy()
                    for (_, query, _), s in zip(pairs, scores.states, strict=True)
                }
        return np.stack([states[request.prompt.query] for request in requests])


def rule_filter(rule: Rule) -> RuleFilter[Any]:
    if isinstance(rule, Comparison):
        return ComparisonFilter(rule)
    assert isinstance(rule, Shift)
    return ShiftFilter(rule) if rule.asks else DocumentShiftFilter(rule)


def _scores(instances: Iterable[Instance]) -> np.ndarray:
    """(C,) the log-likelihoods of a document's options."""
    scores = np.array([float(instance.resps[0][0]) for instance in instances], dtype=np.float64)
    if not all(map(math.isfinite, scores)):
        raise InputError("decide: the model gave an option a log-probability of NaN or infinity.")
    return scores


def give_rules(task: Any, model: Any) -> bool:
    """Give a task the decision rules that its metadata name, as filters for runs of this model.

    Returns:
        Whether the task was given rules now. A task that already has its rules keeps them.

    Raises:
        InputError: a rule cannot be used with the task.
    """
    is_fitted = isinstance(model, ICLModel) and model.method.rows_wanted
    task.fitted_model = model if is_fitted else None
    metadata = task.config.metadata or {}
    if "decide" not in metadata or is_deciding(task):
        return False
    with naming(f"task {task.config.task!r}"):
        rules = read(metadata["decide"])
    check_options(task, rules)
    task.deciding = Deciding(rules, model, few_shot_seed(task))
    task._filters = [*task._filters, *task.deciding.filters]
    return True


def is_deciding(task: Any) -> bool:
    return isinstance(getattr(task, "deciding", None), Deciding)


def check_options(task: Task, rules: Sequence[Rule]) -> None:
    """Raise an `InputError` if a task has no options to decide among, or a decision of its own."""
    if why := why_no_options(task):
        raise InputError(
            f"task {str(task.config.task)!r}: decide={'+'.join(map(str, rules))}: {why}"
        )


def with_queries(original: Callable[..., None], task: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.build_all_requests`: add the requests of a task's decision rules. A task of a study,
    whose requests are already made (`requests_are_made`), keeps its requests."""
    with recording() if is_deciding(task) else nullcontext():
        if not getattr(task, "requests_are_made", False):
            original(task, **kwargs)
    names = ("system_instruction", "apply_chat_template", "fewshot_as_multiturn", "chat_template")
    arguments = {name: kwargs[name] for name in names if name in kwargs}
    if (model := getattr(task, "fitted_model", None)) is not None:
        give_rows(task, model, arguments)
    if not is_deciding(task):
        return
    # A study builds the requests of a task once, and evaluates them several times.
    if task._instances is not task.deciding.instances:
        task.deciding.ask(task, arguments)


def meaningless(rule: Rule) -> set[str]:
    """The metrics that mean nothing with the values of a rule, and are not reported."""
    return _OF_RAW | (set() if rule.is_logarithmic else _OF_LOGS)


def take_rules(task: Any) -> None:
    """Take away the rules that a task was given."""
    del task._filters[-len(task.deciding.filters) :], task.deciding


def record(ruled: Mapping[str, Deciding], results: dict[str, Any]) -> None:
    """Add facts about each task's rules to the results, under the task's metadata. Metrics that mean nothing with a
    rule's values are removed."""
    for name, deciding in ruled.items():
        config = results["configs"][name]
        config["metadata"] = {**(config.get("metadata") or {}), "decided": deciding.record()}
        without = {rule.name: meaningless(rule.rule) for rule in deciding.filters}
        for values in (*results["results"].values(), *results.get("groups", {}).values()):
            for key in list(values):
                metric, _, filter_name = key.partition(",")
                if metric.removesuffix("_stderr") in without.get(filter_name, ()):
                    del values[key]
        for sample in results.get("samples", {}).get(name, ()):
            for metric in without.get(sample["filter"], set()) & set(sample["metrics"]):
                sample["metrics"].remove(metric)
                del sample[metric]


class Deciding:
    """The decisions of a task's rules in one run.

    Args:
        model: the model that is evaluated.
        seed: the seed of the rules' random draws.

    Attributes:
        filters: the rules.
        instances: the task's requests and the requests of the rules; None before they are made.
        queries: the queries of the documents and of the rules.
    """

    queries: RuleQueries

    def __init__(self, rules: Sequence[Rule], model: Any, seed: int) -> None:
        self.filters = [rule_filter(rule) for rule in rules]
        self.model = model
        self.seed = seed
        self.instances: list[Instance] | None = None

    def ask(self, task: ConfigurableTask, arguments: Mapping[str, Any]) -> None:
        """Add the queries of all rules to a task's requests.

        Args:
            arguments: as for `RuleQueries`.

        Raises:
            InputError: a rule does not fit the task, or a query does not fit the model.
        """
        self.queries = queries = RuleQueries(task, self.model, arguments, self.seed)
        for rule in self.filters:
            rule.queries = queries
            with naming(f"task {queries.name!r}: decide={rule.name}"):
                if rule.rule.fixed_options:
                    queries.check_fixed_options(rule.rule.fixed_options)
                rule.ask()
        task._instances = self.instances = queries.instances

    def record(self) -> dict[str, Any]:
        """The facts about each rule for the results file, by the rule's name."""
        return {
            applied.name: {
                "rule": applied.rule.name,
                "arguments": applied.rule.arguments,
                "transductive": applied.rule.is_transductive,
                **applied.facts,
            }
            for applied in self.filters
        }
