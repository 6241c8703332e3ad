"""Decision rules in a run of lm-eval: `--metadata decide=contextual+batch`, for every model.

A rule is one more filter of a task: `acc,none` stays what the model says, and `acc,contextual` stands beside it, of the
same run and the same samples. The queries that a rule asks besides the documents' are requests of the task like any
other, with document numbers below 0, which no metric looks up: they are packed with the documents behind the same
memory, and have keys of their own in a response cache.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from random import Random
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CachingLM, TemplateLM
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.huggingface import HFLM

from lm_eval_icl import decisions
from lm_eval_icl.decisions.how import NEIGHBORS, Rule, read
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.content_free import Queries, texts_in
from lm_eval_icl.harness.distributed import of_all
from lm_eval_icl.harness.metaicl import MetaICLTask
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording, structure_error
from lm_eval_icl.harness.requests import fit_requests
from lm_eval_icl.harness.tasks import as_row, evaluated, pool_of
from lm_eval_icl.inference.scoring import query_states
from lm_eval_icl.methods.limits import Request
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.prompt import FewShotPrompt

# A prompt's parts before its query: what one memory holds.
Behind = tuple[str, tuple[str, ...]]
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
        if self._instances is not self.deciding.instances:  # a study builds requests once, and evaluates them often
            names = ("system_instruction", "apply_chat_template", "fewshot_as_multiturn", "chat_template")
            self.deciding.add({name: kwargs[name] for name in names if name in kwargs})

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


class Deciding:
    """The rules of one task in one run.

    Args:
        model: what is evaluated.

    Attributes:
        instances: the task's requests with those of the rules; None before they are made.
        documents: the requests of each document's options.
        prompts: the queries that are asked besides the documents', with what they stand behind; for each the requests
            by option.
        groups: the documents by the queries that a rule needs; of `batch` over the task itself none.
    """

    def __init__(self, task: ConfigurableTask, rules: Sequence[Rule], model: Any) -> None:
        self.task, self.rules, self.model, self.name = task, rules, model, str(task.config.task)
        self.instances: list[Instance] | None = None
        self.documents: dict[int, list[Instance]] = {}
        self.prompts: dict[tuple[Behind, str], dict[str, Instance]] = {}
        self.groups: dict[str, list[Group]] = {str(rule): [] for rule in rules}
        self.said: dict[str, dict[str, Any]] = {str(rule): {} for rule in rules}  # what the results say besides
        self.tokens_run = dict.fromkeys(self.groups, 0)  # of rules that compare with labeled rows
        self._random: dict[tuple[str, tuple[str, ...]], list[dict[str, str]]] = {}

    # The queries.

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
            options = _options(instances)
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
            self.said[str(rule)]["texts_left_out"] = empty
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
            self.said[str(rule)] |= {"seed": self._seed, "corpus": len(corpus)}
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
        self.said[str(rule)] |= {"seed": self._seed, "pool": len(self._pool)}
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
        options = _options(next(iter(self.documents.values())))
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
                self.said[str(rule)].setdefault("rows", rows)
                for query in group.queries:
                    self._fitting(self._alone(place, query, options[0]))
            self._fitting(self._alone(place, self.documents[document][0].args[0].query, options[0]))
            groups[place].documents.append(document)
        self.groups[str(rule)] = list(groups.values())
        self.said[str(rule)] |= {"seed": self._seed, "pool": len(self._pool), "labels": m * len(options)}
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
                self._fitting(instance)
            requests[option] = instance

    def _alone(self, place: Behind, query: str, option: str) -> Instance:
        return Instance("loglikelihood", {}, (FewShotPrompt(*place, query), option), 0, (self.name, 0, 1))

    def _fitting(self, instance: Instance) -> Request:
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

    # The decisions.

    def apply(self, rule: Rule) -> None:
        """Put the rule's values beside the model's."""
        scores = {document: _scores(instances) for document, instances in self.documents.items()}
        values: dict[int, np.ndarray] = {}
        if rule.name == "batch" and rule.arguments["of"] == "task":
            values = self._over_documents(rule, scores)
        if rule.name in NEIGHBORS:
            values = self._compared(rule)
        for group in () if rule.name in NEIGHBORS else self.groups[str(rule)]:
            of_queries = [self.prompts[group.place, query] for query in group.queries]
            asked = np.stack([_scores([of[option] for option in group.options]) for of in of_queries])
            of_documents = np.stack([scores[document] for document in group.documents])
            if rule.name == "batch":
                group.constants = decisions.log_mean_exp(decisions.log_normalized(asked))
                found = decisions.batch(of_documents, of=asked, by=rule.arguments["by"])
            elif rule.name in ("pmi", "dcpmi"):
                group.constants, found = asked[0], decisions.pmi(of_documents, asked[0])
            else:
                group.constants, found = decisions.log_mean_exp(asked), decisions.contextual(of_documents, asked)
            values |= dict(zip(group.documents, found, strict=True))
        for instance in self.task._instances or []:
            instance.filtered_resps[str(rule)] = instance.resps[0]
        for document, instances in self.documents.items():
            for instance, value in zip(instances, values[document], strict=True):
                instance.filtered_resps[str(rule)] = Decided.by(rule, float(value), instance.resps[0][1])

    def _compared(self, rule: Rule) -> dict[int, np.ndarray]:
        """The values of a rule that compares documents with labeled rows. The rows are read behind each context anew,
        and each document alone: its value is the same in whichever process and beside whichever others it is."""
        runner, values = self.model.runner, dict[int, np.ndarray]()
        before = runner.tokens_run
        for group in self.groups[str(rule)]:
            given = {"labels": group.labels, "classes": len(group.options)}
            given |= {"k": rule.arguments["k"]} if rule.name == "knn" else {}
            anchors = self._read(rule, group.place, group.queries)
            for start in range(0, len(group.documents), _AT_ONCE):
                numbers = group.documents[start : start + _AT_ONCE]
                queries = [str(self.documents[number][0].args[0].query) for number in numbers]
                states = np.concatenate([self._read(rule, group.place, [query]) for query in queries])
                values |= zip(numbers, getattr(decisions, rule.name)(states, anchors, **given), strict=True)
        self.tokens_run[str(rule)] = runner.tokens_run - before
        return values

    def _read(self, rule: Rule, place: Behind, queries: Sequence[str]) -> np.ndarray:
        """(n, d) the hidden states of queries' last tokens, or (n, V) the log-probabilities of the next token."""
        option = str(next(iter(self.documents.values()))[0].args[1])
        requests = [self._fitting(self._alone(place, query, option)) for query in queries]
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
        options = _options(next(iter(self.documents.values())))
        self.said[str(rule)] |= {"options": list(options), "constants": constants.tolist()}
        values = decisions.batch(stacked, by=rule.arguments["by"])
        return {number: row for number, row in zip(numbers, values, strict=True) if number in scores}

    # The results.

    def record(self, limit: float | None, samples: Sequence[int] | None) -> dict[str, Any]:
        """What the results say of each rule. Every process calls this."""
        rows = {number: as_row(instances[0].doc) for number, instances in self.documents.items()}
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
                **self.said[str(rule)],
            }
            for rule in self.rules
        }

    def _of_queries(self, rule: Rule) -> dict[str, Any]:
        """What a rule asked, what that cost in all processes, and the constants of the first document."""
        groups = self.groups[str(rule)]
        prompts = dict.fromkeys((group.place, query) for group in groups for query in group.queries)
        places = len({place for place, _ in prompts})
        if rule.name in NEIGHBORS:  # each document is read once more
            asked = sum(len(group.queries) + len(group.documents) for group in groups)
            cost = (len(groups), asked, self.tokens_run[str(rule)])
        else:
            cost = (places, len(prompts), sum(self._tokens(self.prompts[prompt]) for prompt in prompts))
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


def _options(instances: Iterable[Instance]) -> tuple[str, ...]:
    return tuple(str(instance.args[1]) for instance in instances)


def _scores(instances: Iterable[Instance]) -> np.ndarray:
    scores = np.array([float(instance.resps[0][0]) for instance in instances], dtype=np.float64)
    if not all(map(math.isfinite, scores)):
        raise InputError("decide: the model gave an option a log-probability of NaN or infinity.")
    return scores
