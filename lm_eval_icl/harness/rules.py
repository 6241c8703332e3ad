"""Decision rules as filters of a task: what each asks, the values that it gives, and what the results say of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from lm_eval_icl.decisions.rule import Comparison, Rule, Shift
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.distributed import of_all
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.rule_queries import Behind, RuleQueries, options_of
from lm_eval_icl.harness.tasks import label_of
from lm_eval_icl.inference.scoring import States
from lm_eval_icl.methods.several import Several

_AT_ONCE = 64  # documents that are compared with labeled rows at once: their log-probabilities are of all tokens
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


class Decided(tuple[Any, ...]):
    """A response (value, greedy) as a rule has it.

    Attributes:
        rule: the rule.
    """

    rule: Rule


class RuleFilter(ABC, Generic[Of]):
    """A rule in one run of a task, as an ensemble of filters of lm-eval's.

    Attributes:
        groups: the documents by the queries that the rule asks.
        facts: what the results say of the rule besides what it cost.
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
                response = Decided((float(value), instance.resps[0][1]))
                response.rule = self.rule
                instance.filtered_resps[self.name] = response

    @abstractmethod
    def ask(self) -> None:
        """Make the rule's requests, or refuse a task that it does not fit."""

    @abstractmethod
    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """The values of the documents' options, from their log-likelihoods."""

    def costs(self) -> tuple[int, int, int]:
        """The contexts, the queries and the tokens of what was asked in this process."""
        return 0, 0, 0

    def record(self) -> dict[str, Any]:
        """What the results say of what was asked in all processes, each of which calls this."""
        costs = [self.costs()]
        # Processes that share every pass (tensor parallelism) ask everything together.
        if getattr(self.queries.model, "world_size", 1) > 1:
            costs = of_all(costs[0])
        totals = map(sum, zip(*costs, strict=True))
        return {**dict(zip(("contexts", "queries", "tokens"), totals, strict=True)), **self.facts}


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
            key = queries.queries.signature(doc) if rule.by_document else place
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
        values, constants = dict[int, np.ndarray](), list[np.ndarray]()
        for group in self.groups:
            asked = [self.queries.prompts[group.place, query] for query in group.queries]
            of_rule = np.stack([_scores([requests[option] for option in group.options]) for requests in asked])
            of_documents = np.stack([scores[document] for document in group.documents])
            constants.append(self.rule.constants(of_rule))
            values |= zip(group.documents, self.rule.values(of_documents, of_rule), strict=True)
        if len({group.options for group in self.groups}) == 1:
            self.facts |= {"options": list(self.groups[0].options), "constants": constants[0].tolist()}
            if len(constants) > 1:
                lowest, highest = np.min(constants, axis=0), np.max(constants, axis=0)
                self.facts |= {"lowest": lowest.tolist(), "highest": highest.tolist()}
        return values

    def costs(self) -> tuple[int, int, int]:
        prompts = {(group.place, query) for group in self.groups for query in group.queries}
        tokens = sum(self._tokens(self.queries.prompts[prompt]) for prompt in prompts)
        return len({place for place, _ in prompts}), len(prompts), tokens

    def _tokens(self, requests: Mapping[str, Instance]) -> int:
        """How many tokens a query takes: behind a memory its own and its options', otherwise all of each prompt."""
        model, count = self.queries.model, 0
        for i, instance in enumerate(requests.values()):
            if isinstance(model, ICLModel):
                [request] = model.tokenize([instance])
                count += (0 if i else len(request.prompt.query)) + request.answer_positions
            elif isinstance(model, TemplateLM):
                count += sum(map(len, model._encode_pair(*instance.args))) - 1
        return count


class Compared(RuleFilter[Comparison]):
    """A rule that compares documents with labeled rows, by what the model says before any option."""

    _tokens_run = 0

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
        n = rule.m * len(options)
        self.facts |= {"seed": queries.seed, "pool": len(queries.pool), "labels": n}
        log.info("%s: %s compares with %d labeled documents behind %d contexts.", queries.name, rule, n, len(groups))

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
        if why := self.rule.why_not(len(rows)):
            raise InputError(why)
        self.facts.setdefault("rows", rows)
        for query in group.queries:
            queries.fitting(queries.alone(place, query, options[0]))
        return group

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """The rows are read behind each context anew, and each document alone: its value is the same in whichever
        process and beside whichever others it is."""
        runner, values = self.queries.model.runner, dict[int, np.ndarray]()
        before = runner.tokens_run
        for group in self.groups:
            labels, anchors = np.array(group.labels), self._read(group.place, group.queries)
            for start in range(0, len(group.documents), _AT_ONCE):
                numbers = group.documents[start : start + _AT_ONCE]
                queries = [str(self.queries.documents[number][0].args[0].query) for number in numbers]
                states = np.concatenate([self._read(group.place, [query]) for query in queries])
                values |= zip(numbers, self.rule.values(states, anchors, labels, len(group.options)), strict=True)
        self._tokens_run = runner.tokens_run - before
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

    def costs(self) -> tuple[int, int, int]:
        """Each document is read once more."""
        return len(self.groups), sum(len(g.queries) + len(g.documents) for g in self.groups), self._tokens_run


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
