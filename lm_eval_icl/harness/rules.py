"""Decision rules as filters of a task: what each asks, the values that it gives, and what the results say of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from lm_eval_icl import decisions
from lm_eval_icl.decisions.how import NEIGHBORS, Rule
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.distributed import of_all
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.rule_queries import Behind, RuleQueries, options_of
from lm_eval_icl.harness.tasks import label_of, texts_in
from lm_eval_icl.inference.scoring import query_states
from lm_eval_icl.methods.several import Several

_AT_ONCE = 64  # documents that are compared with labeled rows at once: their log-probabilities are of all tokens
# A document's number -> (C,) a number for each option.
Scores = Mapping[int, np.ndarray]


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


class RuleFilter(ABC):
    """A rule in one run of a task, as an ensemble of filters of lm-eval's.

    Attributes:
        groups: the documents by the queries that the rule asks.
        facts: what the results say of the rule besides what it cost.
    """

    queries: RuleQueries

    def __init__(self, rule: Rule) -> None:
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


class OverDocuments(RuleFilter):
    """`batch` over the documents of the task, which asks nothing."""

    def ask(self) -> None:
        self.queries.check_fixed_options("a mean over documents")

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """Over the documents of all processes, in their order: the same bits however many processes there are."""
        rows = {document: row for share in of_all(dict(scores)) for document, row in share.items()}
        numbers = sorted(rows)
        stacked = np.stack([rows[number] for number in numbers])
        constants = decisions.log_mean_exp(decisions.log_normalized(stacked))
        options = options_of(next(iter(self.queries.documents.values())))
        self.facts = {"options": list(options), "constants": constants.tolist()}
        values = decisions.batch(stacked, by=self.rule.arguments["by"])
        return {number: row for number, row in zip(numbers, values, strict=True) if number in scores}


class Shifted(RuleFilter):
    """A rule that shifts a document's log-likelihoods by those of queries behind the same context."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self._random_texts = cache(self._draw_texts)

    def ask(self) -> None:
        name, queries = self.rule.name, self.queries
        is_batch, has_premise = name == "batch", name in ("pmi", "dcpmi")
        if has_premise and queries.arguments.get("apply_chat_template"):
            raise InputError("its premise is a text without messages: leave --apply_chat_template out.")
        if is_batch:
            queries.check_fixed_options("a mean over documents")
        texts: dict[Any, list[str]] = {}
        groups: dict[Any, Group] = {}
        for document, instances in queries.documents.items():
            doc, place = instances[0].doc, ("", ()) if has_premise else queries.behind[document]
            # Of most tasks, all documents have the same content-free query, and it is made once.
            key = place if is_batch else queries.queries.signature(doc)
            if key not in texts:
                texts[key] = self._of_pool(place) if is_batch else self._texts(doc)
            options = options_of(instances)
            if (place, key, options) not in groups:
                groups[place, key, options] = Group(place, texts[key], options)
                for query in texts[key]:
                    queries.ask(place, query, options)
            groups[place, key, options].documents.append(document)
        self.groups = list(groups.values())
        if self.groups and not is_batch:  # whose queries are documents
            self.facts["texts"] = self.groups[0].queries

    def _texts(self, doc: Mapping[str, Any]) -> list[str]:
        """The queries for a document."""
        arguments, queries = self.rule.arguments, self.queries.queries
        if self.rule.name == "pmi":
            return [arguments["premise"]]
        if self.rule.name == "dcpmi":
            return [arguments["premise"] or queries.premise(doc)]
        texts: Sequence[Any] = arguments.get("texts", ())
        if self.rule.name == "domain":
            texts = self._random_texts(tuple(queries.read_by_template(doc)))
        rendered = [queries.content_free(doc, text) for text in texts]
        kept = [query for query in rendered if query.strip()]  # behind an empty one nothing can be scored
        if len(kept) < len(texts):
            empty = [text for text, query in zip(texts, rendered, strict=True) if not query.strip()]
            self.facts["texts_left_out"] = empty
        if not kept:
            raise InputError("all of its texts make an empty query: give others (texts=...).")
        return kept

    def _draw_texts(self, fields: tuple[str, ...]) -> list[dict[str, str]]:
        """n texts for each field that the query is made from, of words drawn from that field of the corpus: as many as
        its documents have on average, and one more (Fei et al. 2023; " ." ends each, as in the authors' code)."""
        is_transductive, seed = self.rule.arguments["of"] == "test", self.queries.seed
        corpus = list(self.queries.task.eval_docs if is_transductive else self.queries.pool.values())
        generator = np.random.RandomState(seed)
        texts: list[dict[str, str]] = [{} for _ in range(self.rule.arguments["n"])]
        for name in fields:
            words = [word for row in corpus for word in " ".join(texts_in(row.get(name))).lower().split()]
            if not words:
                raise InputError(f"the field {name!r} of the documents that words are drawn from has none.")
            size = len(words) // len(corpus) + 1
            for text in texts:
                text[name] = " ".join(words[i] for i in generator.randint(0, len(words), size=size)) + " ."
        self.facts |= {"seed": seed, "corpus": len(corpus)}
        return texts

    def _of_pool(self, place: Behind) -> list[str]:
        """The queries of m few-shot documents that are no demonstrations and not evaluated."""
        m, seed = self.rule.arguments["m"], self.queries.seed
        queries = [query for _, query in islice(self.queries.drawn("batch", place), m)]
        if len(queries) < m:
            raise InputError(
                f"m={m}: only {len(queries)} few-shot documents are neither demonstrations nor evaluated: lower m."
            )
        self.facts |= {"seed": seed, "pool": len(self.queries.pool)}
        return queries

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        name, values, constants = self.rule.name, dict[int, np.ndarray](), list[np.ndarray]()
        for group in self.groups:
            asked = [self.queries.prompts[group.place, query] for query in group.queries]
            of_rule = np.stack([_scores([requests[option] for option in group.options]) for requests in asked])
            of_documents = np.stack([scores[document] for document in group.documents])
            if name == "batch":
                subtracted = decisions.log_mean_exp(decisions.log_normalized(of_rule))
                shifted = decisions.batch(of_documents, of=of_rule, by=self.rule.arguments["by"])
            elif name in ("pmi", "dcpmi"):
                subtracted, shifted = of_rule[0], decisions.pmi(of_documents, of_rule[0])
            else:
                subtracted, shifted = decisions.log_mean_exp(of_rule), decisions.contextual(of_documents, of_rule)
            constants.append(subtracted)
            values |= zip(group.documents, shifted, strict=True)
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


class Compared(RuleFilter):
    """A rule that compares documents with labeled rows, by what the model says before any option (`NEIGHBORS`)."""

    _tokens_run = 0

    def ask(self) -> None:
        rule, queries, model = self.rule, self.queries, self.queries.model
        queries.check_fixed_options("a comparison of documents")
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
        n = rule.arguments["m"] * len(options)
        self.facts |= {"seed": queries.seed, "pool": len(queries.pool), "labels": n}
        log.info("%s: %s compares with %d labeled documents behind %d contexts.", queries.name, rule, n, len(groups))

    def _labeled(self, place: Behind, options: tuple[str, ...]) -> Group:
        """m labeled few-shot documents of each class behind a context."""
        queries, m = self.queries, self.rule.arguments["m"]
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
        if (k := self.rule.arguments.get("k", 1)) > len(rows):
            raise InputError(f"k={k}: there are {len(rows)} labeled documents: lower k.")
        self.facts.setdefault("rows", rows)
        for query in group.queries:
            queries.fitting(queries.alone(place, query, options[0]))
        return group

    def values(self, scores: Scores) -> dict[int, np.ndarray]:
        """The rows are read behind each context anew, and each document alone: its value is the same in whichever
        process and beside whichever others it is."""
        runner, values = self.queries.model.runner, dict[int, np.ndarray]()
        before, compare = runner.tokens_run, getattr(decisions, self.rule.name)
        for group in self.groups:
            classes = {"labels": group.labels, "classes": len(group.options)}
            classes |= {"k": self.rule.arguments["k"]} if self.rule.name == "knn" else {}
            anchors = self._read(group.place, group.queries)
            for start in range(0, len(group.documents), _AT_ONCE):
                numbers = group.documents[start : start + _AT_ONCE]
                queries = [str(self.queries.documents[number][0].args[0].query) for number in numbers]
                states = np.concatenate([self._read(group.place, [query]) for query in queries])
                values |= zip(numbers, compare(states, anchors, **classes), strict=True)
        self._tokens_run = runner.tokens_run - before
        return values

    def _read(self, place: Behind, queries: Sequence[str]) -> np.ndarray:
        """(n, d) the hidden states of queries' last tokens, or (n, V) the log-probabilities of the next token."""
        option = self.groups[0].options[0]
        requests = [self.queries.fitting(self.queries.alone(place, query, option)) for query in queries]
        context, runner = requests[0].prompt.context, self.queries.model.runner
        asked = {request.prompt.query: [request.answer[:1]] for request in requests}
        with runner.inference_mode(), query_states(runner.model, log_probs=self.rule.name == "knn") as states:
            for _ in runner.score({context: asked}):
                pass
        # Where a query ran in one pass with its context, its tokens are behind the context's.
        tokens = [request.prompt.query for request in requests]
        tokens = [query if query in states else (*context.tokens, *query) for query in tokens]
        return np.stack([states[query].double().numpy() for query in tokens])

    def costs(self) -> tuple[int, int, int]:
        """Each document is read once more."""
        return len(self.groups), sum(len(g.queries) + len(g.documents) for g in self.groups), self._tokens_run


def rule_filter(rule: Rule) -> RuleFilter:
    if rule.name in NEIGHBORS:
        return Compared(rule)
    return OverDocuments(rule) if rule.arguments.get("of") == "task" else Shifted(rule)


def _scores(instances: Iterable[Instance]) -> np.ndarray:
    """(C,) the log-likelihoods of a document's options."""
    scores = np.array([float(instance.resps[0][0]) for instance in instances], dtype=np.float64)
    if not all(map(math.isfinite, scores)):
        raise InputError("decide: the model gave an option a log-probability of NaN or infinity.")
    return scores
