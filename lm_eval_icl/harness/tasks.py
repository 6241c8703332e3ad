"""Classes and functions that the YAML files in `task_configs` refer to: demonstrations of a task, and BBH as cloze."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.demonstrations.draw import as_text, draw, pool_digest
from lm_eval_icl.demonstrations.how import read
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError, checked_whole, log, naming
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.varying import vary

if TYPE_CHECKING:
    from lm_eval_icl.demonstrations.retrieve import Features, Ranking, Retriever, Texts

Doc = dict[str, Any]


class ICLTask(ConfigurableTask):
    """A task whose demonstrations are drawn once for each seed: they are the same for every document and every method.

    lm-eval's own sampler draws new demonstrations for each document. Here, `metadata.demonstrations` (in the YAML file,
    or `--metadata demonstrations=...`) says how they are chosen from the few-shot pool: `stratified` (the same number
    for each label as far as possible), `random`, `first`, a method by which the model chooses (`demonstrations.how`),
    or a JSON file of indices or of `lm-eval-icl select`. The seed is the few-shot seed of lm-eval's `--seed`. With
    `similar`, every document has other demonstrations (`RetrievingSampler`).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        how = (self.config.metadata or {}).get("demonstrations", "stratified")
        self.sampler: ContextSampler = sampler_of(list(self.fewshot_docs()), how, self)


def with_given_demonstrations(
    original: Callable[..., None], task: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrapper of `ConfigurableTask.__init__`: lm-eval's own tasks, too, get the demonstrations that `--metadata
    demonstrations=...` names, and documents in the order of `--metadata shuffle=SEED`. A task without few-shot
    documents has no demonstrations. `labels=...` and `format=...` are applied by `harness.varying`."""
    original(task, *args, **kwargs)
    metadata = task.config.metadata or {}
    vary(task, metadata.get("labels"), metadata.get("format"))
    if (seed := metadata.get("shuffle")) is not None:
        _shuffle(task, seed)
    how = metadata.get("demonstrations")
    if how is None or isinstance(task, ICLTask):
        return
    if pool := list(task.fewshot_docs() or []):
        task.sampler = sampler_of(pool, how, task)


def _shuffle(task: ConfigurableTask, seed: Any) -> None:
    """Put the evaluated documents in random order, so that `--limit` takes a random sample of them."""
    with naming(f"task {task.config.task!r}"):
        number = checked_whole("shuffle", seed, least=0)
    split = task.config.test_split or task.config.validation_split
    if split is None or split not in (task.dataset or {}) or split == task.fewshot_cfg.split:
        raise InputError(
            f"task {task.config.task!r}: shuffle={seed!r}: its evaluated documents are not a split of the dataset "
            "without demonstrations: leave it out."
        )
    documents = task.dataset[split]
    rows = Random(number).sample(range(len(documents)), len(documents))
    task.dataset = {**task.dataset, split: documents.select(rows)}


def pool_of(task: ConfigurableTask) -> list[Doc]:
    """The documents from which a task takes demonstrations. They are read once, since reading them takes seconds."""
    pool: list[Doc] | None = getattr(getattr(task, "sampler", None), "pool", None)
    return list(task.fewshot_docs() or []) if pool is None else pool


def among(
    task: ConfigurableTask, documents: Callable[[], Iterable[Any]], few_shot: bool = False
) -> Callable[[Doc], bool]:
    """A function that says whether a few-shot document is among some documents of a task: whether one of these has the
    same row, or the same rendered text (`demonstrations.draw.as_text`). It reads them when it is first called.

    Args:
        few_shot: whether `documents` are few-shot documents, and the function is called with other documents.
    """
    templates = [task.config, task.fewshot_cfg]
    known_template, template = templates[::-1] if few_shot else templates

    @functools.cache
    def known() -> set[str]:
        with recording():  # in which templates are compiled once
            return {
                text
                for doc in documents()
                for text in (as_row(doc), text_of(task, doc, known_template))
            }

    def is_among(doc: Any) -> bool:
        with recording():
            return as_row(doc) in known() or text_of(task, doc, template) in known()

    return is_among


@functools.lru_cache(maxsize=128)
def evaluated(task: ConfigurableTask) -> Callable[[Doc], bool]:
    """A function that says whether a task evaluates a few-shot document, within a run's `--limit` or beyond it."""
    return among(task, lambda: task.eval_docs)


def as_row(doc: Mapping[str, Any]) -> str:
    """A document as JSON."""
    return json.dumps(doc, sort_keys=True, default=str)


def text_of(task: ConfigurableTask, doc: Doc, template: Any) -> str:
    """A document's query and options, or its answer if it has neither, as `template` renders them (the configuration of
    the task, or that of its few-shot documents)."""
    query = "" if task.multiple_input else str(task.doc_to_text(doc, template.doc_to_text))
    options = (
        [] if template.doc_to_choice is None else task.doc_to_choice(doc, template.doc_to_choice)
    )
    if not query.strip() and not options:
        query = str(task.doc_to_target(doc, template.doc_to_target))
    return as_text(query, map(str, options))


def why_no_options(task: Any) -> str:
    """Why a task has no options to decide among after one query. Empty if it has."""
    why: str = getattr(task, "why_not_decided", "")
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        return (
            why or "decides among options, which this task does not have: leave it out of --tasks."
        )
    if task.multiple_input:
        return "every option of this task has a prompt of its own: leave it out of --tasks."
    return why


def label_of(task: ConfigurableTask, doc: Doc) -> int | None:
    """The index of a document's right option; None if its answer is not among its options."""
    answer, options = task.doc_to_target(doc), task.doc_to_choice(doc)
    label = options.index(answer) if isinstance(answer, str) and answer in options else answer
    return int(label) if isinstance(label, int) and 0 <= label < len(options) else None


def with_texts(value: Any, text_for: Callable[[str], Any]) -> Any:
    """A field of a document with `text_for(text)` in place of each text, however deep it is nested. Lists of single
    letters, which number options, stay."""
    if isinstance(value, str):
        return text_for(value)
    if isinstance(value, Mapping):
        return {name: with_texts(inner, text_for) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        if all(isinstance(letter, str) and len(letter) == 1 for letter in value):
            return value
        return [with_texts(inner, text_for) for inner in value]
    return value


def texts_in(value: Any) -> list[str]:
    """The texts in a field of a document, without lists of single letters, which number options."""
    texts: list[str] = []
    with_texts(value, texts.append)
    return texts


# Keys of a task's configuration that say its name, where its data are, or what a run may set.
_NAMES = r"task|task_alias|tag|group|class|dataset_.*|custom_dataset|\w*_split|num_fewshot|metadata"


def template_of(task: ConfigurableTask) -> str:
    """A task's configuration as JSON, without its name and the place where it was found."""
    config = {
        key: value for key, value in task.dump_config().items() if not re.fullmatch(_NAMES, key)
    }
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(config, sort_keys=True, default=str))


class RetrievingSampler(ContextSampler):
    """Retrieves demonstrations of a pool (`df`) for each document: the rows that are most similar to it, none of which
    is the document itself (`demonstrations.retrieve`).

    Attributes:
        document: the document that gets demonstrations next, set by `prompts.with_parts`.
        seed: the seed of the fixed demonstrations, and of the order of demonstrations if that is random.
        facts: facts about the documents' demonstrations for the results file.
    """

    def __init__(self, df: list[Doc], similar: Similar, task: ConfigurableTask) -> None:
        super().__init__(df)
        self.pool, self.similar, self._task, self.name = df, similar, task, str(task.config.task)
        self.document: Doc | None = None
        self.seed: int | None = None
        self.facts: dict[str, Any] = {}
        self._rankings: dict[str, Ranking] = {}  # by document, as `as_row` has it
        self._most = 0

    def set_rnd(self, rnd: int | None) -> RetrievingSampler:
        self.seed = rnd
        super().set_rnd(rnd)
        return self

    def sample(
        self, n: int, eval_doc: Doc | None = None, df: object = None, **kwargs: object
    ) -> list[Doc]:
        assert self.document is not None
        return [self.df[row] for row in self.retrieved(n, self.document)]

    def retrieved(self, n: int, document: Doc) -> list[int]:
        """The rows of the pool that are a document's demonstrations, in the order of the prompt. Raises an `InputError`
        if the pool has too few rows, or if a model is needed to compare them."""
        with naming(f"task {self.name!r}: demonstrations={self.similar}"):
            row = as_row(document)
            if row not in self._rankings or self._most < self.similar.most(n):
                self.give(n, *self.rank(n, self._task.eval_docs))
            return self._retriever.rows(
                self._rankings[row], n, self._fixed(n), f"{self.seed} {row}"
            )

    def rank(
        self, n: int, documents: Iterable[Doc], read: Callable[..., Features] | None = None
    ) -> tuple[dict[str, Ranking], dict[str, Any]]:
        """Rank the pool for documents that have n demonstrations each, or read the rankings from their file.

        Args:
            read: returns the features of a model for the pool and these documents.

        Returns:
            The arguments of `give`.
        """
        docs, retriever = list({as_row(doc): doc for doc in documents}.values()), self._retriever
        texts = self._texts(docs, self._task.config)
        features = None if read is None else read(self.df, docs)
        ranked, file = retriever.rank(texts, n, template_of(self._task), features)
        rankings, fixed = dict(zip(texts.rows, ranked, strict=True)), self._fixed(n)
        used = {
            i for row, ranking in rankings.items() for i in retriever.rows(ranking, n, fixed, row)
        }
        nearest = [max(ranking.values()) for ranking in ranked]
        return rankings, {
            "how": str(self.similar),
            "pool": {
                "rows": len(self.df),
                "distinct": len(retriever.distinct),
                "sha256": retriever.sha256,
            },
            "documents": len(ranked),
            "own_copies": sum(
                map(bool, retriever.copies(texts))
            ),  # documents whose copies in the pool are left out
            "rows_used": len(used),
            "similarity": round(
                sum(nearest) / len(nearest), 6
            ),  # the nearest row's, on average over documents
            "file": file,
        }

    def give(self, n: int, rankings: dict[str, Ranking], facts: dict[str, Any]) -> None:
        """Set the rankings by document for prompts of n demonstrations, and the facts about them (`rank`)."""
        self._rankings, self.facts, self._most = rankings, facts, self.similar.most(n)

    @functools.cached_property
    def _retriever(self) -> Retriever:
        from lm_eval_icl.demonstrations.retrieve import (
            Retriever,
        )  # imports scikit-learn and torch, for seconds

        task, per_label = self._task, self.similar.per_label
        if per_label and task.OUTPUT_TYPE != "multiple_choice":
            raise InputError("per_label needs a task with options.")
        labels = [label_of(task, doc) if per_label else 0 for doc in self.df]
        if len(known := [label for label in labels if label is not None]) < len(labels):
            raise InputError(
                f"per_label: the answer of row {labels.index(None)} is none of its options."
            )
        return Retriever(
            self.similar, self._texts(self.df, task.fewshot_cfg), pool_digest(self.df), known
        )

    def _texts(self, docs: Sequence[Doc], template: Any) -> Texts:
        from lm_eval_icl.demonstrations.retrieve import Texts

        def query(doc: Doc) -> str:
            text = (
                ""
                if self._task.multiple_input
                else str(self._task.doc_to_text(doc, template.doc_to_text))
            )
            return text if text.strip() else text_of(self._task, doc, template)

        with recording():
            texts = [text_of(self._task, doc, template) for doc in docs]
            return Texts([*map(as_row, docs)], texts, [*map(query, docs)])

    def _fixed(self, n: int) -> list[int]:
        """The rows of the first demonstrations of every prompt, which are the same for all documents."""
        if (fixed := self.similar.fixed) >= n:
            raise InputError(
                f"fixed={fixed}: must be less than the {n} demonstrations of a prompt."
            )
        return (
            FixedSampler(self.df, "stratified", self._task).set_rnd(self.seed).rows(fixed)
            if fixed
            else []
        )


def sampler_of(pool: list[Doc], how: Any, task: ConfigurableTask) -> ContextSampler:
    """The sampler that draws, chooses or retrieves a task's demonstrations as `how` says (`ICLTask`)."""
    with naming(f"task {str(task.config.task)!r}"):
        similar = read(how)
    return (
        RetrievingSampler(pool, similar, task)
        if isinstance(similar, Similar)
        else FixedSampler(pool, how, task)
    )


class FixedSampler(ContextSampler):
    """Draws n demonstrations of a pool (`df`) once, and returns the same ones for every document. The task evaluates
    none of them.

    Args:
        how: how demonstrations are chosen (see `ICLTask`).

    Attributes:
        method: the method by which a model chooses; None if demonstrations are drawn or come from a file.
        seed: the seed of the draw or of the choice.
    """

    def __init__(self, df: list[Doc], how: Any, task: ConfigurableTask) -> None:
        super().__init__(df)
        self.pool, self._task, self.name = df, task, str(task.config.task)
        with naming(f"task {self.name!r}"):
            method = read(how)
        self.method = None if isinstance(method, Similar) else method
        self.how = str(self.method or how)
        self._drawn: dict[int, tuple[list[int], int]] = {}
        self.seed: int | None = None

    def set_rnd(self, rnd: int | None) -> FixedSampler:
        self._drawn, self.seed = {}, rnd
        super().set_rnd(rnd)
        return self

    def give(self, rows: Sequence[int]) -> None:
        """Fix the demonstrations that a model has chosen: from now on, `sample(n)` returns them if n == len(rows)."""
        self._drawn[len(rows)] = list(rows), 0

    def rows(self, n: int, task: ConfigurableTask | None = None) -> list[int]:
        """The rows of the pool that are the demonstrations.

        Args:
            task: the task that the warning about replaced demonstrations names; None for no warning.
        """
        if n not in self._drawn:
            if self.method is not None:
                raise InputError(
                    f"task {self.name!r}: demonstrations={self.how} needs a model of this package to choose them. Make "
                    f"a file first (`lm-eval-icl select {self.method.name} ...`), and give demonstrations=FILE.json."
                )
            label, is_evaluated = self._task.doc_to_target, evaluated(self._task)
            with naming(f"task {self.name!r}: demonstrations={self.how}"):
                self._drawn[n] = draw(
                    self.df, n, self.how, label, is_evaluated, self.rnd, self.name, self.seed
                )
            if task is not None and (count := self._drawn[n][1]):
                text = "%s: %d of %d demonstrations are also evaluated, as rows or by their texts, and were replaced."
                log.warning(text, task.config.task, count, n)
        return self._drawn[n][0]

    def sample(
        self, n: int, eval_doc: Doc | None = None, df: object = None, **kwargs: object
    ) -> list[Doc]:
        return [self.df[row] for row in self.rows(n, self._task)]


def bind(task: Any, model: Any) -> None:
    """Tell a task which model is evaluated, if the task's requests depend on the model and are not made yet."""
    if hasattr(task, "bind") and not getattr(task, "requests_are_made", False):
        task.bind(model)


class GivenSampler(ContextSampler):
    """Returns the documents that it was given, as the demonstrations of every document.

    Args:
        pool: the documents from which they were chosen (`pool_of`); None if it is not needed.
        seed: the seed of the draw; None if the task only has a generator.
    """

    def __init__(
        self, df: list[Doc], pool: list[Doc] | None = None, seed: int | None = None
    ) -> None:
        super().__init__(df)
        self.pool, self.seed = pool, seed

    def rows(self, n: int, task: ConfigurableTask | None = None) -> list[int]:
        """As `FixedSampler.rows`: the first n rows."""
        return list(range(min(n, len(self.df))))

    def sample(
        self, n: int, eval_doc: Doc | None = None, df: object = None, **kwargs: object
    ) -> list[Doc]:
        return list(self.df)


def bbh_docs(dataset: Dataset) -> Dataset:
    """BBH as cloze, without rows of an unusual number of options for the subtask (as in Deep-Thinking, Table 6)."""
    rows = dataset.to_list()
    docs = bbh_cloze(rows, answers=sorted({row["target"] for row in rows}))
    usual = Counter(len(doc["choices"]) for doc in docs).most_common(1)[0][0]
    return Dataset.from_list([doc for doc in docs if len(doc["choices"]) == usual])


def bbh_cloze(rows: list[Doc], answers: list[str]) -> list[Doc]:
    """Convert rows with `input` and `target` to `question` (without options), `choices` (full texts), `answer` (index).

    Args:
        answers: the choices of rows that list no options.
    """
    docs = []
    for row in rows:
        question, _, options = row["input"].partition("\nOptions:")
        choices = [
            text.strip() for text in re.findall(r"^(?:\([A-Z]\)|-) (.*)", options, re.MULTILINE)
        ] or answers
        target = row["target"].strip()
        letter = re.fullmatch(r"\(([A-Z])\)", target)
        # Three of BBH's targets are neither a letter nor a choice. Their rows have an unusual number of options and are
        # left out by `bbh_docs`.
        answer = (
            ord(letter[1]) - ord("A")
            if letter
            else choices.index(target)
            if target in choices
            else None
        )
        docs.append({"question": question.strip(), "choices": choices, "answer": answer})
    return docs
