"""The requests of a task in a run with decision rules: those of its documents, and those of the
rules' own queries.

A content-free query is the query of a document whose texts are replaced by a text that says
nothing, such as "N/A". The description, the demonstrations and the options before and after it are
those of the real document.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import groupby
from random import Random
from typing import Any

from jinja2 import meta
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.files import as_json
from lm_eval_icl.harness.documents import Doc, evaluated, texts_in, with_texts
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.private_names import copied
from lm_eval_icl.harness.prompts import structure_error
from lm_eval_icl.harness.requests import fit_requests
from lm_eval_icl.harness.samplers import pool_of, pool_sampler, prompt_of
from lm_eval_icl.methods.limits import Request
from lm_eval_icl.prompts.prompt import FewShotPrompt

# A prompt's prefix and demonstrations: the parts before the query, which one memory holds.
PromptStart = tuple[str, tuple[str, ...]]
# Replaces each text of a document, so that the text that the template adds can be found.
_SENTINEL = "\U000f1c1f"


def few_shot_seed(task: Any) -> int:
    """The seed of a rule's random draws: the task's few-shot seed.

    lm-eval's own sampler keeps only a generator that was made from it. The generator has to be
    asked before the task's requests are built, since its state then depends on the number of
    documents.
    """
    sampler = pool_sampler(task)
    if sampler is None or sampler.seed is None:
        return copy.copy(task.fewshot_rnd).getrandbits(32)
    return sampler.seed % 2**32


class RuleQueries:
    """The queries of a task's documents, and the queries of its decision rules.

    Args:
        task: the task, whose requests are already made.
        model: the model that is evaluated.
        arguments: the arguments of `ConfigurableTask.fewshot_context` (a chat template, a system
            instruction).
        seed: the seed of random draws (`few_shot_seed`).

    Attributes:
        documents: document -> the requests of its options.
        starts: document -> its prompt's parts before the query, without demonstrations that did not
            fit.
        prompts: (start, query) of a rule -> option -> its request.

    Raises:
        InputError: the parts of a prompt are not known, or `hf` would cut a prompt.
    """

    def __init__(
        self, task: ConfigurableTask, model: Any, arguments: Mapping[str, Any], seed: int
    ) -> None:
        self.task = task
        self.model = model
        self.arguments = arguments
        self.seed = seed
        self.name = str(task.config.task)
        self.documents: dict[int, list[Instance]] = {}
        self.prompts: dict[tuple[PromptStart, str], dict[str, Instance]] = {}
        self._shuffled = cache(self._in_random_order)  # once for all contexts
        self._is_evaluated = evaluated(task)
        self.words = cache(self._words)
        # As many demonstrations as a prompt has, since a chat template may join them with the
        # query.
        self._shots = pool_of(task)[: int(task.config.num_fewshot or 0)]
        self._requests: list[Instance] = list(task.instances or [])
        self._is_ours = isinstance(model, ICLModel)
        if not self._is_ours:
            # Their prompts become plain texts, and a study has the requests for our models too.
            self._requests = [copy.copy(instance) for instance in self._requests]
        for document, requests in groupby(self._requests, key=lambda instance: instance.doc_id):
            all_requests = list(requests)
            options = len(task.doc_to_choice(all_requests[0].doc))
            # The requests of acc_mutual_info follow those of the options.
            self.documents[int(document)] = all_requests[:options]
        self.starts = self._find_starts()
        if not self._is_ours:
            for instance in self._requests:
                instance.arguments = (str(instance.args[0]), *instance.args[1:])

    # Queries with other texts than the document's, rendered as lm-eval renders queries for
    # evaluation.

    @cached_property
    def _template_fields(self) -> tuple[str, ...] | None:
        """The fields of a document that the template reads; None if it may read all fields."""
        template = self.task.config.doc_to_text
        if self.task.prompt is not None or not (isinstance(template, str) or callable(template)):
            raise InputError("its query comes from a prompt that is not a template of fields.")
        if template in self.task.features:
            return (template,)
        if isinstance(template, str):
            with refusing("doc_to_text"):
                return tuple(sorted(meta.find_undeclared_variables(utils.env.parse(template))))
        return None

    def fields(self, doc: Doc) -> dict[str, Any]:
        """The fields of a document that hold texts and that its query is made from."""
        names = self._template_fields
        read = doc if names is None else [name for name in names if name in doc]
        return {name: doc[name] for name in read if texts_in(doc[name])}

    def content_free(self, doc: Doc, texts: Mapping[str, str] | str) -> str:
        """A document's query, with other texts in the fields that the query is made from.

        Args:
            texts: field -> the text that replaces each text in it; or one text for all fields.

        Raises:
            InputError: the query cannot be rendered, or does not contain the other text.
        """
        fields = self.fields(doc)
        if not fields:
            raise InputError(
                "its query is made from no text of a document, so that none can be left out."
            )
        if isinstance(texts, str):
            by_field = dict.fromkeys(fields, texts)
        else:
            by_field = {name: texts[name] for name in fields}
        query = self._filled_in(doc, by_field)
        shown = _collapsed(query)
        if not any(_collapsed(text) in shown for text in by_field.values()):
            text = next(iter(by_field.values()))
            raise InputError(f"doc_to_text: its query does not show the text {text[:40]!r}.")
        return query

    def signature(self, doc: Doc) -> str:
        """What the content-free query of a document depends on. Documents with equal signatures
        have equal queries."""
        names = self._template_fields
        read = {name: value for name, value in doc.items() if names is None or name in names}
        for name, value in self.fields(doc).items():
            read[name] = with_texts(value, lambda _: _SENTINEL)
        return as_json([read, self.task.doc_to_prefix(doc)])

    def premise(self, doc: Doc) -> str:
        """The text that the template puts after the last text of a document, such as
        "\\nSentiment:"."""
        query = self._filled_in(doc, dict.fromkeys(self.fields(doc), _SENTINEL))
        _, sentinel, tail = query.rpartition(_SENTINEL)
        if not sentinel or not tail.strip():
            raise InputError(
                "its template puts nothing after the document's text: give premise=TEXT."
            )
        return tail

    def _filled_in(self, doc: Doc, by_field: Mapping[str, str]) -> str:
        """The query of a document in which `by_field` has the new text of each field."""

        def replaced(name: str) -> Any:
            return with_texts(doc[name], lambda _: by_field[name])

        what = (
            f"doc_to_text: cannot be filled in with {by_field!r} in place of the document's texts"
        )
        with refusing(what):
            other = {**doc, **{name: replaced(name) for name in by_field}}
            return self._render(doc, self.task.doc_to_text(other))

    def _render(self, doc: Doc, text: Any) -> str:
        """The query of a document's prompt if `doc_to_text` gives this text."""
        task = copied(self.task)
        task.set_config("doc_to_text", lambda _: text)
        return prompt_of(task, doc, self._shots, **self.arguments).query

    # Requests.

    @property
    def instances(self) -> list[Instance]:
        """All requests: those of the task's documents, and those of the rules."""
        instances = list(self._requests)
        for options in self.prompts.values():
            instances += options.values()
        return instances

    def _find_starts(self) -> dict[int, PromptStart]:
        prompts: dict[int, Any] = {
            document: requests[0].args[0] for document, requests in self.documents.items()
        }
        if not all(isinstance(prompt, FewShotPrompt) for prompt in prompts.values()):
            raise structure_error(self.name)
        if isinstance(self.model, ICLModel):
            prompts = self._fitted(self.model, prompts)
        elif isinstance(self.model, HFLM):
            self._refuse_cut_prompts(self.model)
        return {
            document: (prompt.prefix, prompt.demonstrations) for document, prompt in prompts.items()
        }

    def _fitted(self, model: ICLModel, prompts: dict[int, Any]) -> dict[int, Any]:
        """The documents' prompts as they run, without the demonstrations that do not fit."""
        instances = list[Instance]()
        for options in self.documents.values():
            instances += options
        run = model.run
        requests = fit_requests(instances, model.tokenize, run.limits, run.overflow, quiet=True)
        # All options of a document lose the same demonstrations.
        left_out = {i.doc_id: one.left_out for i, one in zip(instances, requests, strict=True)}
        arranged = model.tokenize.prompts.arranged
        return {document: arranged(prompts[document], left_out[document]) for document in prompts}

    def _refuse_cut_prompts(self, model: HFLM) -> None:
        """Refuse prompts that `hf` would cut at the beginning, since rules' queries would have
        other demonstrations."""
        for instance in self._requests:
            context, continuation = map(str, instance.args)
            if len(f"{context}{continuation}".encode()) < model.max_length:
                continue  # a token has at least one byte
            tokens = len(model.tok_encode(f"{context}{continuation}"))
            if tokens > model.max_length + 1:
                raise InputError(
                    f"task {self.name!r}: decide: the prompt of document {instance.doc_id} has "
                    f"{tokens} tokens, and hf would cut it to {model.max_length}: lower "
                    "--num_fewshot, or take a model of this package."
                )

    def ask(self, start: PromptStart, query: str, options: Sequence[str]) -> None:
        """Add the requests for options after a query, unless they have been added before."""
        requests = self.prompts.setdefault((start, query), {})
        # Documents of rules are numbered from -1 downwards.
        number = -len(self.prompts)
        if requests:
            number = next(iter(requests.values())).doc_id
        prompt: str = FewShotPrompt(*start, query)
        if not self._is_ours:
            prompt = str(prompt)
        doc = next(iter(self.documents.values()))[0].doc  # the task's own filters read the document
        for option in options:
            if option in requests:
                continue
            place = (self.name, number, 1)
            instance = Instance("loglikelihood", doc, (prompt, option), len(requests), place)
            if self._is_ours:
                self._fitting(instance)
            requests[option] = instance

    def request(self, start: PromptStart, query: str, option: str) -> Request:
        """The request for an option after a query, which is not among the requests of the task.

        Raises:
            InputError: the request does not fit the model.
        """
        prompt = FewShotPrompt(*start, query)
        return self._fitting(Instance("loglikelihood", {}, (prompt, option), 0, (self.name, 0, 1)))

    def _fitting(self, instance: Instance) -> Request:
        """A rule's request as token ids.

        Raises:
            InputError: the request does not fit the model.
        """
        [request] = self.model.tokenize([instance])
        reason = self.model.run.limits.too_long(request.prompt, request.answer_positions)
        if reason:
            needed = reason.sum("answer without its last token")
            raise InputError(
                f"prompts {reason.why}; that of its query {instance.args[0].query[:40]!r} needs "
                f"{needed}. {reason.hint}Lower --num_fewshot, or give shorter texts."
            )
        return request

    def _words(self, field: str, evaluated: bool) -> tuple[list[str], int]:
        """The lower-case words in a field of all few-shot (or evaluated) documents, and the number
        of documents."""
        corpus = list(self.task.eval_docs if evaluated else self.pool.values())
        words = list[str]()
        for row in corpus:
            words += " ".join(texts_in(row.get(field))).lower().split()
        if not words:
            raise InputError(f"the field {field!r} of the documents has no words to draw.")
        return words, len(corpus)

    @cached_property
    def pool(self) -> dict[int, Any]:
        """The few-shot documents that are not evaluated, by their row."""
        rows = {as_json(doc) for doc in self.task.eval_docs}
        pool = {row: doc for row, doc in enumerate(pool_of(self.task)) if as_json(doc) not in rows}
        if not pool:
            raise InputError(
                "the task has no few-shot documents that it does not evaluate: give of=test or of=task."
            )
        return pool

    def drawn(self, name: str, start: PromptStart) -> Iterator[tuple[int, str]]:
        """Few-shot documents (row, query) in random order, without demonstrations and evaluated
        documents."""
        _, demonstrations = start
        options = self._choices(self.task.eval_docs[0])
        queries = set[str]()
        for row in self._shuffled(name):
            doc = self.pool[row]
            query = self._render(doc, self.task.doc_to_text(doc))
            is_shown = any(query in demonstration for demonstration in demonstrations)
            if query in queries or is_shown or self._is_evaluated(doc):
                continue
            if self._choices(doc) != options:
                raise InputError(
                    "its few-shot documents have other options than its evaluated documents."
                )
            queries.add(query)
            yield row, query

    def _in_random_order(self, name: str) -> list[int]:
        rows = list(self.pool)
        Random(f"{name} {self.seed}").shuffle(rows)
        return rows

    def check_fixed_options(self, what: str) -> None:
        """Raise an `InputError` if the documents' options differ; `what` needs them to be the
        same."""
        first = self._choices(self.task.eval_docs[0])
        for document, instances in self.documents.items():
            if self._choices(instances[0].doc) != first:
                raise InputError(
                    f"{what} needs the same options for all, and document {document} has other "
                    "options than the task's first document: take another rule."
                )

    def _choices(self, doc: Any) -> list[str]:
        return [str(choice) for choice in self.task.doc_to_choice(doc)]


def options_of(instances: Iterable[Instance]) -> tuple[str, ...]:
    return tuple(str(instance.args[1]) for instance in instances)


def _collapsed(text: str) -> str:
    """Lower-case text with single blanks."""
    return " ".join(text.lower().split())
