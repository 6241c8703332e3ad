"""The decision rules of a task in a run, each as a filter of lm-eval's.

The queries that a rule needs besides the documents are requests of the task like any other. Their
document numbers are below 0, which no metric looks up. They are packed with the documents that have
the same memory, and a response cache stores them too.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.decisions.rule import Comparison, Rule, Shift
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.distributed import from_all
from lm_eval_icl.harness.documents import label_of
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.private_names import set_requests
from lm_eval_icl.harness.rule_queries import PromptStart, RuleQueries, options_of
from lm_eval_icl.inference.scoring import States
from lm_eval_icl.methods.several import Several

# How many documents are compared with labeled rows at once, each by the log-probabilities of the
# whole vocabulary.
_AT_ONCE = 64
# A document's number -> (C,) the log-likelihoods of its options.
Scores = Mapping[int, np.ndarray]
AnyRule = TypeVar("AnyRule", bound=Rule)


class RulesOfTask:
    """The decision rules of a task in one run.

    Args:
        model: the model that is evaluated.
        seed: the seed of the rules' random draws.

    Attributes:
        filters: the rules, each as a filter.
        instances: the requests of the task and of the rules; None before they are made.
    """

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
        queries = RuleQueries(task, self.model, arguments, self.seed)
        for applied in self.filters:
            applied.queries = queries
            with naming(f"task {queries.name!r}: decide={applied.name}"):
                if applied.rule.fixed_options:
                    queries.check_fixed_options(applied.rule.fixed_options)
                applied.ask()
        self.instances = queries.instances
        set_requests(task, self.instances)

    def record(self) -> dict[str, Any]:
        """The facts about each rule for the results file, by the rule's name."""
        facts: dict[str, Any] = {}
        for applied in self.filters:
            rule = applied.rule
            facts[applied.name] = {
                "rule": rule.name,
                "arguments": rule.arguments,
                "transductive": rule.is_transductive,
                **applied.facts,
            }
        return facts


@dataclass(eq=False)
class Group:
    """Documents whose decisions need the same queries, since they have the same context and the
    same options.

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
    """A rule in one run of a task, in the place of a filter ensemble of lm-eval's.

    Attributes:
        queries: the queries of the documents and of the rules.
        groups: the documents, grouped by the queries that the rule needs.
        facts: facts about the rule for the results file, such as the constants for the first
            context.
    """

    queries: RuleQueries

    def __init__(self, rule: AnyRule) -> None:
        self.rule = rule
        self.name = str(rule)
        self.groups: list[Group] = []
        self.facts: dict[str, Any] = {}

    def apply(self, instances: Sequence[Instance]) -> None:
        """Add the rule's values to the instances, as the responses under the rule's name."""
        documents = self.queries.documents
        scores = {document: _scores(requests) for document, requests in documents.items()}
        values = self.values(scores)
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
        """Document -> (C,) the values of its options under the rule, from the log-likelihoods
        `scores`."""


class DocumentShiftFilter(RuleFilter[Shift]):
    """A rule that shifts log-likelihoods by those of all documents of the task, and needs no other
    queries."""

    def ask(self) -> None:
        if sum(from_all(len(self.queries.documents))) < 2:
            raise InputError(
                "the mean over one document is the document itself: raise --limit, or give of=pool."
            )

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """The values, from the sorted documents of all processes, so that the number of processes
        changes no bit."""
        rows: dict[int, np.ndarray] = {}
        for share in from_all(dict(scores)):
            rows |= share
        numbers = sorted(rows)
        stacked = np.stack([rows[number] for number in numbers])
        options = options_of(next(iter(self.queries.documents.values())))
        self.facts = {"options": list(options), "constants": self.rule.constants(stacked).tolist()}
        values = dict(zip(numbers, self.rule.values(stacked, stacked), strict=True))
        return {number: values[number] for number in scores}


class ShiftFilter(RuleFilter[Shift]):
    """A rule that shifts a document's log-likelihoods by those of queries after the same
    demonstrations."""

    def ask(self) -> None:
        rule = self.rule
        queries = self.queries
        if rule.bare and queries.arguments.get("apply_chat_template"):
            raise InputError(
                "its premise is a text without messages: leave --apply_chat_template out."
            )
        texts: dict[Any, list[str]] = {}
        groups: dict[Any, Group] = {}
        for document, instances in queries.documents.items():
            doc = instances[0].doc
            start: PromptStart = ("", ()) if rule.bare else queries.starts[document]
            # In most tasks, all documents have the same content-free query, and it is made once.
            key = queries.signature(doc) if rule.by_document else start
            if key not in texts:
                texts[key] = rule.queries(queries, doc, start, self.facts)
            options = options_of(instances)
            group = groups.get((start, key, options))
            if group is None:
                group = groups[start, key, options] = Group(start, texts[key], options)
                for query in texts[key]:
                    queries.ask(start, query, options)
            group.documents.append(document)
        self.groups = list(groups.values())
        if self.groups and rule.by_document:  # otherwise the queries are documents
            self.facts["texts"] = self.groups[0].queries

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        values = dict[int, np.ndarray]()
        for group in self.groups:
            by_query = []
            for query in group.queries:
                requests = self.queries.prompts[group.start, query]
                by_query.append(_scores([requests[option] for option in group.options]))
            query_scores = np.stack(by_query)
            document_scores = np.stack([scores[document] for document in group.documents])
            if group is self.groups[0]:
                self.facts["options"] = list(group.options)
                self.facts["constants"] = self.rule.constants(query_scores).tolist()
            shifted = self.rule.values(document_scores, query_scores)
            values |= zip(group.documents, shifted, strict=True)
        return values


class ComparisonFilter(RuleFilter[Comparison]):
    """A rule that compares documents with labeled rows, by the model's state before any option."""

    def ask(self) -> None:
        rule = self.rule
        queries = self.queries
        if not isinstance(queries.model, ICLModel):
            raise InputError(
                "needs hidden states or log-probabilities of all tokens: take a model of this "
                f"package (--model icl gives the same as hf), or leave {rule.name} out."
            )
        method = queries.model.method
        if method.memory_depends_on_query or isinstance(method, Several):
            raise InputError(
                f"a query has no single state under {method.name} with this model: leave "
                f"{rule.name} out."
            )
        options = options_of(next(iter(queries.documents.values())))
        groups: dict[PromptStart, Group] = {}
        for document, start in queries.starts.items():
            if start not in groups:
                groups[start] = self._labeled(start, options)
            query = queries.documents[document][0].args[0].query
            queries.request(start, query, options[0])  # refuses one that does not fit
            groups[start].documents.append(document)
        self.groups = list(groups.values())
        self.facts |= {"seed": queries.seed, "labels": rule.m * len(options)}

    def _labeled(self, start: PromptStart, options: tuple[str, ...]) -> Group:
        """m labeled few-shot documents of each class, as queries after the demonstrations of
        `start`."""
        queries = self.queries
        m = self.rule.m
        group = Group(start, [], options)
        count = group.labels.count
        rows = list[int]()
        for row, query in queries.drawn(self.rule.name, start):
            label = label_of(queries.task, queries.pool[row])
            if label is None:
                target = queries.task.doc_to_target(queries.pool[row])
                raise InputError(f"a few-shot document has no class among its options: {target!r}.")
            if count(label) < m:
                rows.append(row)
                group.queries.append(query)
                group.labels.append(label)
            if len(rows) == m * len(options):
                break
        rarest = min(range(len(options)), key=count)
        if count(rarest) < m:
            raise InputError(
                f"m={m}: only {count(rarest)} few-shot documents of the class {options[rarest]!r} "
                "are neither demonstrations nor evaluated: lower m."
            )
        self.facts.setdefault("rows", rows)
        for query in group.queries:
            queries.request(start, query, options[0])  # refuses one that does not fit
        return group

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        values = dict[int, np.ndarray]()
        for group in self.groups:
            labels = np.array(group.labels)
            anchors = self._states(group.start, group.queries)
            classes = len(group.options)
            for first in range(0, len(group.documents), _AT_ONCE):
                numbers = group.documents[first : first + _AT_ONCE]
                requests = [self.queries.documents[number][0] for number in numbers]
                states = self._states(group.start, [str(one.args[0].query) for one in requests])
                compared = self.rule.values(states, anchors, labels, classes)
                values |= zip(numbers, compared, strict=True)
        return values

    def _states(self, start: PromptStart, queries: Sequence[str]) -> np.ndarray:
        """(n, d) the hidden states of n queries' last tokens, or (n, V) the log-probabilities of
        their next tokens."""
        option = self.groups[0].options[0]
        requests = [self.queries.request(start, query, option) for query in queries]
        context = requests[0].prompt.context
        runner = self.queries.model.runner
        answers = {request.prompt.query: [request.answer[:1]] for request in requests}
        kind: States = "log_probs" if self.rule.reads_log_probs else "hidden"
        states: dict[tuple[int, ...], np.ndarray] = {}
        with runner.inference_mode():
            for pairs, scores in runner.score({context: answers}, states=kind):
                for (_, query, _), state in zip(pairs, scores.states, strict=True):
                    states[query] = state.double().numpy()
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
