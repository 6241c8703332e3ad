"""What decision rules ask besides the documents' own requests: content-free queries, premises, rows of the pool."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from random import Random
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.decisions.how import NEIGHBORS, Rule
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.content_free import Queries, texts_in
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import structure_error
from lm_eval_icl.harness.requests import fit_requests
from lm_eval_icl.harness.tasks import as_row, evaluated, pool_of
from lm_eval_icl.methods.limits import Request
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.prompt import FewShotPrompt

# A prompt's parts before its query: what one memory holds.
Behind = tuple[str, tuple[str, ...]]


@dataclass(eq=False)
class Group:
    """Documents whose decisions need the same queries: those of one context with the same options.

    Attributes:
        place: what the queries stand behind.
        queries: the queries.
        options: the continuations that are scored.
        documents: the documents' numbers.
        constants: (C,) what the rule subtracts.
        labels: the classes of the queries, where these are labeled rows.
    """

    place: Behind
    queries: list[str]
    options: tuple[str, ...]
    documents: list[int] = field(default_factory=list)
    constants: np.ndarray = field(default_factory=lambda: np.zeros(0))
    labels: list[int] = field(default_factory=list)


class RuleQueries:
    """The queries of a task's rules in one run.

    Args:
        model: what is evaluated.

    Attributes:
        instances: the task's requests with those of the rules; None before they are made.
        documents: the requests of each document's options.
        prompts: the queries that are asked besides the documents', with what they stand behind; for each the requests
            by option.
        groups: the documents by the queries that a rule needs; of `batch` over the task itself none.
        facts: what the results say of each rule's queries: what was drawn, and with which seed.
    """

    def __init__(self, task: ConfigurableTask, rules: Sequence[Rule], model: Any) -> None:
        self.task, self.rules, self.model, self.name = task, rules, model, str(task.config.task)
        self.instances: list[Instance] | None = None
        self.documents: dict[int, list[Instance]] = {}
        self.prompts: dict[tuple[Behind, str], dict[str, Instance]] = {}
        self.groups: dict[str, list[Group]] = {str(rule): [] for rule in rules}
        self.facts: dict[str, dict[str, Any]] = {str(rule): {} for rule in rules}
        self._random: dict[tuple[str, tuple[str, ...]], list[dict[str, str]]] = {}

    def add(self, arguments: Mapping[str, Any]) -> None:
        """Add the queries of all rules to the task's requests.

        Raises:
            InputError: a rule does not fit the task, or a query does not fit the model.
        """
        self._arguments = arguments
        instances = self.task._instances or []
        if not isinstance(self.model, ICLModel):  # of other models, nobody looks at the parts
            instances = [copy.copy(instance) for instance in instances]  # which a study has for other models too
        options: dict[int, int] = {}
        for instance in instances:
            document = int(instance.doc_id)  # type: ignore[arg-type]
            if document not in options:
                options[document] = len(self.task.doc_to_choice(instance.doc))
            if instance.idx < options[document]:  # behind them, those of acc_mutual_info
                self.documents.setdefault(document, []).append(instance)
        behind = self._behind()
        if not isinstance(self.model, ICLModel):
            for instance in instances:
                instance.arguments = (str(instance.args[0]), *instance.args[1:])
        for rule in self.rules:
            try:
                self._ask(rule, behind)
            except InputError as error:
                raise InputError(f"task {self.name!r}: decide={rule}: {error.message}") from error
        further = [instance for options in self.prompts.values() for instance in options.values()]
        self.task._instances = self.instances = [*instances, *further]
        if self.prompts:
            n = len({place for place, _ in self.prompts})
            log.info("%s: decide asks %d further queries behind %d contexts.", self.name, len(self.prompts), n)

    def _behind(self) -> dict[int, Behind]:
        """What each document's query stands behind in this run, after demonstrations that did not fit were left out."""
        prompts: dict[int, Any] = {document: of[0].args[0] for document, of in self.documents.items()}
        if not all(isinstance(prompt, FewShotPrompt) for prompt in prompts.values()):
            raise structure_error(self.name)
        model = self.model
        if isinstance(model, ICLModel) and model.common.overflow != "error":
            every = [instance for of in self.documents.values() for instance in of]
            run = model.run
            fitted = fit_requests(every, model.tokenize, run.limits, run.overflow, run.documents, quiet=True)
            # All options of a document lose the same demonstrations.
            left_out = {instance.doc_id: request.left_out for instance, request in zip(every, fitted, strict=True)}
            prompts = {i: model.tokenize.prompts.arranged(prompts[i], left_out[i]) for i in prompts}
        elif isinstance(model, HFLM) and not isinstance(model, ICLModel):
            self._refuse_what_is_cut(model)
        same: dict[Behind, Behind] = {}
        parts = {document: (prompt.prefix, prompt.demonstrations) for document, prompt in prompts.items()}
        return {document: same.setdefault(each, each) for document, each in parts.items()}

    def _refuse_what_is_cut(self, model: HFLM) -> None:
        """Refuse prompts that `hf` would cut at the beginning: the rules' queries would have other demonstrations."""
        for document, instances in self.documents.items():
            for instance in instances:
                context, continuation = instance.args
                if len(f"{context}{continuation}".encode()) < model.max_length:  # a token has a byte at least
                    continue
                ids = [token for part in model._encode_pair(str(context), continuation) for token in part]
                if len(ids) > model.max_length + 1:
                    raise InputError(
                        f"task {self.name!r}: decide: the prompt of document {document} has {len(ids)} tokens, and hf "
                        f"would cut it to {model.max_length}: lower --num_fewshot, or take a model of this package "
                        "with overflow=drop."
                    )

    def _ask(self, rule: Rule, behind: Mapping[int, Behind]) -> None:
        """Make the requests of a rule."""
        premise = rule.name in ("pmi", "dcpmi")
        if premise and self._arguments.get("apply_chat_template"):
            raise InputError("its premise is a text without messages: leave --apply_chat_template out.")
        if rule.name == "batch" or rule.name in NEIGHBORS:
            self._check_fixed_options("a mean over documents" if rule.name == "batch" else "a comparison of documents")
            if rule.arguments.get("of") == "task":
                return
        if rule.name in NEIGHBORS:
            self._among_labeled(rule, behind)
            return
        queries: dict[Any, list[str]] = {}
        groups: dict[Any, Group] = {}
        for document, instances in self.documents.items():
            doc, place = instances[0].doc, ("", ()) if premise else behind[document]
            # Of most tasks, all documents have the same content-free query, and it is made once.
            key = place if rule.name == "batch" else self._queries.signature(doc)
            if key not in queries:
                queries[key] = self._of_pool(rule, place) if rule.name == "batch" else self._texts(rule, doc)
            options = options_of(instances)
            if (place, key, options) not in groups:
                groups[place, key, options] = Group(place, queries[key], options)
                for query in queries[key]:
                    self._request(place, query, options)
            groups[place, key, options].documents.append(document)
        self.groups[str(rule)] = list(groups.values())

    def _texts(self, rule: Rule, doc: Mapping[str, Any]) -> list[str]:
        """The queries of a rule for a document."""
        arguments = rule.arguments
        if rule.name == "pmi":
            return [arguments["premise"]]
        if rule.name == "dcpmi":
            return [arguments["premise"] or self._queries.premise(doc)]
        texts = list(arguments["texts"]) if rule.name == "contextual" else self._random_texts(rule, doc)
        made = [(text, self._queries.content_free(doc, text)) for text in texts]
        queries = [query for _, query in made if query.strip()]
        empty = [text for text, query in made if not query.strip()]  # behind which nothing can be scored
        if empty:
            self.facts[str(rule)]["texts_left_out"] = empty
        if not queries:
            raise InputError("all of its texts make an empty query: give others (texts=...).")
        return queries

    @cached_property
    def _queries(self) -> Queries:
        return Queries(self.task, self._arguments)

    @cached_property
    def _pool(self) -> dict[int, Any]:
        """The few-shot documents that are not evaluated, by their row."""
        rows = {as_row(doc) for doc in self.task.eval_docs}
        pool = {row: doc for row, doc in enumerate(pool_of(self.task)) if as_row(doc) not in rows}
        if not pool:
            raise InputError("the task has no few-shot documents that it does not evaluate: give of=test or of=task.")
        return pool

    @cached_property
    def _seed(self) -> int:
        """The run's few-shot seed, for what is drawn. (Of it, lm-eval's own sampler keeps a generator alone.)"""
        seed = getattr(getattr(self.task, "sampler", None), "seed", None)
        if seed is not None:
            return int(seed) % 2**32
        generator = Random()
        generator.setstate(self.task.fewshot_rnd.getstate())
        return generator.getrandbits(32)

    def _random_texts(self, rule: Rule, doc: Mapping[str, Any]) -> list[dict[str, str]]:
        """n texts for each field that the query is made from, of words drawn from that field of the corpus: as many as
        its documents have on average, and one more (Fei et al. 2023; " ." ends each, as in the authors' code)."""
        names = tuple(self._queries.read_by_template(doc))
        if (str(rule), names) not in self._random:
            corpus = list(self.task.eval_docs) if rule.arguments["of"] == "test" else [*self._pool.values()]
            generator = np.random.RandomState(self._seed)
            texts: list[dict[str, str]] = [{} for _ in range(rule.arguments["n"])]
            for name in names:
                words_of = [" ".join(texts_in(row.get(name))).lower().split() for row in corpus]
                words = [word for some in words_of for word in some]
                if not words:
                    raise InputError(f"the field {name!r} of the documents that words are drawn from has none.")
                size = len(words) // len(words_of) + 1
                for text in texts:
                    text[name] = " ".join(words[i] for i in generator.randint(0, len(words), size=size)) + " ."
            self.facts[str(rule)] |= {"seed": self._seed, "corpus": len(corpus)}
            self._random[str(rule), names] = texts
        return self._random[str(rule), names]

    def _of_pool(self, rule: Rule, place: Behind) -> list[str]:
        """The queries of m few-shot documents that are no demonstrations and not evaluated."""
        m = rule.arguments["m"]
        queries = [query for _, query in islice(self._drawn("batch", place), m)]
        if len(queries) < m:
            raise InputError(
                f"m={m}: only {len(queries)} few-shot documents are neither demonstrations nor evaluated: lower m."
            )
        self.facts[str(rule)] |= {"seed": self._seed, "pool": len(self._pool)}
        return queries

    def _drawn(self, name: str, place: Behind) -> Iterator[tuple[int, str]]:
        """The few-shot documents that are no demonstrations and not evaluated in random order, with their queries."""
        rows, queries = list(self._pool), set[str]()
        Random(f"{name} {self._seed}").shuffle(rows)
        options, is_evaluated = self._choices(self.task.eval_docs[0]), evaluated(self.task)
        for row in rows:
            doc = self._pool[row]
            query = self._queries.of(doc)
            if query in queries or any(query in demonstration for demonstration in place[1]) or is_evaluated(doc):
                continue
            if self._choices(doc) != options:
                raise InputError("its few-shot documents have other options than those that are evaluated.")
            queries.add(query)
            yield row, query

    def _among_labeled(self, rule: Rule, behind: Mapping[int, Behind]) -> None:
        """Draw m labeled few-shot documents of each class, which the rule compares the documents with."""
        model, m = self.model, rule.arguments["m"]
        if not isinstance(model, ICLModel):
            raise InputError(
                "needs more of a model than the log-probabilities of options: take a model of this package (--model "
                f"icl has those of hf), or leave {rule.name} out."
            )
        method, can = model.method, model.runner.capabilities
        if method.memory_depends_on_query or isinstance(method, Several) or can.stepwise:
            raise InputError(f"a query has no single state under {method.name} with this model: leave {rule.name} out.")
        options = options_of(next(iter(self.documents.values())))
        groups: dict[Behind, Group] = {}
        for document, place in behind.items():
            if place not in groups:
                groups[place] = group = Group(place, [], options)
                rows = list[int]()
                missing = [m] * len(options)
                for row, query in self._drawn(rule.name, place):
                    label = self._label(self._pool[row])
                    if missing[label]:
                        missing[label] -= 1
                        rows.append(row)
                        group.queries.append(query)
                        group.labels.append(label)
                    if not any(missing):
                        break
                if any(missing):
                    raise InputError(
                        f"m={m}: only {m - max(missing)} few-shot documents of the class "
                        f"{options[missing.index(max(missing))]!r} are neither demonstrations nor evaluated: lower m."
                    )
                if rule.arguments.get("k", 1) > len(rows):
                    raise InputError(f"k={rule.arguments['k']}: there are {len(rows)} labeled documents: lower k.")
                self.facts[str(rule)].setdefault("rows", rows)
                for query in group.queries:
                    self.fitting(self.alone(place, query, options[0]))
            self.fitting(self.alone(place, self.documents[document][0].args[0].query, options[0]))
            groups[place].documents.append(document)
        self.groups[str(rule)] = list(groups.values())
        self.facts[str(rule)] |= {"seed": self._seed, "pool": len(self._pool), "labels": m * len(options)}
        n = m * len(options)
        log.info("%s: %s compares with %d labeled documents behind %d contexts.", self.name, rule, n, len(groups))

    def _label(self, doc: Any) -> int:
        """The class of a document: the number of its option."""
        target, options = self.task.doc_to_target(doc), self._choices(doc)
        label = options.index(target) if isinstance(target, str) and target in options else target
        if type(label) is not int or not 0 <= label < len(options):
            raise InputError(f"a few-shot document has no class among its options: {target!r}.")
        return label

    def _check_fixed_options(self, what: str) -> None:
        first = self._choices(self.task.eval_docs[0])
        for document, instances in self.documents.items():
            if self._choices(instances[0].doc) != first:
                raise InputError(
                    f"{what} needs the same options for all, and those of document {document} are not "
                    "those of the task's first: take another rule."
                )

    def _choices(self, doc: Any) -> list[str]:
        return [str(choice) for choice in self.task.doc_to_choice(doc)]

    def _request(self, place: Behind, query: str, options: Sequence[str]) -> None:
        """Ask for options behind a query, those that were not asked for before."""
        requests = self.prompts.setdefault((place, query), {})
        ours = isinstance(self.model, ICLModel)
        if requests:
            prompt, number = next((instance.args[0], instance.doc_id) for instance in requests.values())
        else:
            prompt, number = FewShotPrompt(place[0], place[1], query), -len(self.prompts)
            prompt = prompt if ours else str(prompt)
        doc = next(iter(self.documents.values()))[0].doc  # for filters of the task's own, which look at it
        for option in options:
            if option in requests:
                continue
            instance = Instance("loglikelihood", doc, (prompt, option), len(requests), (self.name, number, 1))
            if ours:
                self.fitting(instance)
            requests[option] = instance

    def alone(self, place: Behind, query: str, option: str) -> Instance:
        """An option behind a query, which is no request of the task."""
        return Instance("loglikelihood", {}, (FewShotPrompt(*place, query), option), 0, (self.name, 0, 1))

    def fitting(self, instance: Instance) -> Request:
        """The request of a query that a rule asks.

        Raises:
            InputError: it does not fit the model.
        """
        [request] = self.model.tokenize([instance])
        if reason := self.model.run.limits.too_long(request.prompt, request.answer_positions):
            raise InputError(
                f"prompts {reason.why}; that of its query {instance.args[0].query[:40]!r} needs "
                f"{reason.sum('answer without its last token')}. {reason.hint}Lower --num_fewshot, or give shorter "
                "texts."
            )
        return request


def options_of(instances: Iterable[Instance]) -> tuple[str, ...]:
    return tuple(str(instance.args[1]) for instance in instances)
