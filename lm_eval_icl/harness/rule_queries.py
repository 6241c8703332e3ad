"""The requests of a task in a run with decision rules: its documents', and what rules ask besides."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from random import Random
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.content_free import Queries
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import structure_error
from lm_eval_icl.harness.requests import fit_requests
from lm_eval_icl.harness.tasks import as_row, evaluated, pool_of, texts_in
from lm_eval_icl.methods.limits import Request
from lm_eval_icl.prompts.prompt import FewShotPrompt

# A prompt's parts before its query: what one memory holds.
Behind = tuple[str, tuple[str, ...]]


class RuleQueries:
    """The queries of a task's documents, and those that its rules ask.

    Args:
        task: the task, whose requests are made.
        model: what is evaluated.
        arguments: as of `Queries`.

    Attributes:
        documents: the requests of each document's options.
        behind: what each document's query stands behind, after demonstrations that did not fit were left out.
        prompts: the queries that are asked besides the documents', with what they stand behind; for each the requests
            by option.

    Raises:
        InputError: the parts of a prompt are not known, or `hf` would cut it.
    """

    def __init__(self, task: ConfigurableTask, model: Any, arguments: Mapping[str, Any]) -> None:
        self.task, self.model, self.arguments, self.name = task, model, arguments, str(task.config.task)
        self.documents: dict[int, list[Instance]] = {}
        self.prompts: dict[tuple[Behind, str], dict[str, Instance]] = {}
        self._shuffled, self._is_evaluated = dict[str, list[int]](), evaluated(task)
        self._words = dict[tuple[str, bool], tuple[list[str], int]]()
        self._instances: list[Instance] = task._instances or []
        is_ours = isinstance(model, ICLModel)
        if not is_ours:  # the prompts become plain texts, and a study has the requests for other models too
            self._instances = [copy.copy(instance) for instance in self._instances]
        for document, requests in groupby(self._instances, key=lambda instance: instance.doc_id):
            of_document = list(requests)
            options = len(task.doc_to_choice(of_document[0].doc))
            self.documents[int(document)] = of_document[:options]  # behind them, those of acc_mutual_info
        self.behind = self._behind()
        if not is_ours:
            for instance in self._instances:
                instance.arguments = (str(instance.args[0]), *instance.args[1:])

    @property
    def instances(self) -> list[Instance]:
        """All requests: the task's, and those of the rules."""
        return [*self._instances, *(instance for options in self.prompts.values() for instance in options.values())]

    def _behind(self) -> dict[int, Behind]:
        prompts: dict[int, Any] = {document: requests[0].args[0] for document, requests in self.documents.items()}
        if not all(isinstance(prompt, FewShotPrompt) for prompt in prompts.values()):
            raise structure_error(self.name)
        model = self.model
        if isinstance(model, ICLModel):
            if model.common.overflow != "error":
                instances = [instance for requests in self.documents.values() for instance in requests]
                run = model.run
                fitted = fit_requests(instances, model.tokenize, run.limits, run.overflow, run.documents, quiet=True)
                # All options of a document lose the same demonstrations.
                left_out = {i.doc_id: request.left_out for i, request in zip(instances, fitted, strict=True)}
                prompts = {i: model.tokenize.prompts.arranged(prompts[i], left_out[i]) for i in prompts}
        elif isinstance(model, HFLM):
            self._refuse_what_is_cut(model)
        return {document: (prompt.prefix, prompt.demonstrations) for document, prompt in prompts.items()}

    def _refuse_what_is_cut(self, model: HFLM) -> None:
        """Refuse prompts that `hf` would cut at the beginning: the rules' queries would have other demonstrations."""
        for document, instances in self.documents.items():
            for instance in instances:
                context, continuation = instance.args
                if len(f"{context}{continuation}".encode()) < model.max_length:  # a token has a byte at least
                    continue
                tokens = sum(map(len, model._encode_pair(str(context), continuation)))
                if tokens > model.max_length + 1:
                    raise InputError(
                        f"task {self.name!r}: decide: the prompt of document {document} has {tokens} tokens, and hf "
                        f"would cut it to {model.max_length}: lower --num_fewshot, or take a model of this package "
                        "with overflow=drop."
                    )

    def ask(self, place: Behind, query: str, options: Sequence[str]) -> None:
        """Ask for options behind a query, those that were not asked for before."""
        requests = self.prompts.setdefault((place, query), {})
        is_ours = isinstance(self.model, ICLModel)
        if requests:
            first = next(iter(requests.values()))
            prompt, number = first.args[0], first.doc_id
        else:
            prompt, number = FewShotPrompt(*place, query), -len(self.prompts)
            prompt = prompt if is_ours else str(prompt)
        doc = next(iter(self.documents.values()))[0].doc  # for filters of the task's own, which look at it
        for option in options:
            if option in requests:
                continue
            instance = Instance("loglikelihood", doc, (prompt, option), len(requests), (self.name, number, 1))
            if is_ours:
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

    @cached_property
    def queries(self) -> Queries:
        """Renders queries of the task."""
        return Queries(self.task, self.arguments)

    def content_free(self, doc: Any, texts: Any) -> str:
        """The query of a document with other texts, all alike or by field, in place of its own."""
        return self.queries.content_free(doc, texts)

    def premise(self, doc: Any) -> str:
        """What the template puts behind a document's text."""
        return self.queries.premise(doc)

    def fields(self, doc: Any) -> tuple[str, ...]:
        """The fields that the query of a document is made from."""
        return tuple(self.queries.read_by_template(doc))

    def words(self, field: str, evaluated: bool) -> tuple[list[str], int]:
        """The words, in lower case, of a field of all few-shot (or evaluated) documents, and how many these are."""
        if (field, evaluated) not in self._words:
            corpus = list(self.task.eval_docs if evaluated else self.pool.values())
            words = [word for row in corpus for word in " ".join(texts_in(row.get(field))).lower().split()]
            if not words:
                raise InputError(f"the field {field!r} of the documents that words are drawn from has none.")
            self._words[field, evaluated] = words, len(corpus)
        return self._words[field, evaluated]

    @cached_property
    def pool(self) -> dict[int, Any]:
        """The few-shot documents that are not evaluated, by their row."""
        rows = {as_row(doc) for doc in self.task.eval_docs}
        pool = {row: doc for row, doc in enumerate(pool_of(self.task)) if as_row(doc) not in rows}
        if not pool:
            raise InputError("the task has no few-shot documents that it does not evaluate: give of=test or of=task.")
        return pool

    @cached_property
    def seed(self) -> int:
        """The run's few-shot seed, for what is drawn. (Of it, lm-eval's own sampler keeps a generator alone.)"""
        seed = getattr(getattr(self.task, "sampler", None), "seed", None)
        return copy.copy(self.task.fewshot_rnd).getrandbits(32) if seed is None else int(seed) % 2**32

    def drawn(self, name: str, place: Behind) -> Iterator[tuple[int, str]]:
        """The few-shot documents that are no demonstrations and not evaluated in random order, with their queries."""
        if name not in self._shuffled:  # once for all contexts
            self._shuffled[name] = list(self.pool)
            Random(f"{name} {self.seed}").shuffle(self._shuffled[name])
        queries, options, is_evaluated = set[str](), self._choices(self.task.eval_docs[0]), self._is_evaluated
        for row in self._shuffled[name]:
            doc = self.pool[row]
            query = self.queries.of(doc)
            if query in queries or any(query in demonstration for demonstration in place[1]) or is_evaluated(doc):
                continue
            if self._choices(doc) != options:
                raise InputError("its few-shot documents have other options than those that are evaluated.")
            queries.add(query)
            yield row, query

    def check_fixed_options(self, what: str) -> None:
        """Refuse documents whose options differ."""
        first = self._choices(self.task.eval_docs[0])
        for document, instances in self.documents.items():
            if self._choices(instances[0].doc) != first:
                raise InputError(
                    f"{what} needs the same options for all, and those of document {document} are not "
                    "those of the task's first: take another rule."
                )

    def _choices(self, doc: Any) -> list[str]:
        return [str(choice) for choice in self.task.doc_to_choice(doc)]


def options_of(instances: Iterable[Instance]) -> tuple[str, ...]:
    return tuple(str(instance.args[1]) for instance in instances)
