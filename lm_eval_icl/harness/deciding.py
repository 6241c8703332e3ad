"""Decision rules in a run of lm-eval: `--metadata decide=contextual+batch`, for every model.

A rule is one more filter of a task: `acc,none` stays what the model says, and `acc,contextual` stands beside it, of the
same run and the same samples. The queries that a rule asks besides the documents' are requests of the task like any
other, with document numbers below 0, which no metric looks up: they are packed with the documents behind the same
memory, and have keys of their own in a response cache.
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
from lm_eval_icl.harness.distributed import of_all
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.rule_queries import Behind, RuleQueries, options_of
from lm_eval_icl.harness.tasks import label_of
from lm_eval_icl.inference.scoring import States
from lm_eval_icl.methods.several import Several

_AT_ONCE = 64  # documents that are compared with labeled rows at once: their log-probabilities are of all tokens
# Metrics that mean nothing with the values of any rule; and with values that are no log-probabilities.
_OF_RAW = {"acc_mutual_info"}
_OF_LOGS = {"acc_norm", "acc_bytes", "brier_score", "likelihood"}
# A document's number -> (C,) a number for each option.
Scores = Mapping[int, np.ndarray]
Of = TypeVar("Of", bound=Rule)


@dataclass(eq=False)
class Group:
    """Documents whose decisions need the same queries: those of one context with the same options.

    Attributes:
        place: what the queries stand behind.
        queries: the queries.
        options: the continuations that are scored.
        documents: the documents' numbers.
        labels: the classes of the queries, where these are labeled rows.
    """

    place: Behind
    queries: list[str]
    options: tuple[str, ...]
    documents: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


class RuleFilter(ABC, Generic[Of]):
    """A rule in one run of a task, as an ensemble of filters of lm-eval's.

    Attributes:
        groups: the documents by the queries that the rule asks.
        facts: what the results say of the rule, such as the constants behind the first context.
    """

    queries: RuleQueries

    def __init__(self, rule: Of) -> None:
        self.rule, self.name = rule, str(rule)
        self.groups: list[Group] = []
        self.facts: dict[str, Any] = {}

    def apply(self, instances: Sequence[Instance]) -> None:
        """Put the rule's values beside the model's."""
        documents = self.queries.documents
        values = self.values({document: _scores(of_document) for document, of_document in documents.items()})
        for instance in instances:
            instance.filtered_resps[self.name] = instance.resps[0]
        for document, of_document in documents.items():
            for instance, value in zip(of_document, values[document], strict=True):
                instance.filtered_resps[self.name] = (float(value), instance.resps[0][1])

    @abstractmethod
    def ask(self) -> None:
        """Make the rule's requests, or refuse a task that it does not fit."""

    @abstractmethod
    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """The values of the documents' options, from their log-likelihoods."""


class OverDocuments(RuleFilter[Shift]):
    """A shift by the documents of the task themselves, which asks nothing."""

    def ask(self) -> None:
        if sum(of_all(len(self.queries.documents))) < 2:
            raise InputError("the mean over one document is the document itself: raise --limit, or give of=pool.")

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """Over the documents of all processes, in their order: the same bits however many processes there are."""
        rows = {document: row for share in of_all(dict(scores)) for document, row in share.items()}
        numbers = sorted(rows)
        stacked = np.stack([rows[number] for number in numbers])
        options = options_of(next(iter(self.queries.documents.values())))
        self.facts = {"options": list(options), "constants": self.rule.constants(stacked).tolist()}
        values = self.rule.values(stacked, stacked)
        return {number: row for number, row in zip(numbers, values, strict=True) if number in scores}


class Shifted(RuleFilter[Shift]):
    """A rule that shifts a document's log-likelihoods by those of queries behind the same context."""

    def ask(self) -> None:
        rule, queries = self.rule, self.queries
        if rule.bare and queries.arguments.get("apply_chat_template"):
            raise InputError("its premise is a text without messages: leave --apply_chat_template out.")
        texts: dict[Any, list[str]] = {}
        groups: dict[Any, Group] = {}
        for document, instances in queries.documents.items():
            doc, place = instances[0].doc, ("", ()) if rule.bare else queries.behind[document]
            # Of most tasks, all documents have the same content-free query, and it is made once.
            key = queries.signature(doc) if rule.by_document else place
            if key not in texts:
                texts[key] = rule.queries(queries, doc, place, self.facts)
            options = options_of(instances)
            if (place, key, options) not in groups:
                groups[place, key, options] = Group(place, texts[key], options)
                for query in texts[key]:
                    queries.ask(place, query, options)
            groups[place, key, options].documents.append(document)
        self.groups = list(groups.values())
        if self.groups and rule.by_document:  # otherwise they are documents
            self.facts["texts"] = self.groups[0].queries

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        values = dict[int, np.ndarray]()
        for group in self.groups:
            asked = [self.queries.prompts[group.place, query] for query in group.queries]
            of_rule = np.stack([_scores([requests[option] for option in group.options]) for requests in asked])
            of_documents = np.stack([scores[document] for document in group.documents])
            if group is self.groups[0]:
                self.facts |= {"options": list(group.options), "constants": self.rule.constants(of_rule).tolist()}
            values |= zip(group.documents, self.rule.values(of_documents, of_rule), strict=True)
        return values


class Compared(RuleFilter[Comparison]):
    """A rule that compares documents with labeled rows, by what the model says before any option."""

    def ask(self) -> None:
        rule, queries, model = self.rule, self.queries, self.queries.model
        if not isinstance(model, ICLModel):
            raise InputError(
                "needs more of a model than the log-probabilities of options: take a model of this package (--model "
                f"icl has those of hf), or leave {rule.name} out."
            )
        method = model.method
        if method.memory_depends_on_query or isinstance(method, Several) or model.runner.capabilities.no_memory:
            raise InputError(f"a query has no single state under {method.name} with this model: leave {rule.name} out.")
        options = options_of(next(iter(queries.documents.values())))
        groups: dict[Behind, Group] = {}
        for document, place in queries.behind.items():
            if place not in groups:
                groups[place] = self._labeled(place, options)
            queries.fitting(queries.alone(place, queries.documents[document][0].args[0].query, options[0]))
            groups[place].documents.append(document)
        self.groups = list(groups.values())
        self.facts |= {"seed": queries.seed, "labels": rule.m * len(options)}

    def _labeled(self, place: Behind, options: tuple[str, ...]) -> Group:
        """m labeled few-shot documents of each class behind a context."""
        queries, m = self.queries, self.rule.m
        group, rows, missing = Group(place, [], options), list[int](), [m] * len(options)
        for row, query in queries.drawn(self.rule.name, place):
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
            queries.fitting(queries.alone(place, query, options[0]))
        return group

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        values = dict[int, np.ndarray]()
        for group in self.groups:
            labels, anchors = np.array(group.labels), self._read(group.place, group.queries)
            for start in range(0, len(group.documents), _AT_ONCE):
                numbers = group.documents[start : start + _AT_ONCE]
                queries = [str(self.queries.documents[number][0].args[0].query) for number in numbers]
                states = self._read(group.place, queries)
                values |= zip(numbers, self.rule.values(states, anchors, labels, len(group.options)), strict=True)
        return values

    def _read(self, place: Behind, queries: Sequence[str]) -> np.ndarray:
        """(n, d) the hidden states of queries' last tokens, or (n, V) the log-probabilities of the next token."""
        option = self.groups[0].options[0]
        requests = [self.queries.fitting(self.queries.alone(place, query, option)) for query in queries]
        context, runner = requests[0].prompt.context, self.queries.model.runner
        asked = {request.prompt.query: [request.answer[:1]] for request in requests}
        kind: States = "log_probs" if self.rule.reads_log_probs else "hidden"
        states: dict[tuple[int, ...], np.ndarray] = {}
        with runner.inference_mode():
            for pairs, scores in runner.score({context: asked}, states=kind):
                states |= {query: s.double().numpy() for (_, query, _), s in zip(pairs, scores.states, strict=True)}
        return np.stack([states[request.prompt.query] for request in requests])


def rule_filter(rule: Rule) -> RuleFilter[Any]:
    if isinstance(rule, Comparison):
        return Compared(rule)
    assert isinstance(rule, Shift)
    return Shifted(rule) if rule.asks else OverDocuments(rule)


def _scores(instances: Iterable[Instance]) -> np.ndarray:
    """(C,) the log-likelihoods of a document's options."""
    scores = np.array([float(instance.resps[0][0]) for instance in instances], dtype=np.float64)
    if not all(map(math.isfinite, scores)):
        raise InputError("decide: the model gave an option a log-probability of NaN or infinity.")
    return scores


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
    why: str = getattr(task, "own_decision", "")
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        why = why or "decides among options, which this task does not have: leave it out of --tasks."
    elif task.multiple_input:
        why = "every option of this task has a prompt of its own: leave it out of --tasks."
    if why:
        raise InputError(f"task {str(task.config.task)!r}: decide={'+'.join(map(str, rules))}: {why}")


def with_queries(original: Callable[..., None], task: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.build_all_requests`: those of a task's decision rules are added. A task whose
    requests are made (`requests_are_made`), as in a study, keeps them."""
    with recording() if is_deciding(task) else nullcontext():
        if not getattr(task, "requests_are_made", False):
            original(task, **kwargs)
    if not is_deciding(task):
        return
    # A study builds requests once, and evaluates them often.
    if task._instances is not task.deciding.instances:
        names = ("system_instruction", "apply_chat_template", "fewshot_as_multiturn", "chat_template")
        task.deciding.ask(task, {name: kwargs[name] for name in names if name in kwargs})


def meaningless(rule: Rule) -> set[str]:
    """The metrics that mean nothing with the values of a rule, and are not reported."""
    return _OF_RAW | (set() if rule.is_logarithmic else _OF_LOGS)


def take_rules(task: Any) -> None:
    """Take from a task the rules that it was given."""
    del task._filters[-len(task.deciding.filters) :], task.deciding


def record(ruled: Mapping[str, Deciding], results: dict[str, Any]) -> None:
    """Put what was decided into the results, under each task's metadata. Metrics that mean nothing with a rule's values
    are taken out."""
    for name, deciding in ruled.items():
        config = results["configs"][name]
        config["metadata"] = {**(config.get("metadata") or {}), "decided": deciding.record()}
        without = {rule.name: meaningless(rule.rule) for rule in deciding.filters}
        for values in (*results["results"].values(), *results.get("groups", {}).values()):
            for key in list(values):
                metric, _, of_filter = key.partition(",")
                if metric.removesuffix("_stderr") in without.get(of_filter, ()):
                    del values[key]
        for sample in results.get("samples", {}).get(name, ()):
            for metric in without.get(sample["filter"], set()) & set(sample["metrics"]):
                sample["metrics"].remove(metric)
                del sample[metric]


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

    def record(self) -> dict[str, Any]:
        """What the results say of each rule."""
        return {
            applied.name: {
                "rule": applied.rule.name,
                "arguments": applied.rule.arguments,
                "transductive": applied.rule.is_transductive,
                **applied.facts,
            }
            for applied in self.filters
        }
