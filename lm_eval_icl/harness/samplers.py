"""The samplers of demonstrations of this package: demonstrations are drawn once, retrieved for each
document, or given."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.demonstrations.draw import draw, pool_digest
from lm_eval_icl.demonstrations.how import SelectionMethod, read
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError, log, naming
from lm_eval_icl.files import as_json
from lm_eval_icl.harness.documents import (
    Doc,
    copy_text,
    evaluated,
    label_of,
    query_of,
    template_of,
)
from lm_eval_icl.harness.prompts import current_document, recording, structure_error
from lm_eval_icl.prompts.prompt import FewShotPrompt

if TYPE_CHECKING:
    from lm_eval_icl.demonstrations.retrieve import Features, Ranking, Retriever, Texts


class PoolSampler(ContextSampler, ABC):
    """A sampler that knows the documents that demonstrations are taken from, and the seed.

    Attributes:
        pool: the documents; None if they are those of the task.
        seed: the seed of random draws; None if only a generator is known, as in lm-eval's samplers.
    """

    def __init__(
        self, df: list[Doc], pool: list[Doc] | None = None, seed: int | None = None
    ) -> None:
        super().__init__(df)
        self.pool = pool
        self.seed = seed

    def set_rnd(self, rnd: int | None) -> Self:
        self.seed = rnd
        super().set_rnd(rnd)
        return self

    def sample(
        self, n: int, eval_doc: Doc | None = None, df: object = None, **kwargs: object
    ) -> list[Doc]:
        return [self.df[row] for row in self.rows(n)]

    @abstractmethod
    def rows(self, n: int, quiet: bool = False) -> list[int]:
        """The rows of `df` that are the demonstrations of the document whose prompt is being built.

        Args:
            quiet: no warning is given.
        """


def pool_sampler(task: Any) -> PoolSampler | None:
    """The sampler of a task, if it is one of this package."""
    sampler = getattr(task, "sampler", None)
    return sampler if isinstance(sampler, PoolSampler) else None


def pool_of(task: ConfigurableTask) -> list[Doc]:
    """The documents that a task takes demonstrations from. They are read once, which takes
    seconds."""
    sampler = pool_sampler(task)
    if sampler is None or sampler.pool is None:
        return list(task.fewshot_docs() or [])
    return sampler.pool


def sampler_of(pool: list[Doc], how: Any, task: ConfigurableTask) -> PoolSampler:
    """The sampler that draws, chooses or retrieves a task's demonstrations as `how` says
    (`tasks.ICLTask`)."""
    with naming(f"task {str(task.config.task)!r}"):
        way = read(how)
    if isinstance(way, Similar):
        return RetrievingSampler(pool, way, task)
    return FixedSampler(pool, str(way or how), task, way)


class GivenSampler(PoolSampler):
    """Returns the documents that it was given (`df`), as the demonstrations of every document."""

    def rows(self, n: int, quiet: bool = False) -> list[int]:
        return list(range(min(n, len(self.df))))


def prompt_of(
    task: ConfigurableTask, doc: Doc, demonstrations: list[Doc], **arguments: Any
) -> FewShotPrompt:
    """The prompt of a document after these demonstrations, which the task's sampler then returns.

    Args:
        arguments: as for `ConfigurableTask.fewshot_context`.
    """
    task.sampler = GivenSampler(demonstrations)
    prefix = task.doc_to_prefix(doc)
    with recording():
        prompt = task.fewshot_context(doc, len(demonstrations), gen_prefix=prefix, **arguments)
    if not isinstance(prompt, FewShotPrompt):
        raise structure_error(str(task.config.task))
    return prompt


class FixedSampler(PoolSampler):
    """Draws n demonstrations of a pool (`df`) once, and returns them for every document. The task
    evaluates none of them.

    Args:
        how: the way in which they are drawn or chosen, as text (see `tasks.ICLTask`).
        method: the method by which a model chooses them; None if they are drawn or come from a
            file.
    """

    def __init__(
        self, df: list[Doc], how: str, task: ConfigurableTask, method: SelectionMethod | None = None
    ) -> None:
        super().__init__(df, df)
        self.how = how
        self.method = method
        self.name = str(task.config.task)
        self._task = task
        self._drawn: dict[int, list[int]] = {}

    def set_rnd(self, rnd: int | None) -> Self:
        self._drawn = {}
        return super().set_rnd(rnd)

    def give(self, rows: Sequence[int]) -> None:
        """Fix the demonstrations that a model has chosen: from now on, `sample(n)` returns them if
        n == len(rows)."""
        self._drawn[len(rows)] = list(rows)

    def rows(self, n: int, quiet: bool = False) -> list[int]:
        if n in self._drawn:
            return self._drawn[n]
        if self.method is not None:
            raise InputError(
                f"task {self.name!r}: demonstrations={self.how} needs a model of this package to "
                f"choose them. Make a file first (`lm-eval-icl select {self.method.name} ...`), and "
                "give demonstrations=FILE.json."
            )
        task = self._task
        with naming(f"task {self.name!r}: demonstrations={self.how}"):
            rows, replaced = draw(
                self.df,
                n,
                self.how,
                task.doc_to_target,
                evaluated(task),
                copy.copy(self.rnd),  # another number of demonstrations may be drawn later
                self.name,
                self.seed,
            )
        if replaced and not quiet:
            log.warning(
                "%s: %d of %d demonstrations are also evaluated, as rows or by their texts, and "
                "were replaced.",
                self.name,
                replaced,
                n,
            )
        self._drawn[n] = rows
        return rows


class RetrievingSampler(PoolSampler):
    """Retrieves demonstrations of a pool (`df`) for each document: the rows that are most similar
    to it, none of which is the document itself (`demonstrations.retrieve`).

    Attributes:
        facts: facts about the documents' demonstrations for the results file.
    """

    def __init__(self, df: list[Doc], similar: Similar, task: ConfigurableTask) -> None:
        super().__init__(df, df)
        self.similar = similar
        self.name = str(task.config.task)
        self.facts: dict[str, Any] = {}
        self._task = task
        self._rankings: dict[str, Ranking] = {}  # by document, as `as_json` has it
        self._most = 0  # the number of rows that each ranking has at least

    def rows(self, n: int, quiet: bool = False) -> list[int]:
        return self.retrieved(n, current_document())

    def retrieved(self, n: int, document: Doc) -> list[int]:
        """The rows of a document's demonstrations, in the order of the prompt.

        Raises:
            InputError: the pool has too few rows, or a model is needed to compare them.
        """
        with naming(f"task {self.name!r}: demonstrations={self.similar}"):
            row = as_json(document)
            if row not in self._rankings or self._most < self.similar.most(n):
                self.give(n, *self.rank(n, self._task.eval_docs))
            ranking = self._rankings[row]
            return self._retriever.rows(ranking, n, self._fixed(n), f"{self.seed} {row}")

    def rank(
        self, n: int, documents: Iterable[Doc], read: Callable[..., Features] | None = None
    ) -> tuple[dict[str, Ranking], dict[str, Any]]:
        """Rank the pool for documents that have n demonstrations each, or read the rankings from
        their file.

        Args:
            read: returns the features of a model for the pool and these documents.

        Returns:
            The arguments of `give`.
        """
        retriever = self._retriever
        docs = list({as_json(doc): doc for doc in documents}.values())
        texts = self._texts(docs, self._task.config)
        features = None if read is None else read(self.df, docs)
        ranked, file = retriever.rank(texts, n, template_of(self._task), features)
        rankings = dict(zip(texts.rows, ranked, strict=True))
        fixed = self._fixed(n)
        rows = (retriever.rows(ranking, n, fixed, row) for row, ranking in rankings.items())
        used = set[int]().union(*rows)
        nearest = [max(ranking.values()) for ranking in ranked]
        return rankings, {
            "how": str(self.similar),
            "pool": {
                "rows": len(self.df),
                "distinct": len(retriever.distinct),
                "sha256": retriever.pool_digest,
            },
            "documents": len(ranked),
            # Documents whose copies in the pool are left out.
            "own_copies": sum(map(bool, retriever.copies(texts))),
            "rows_used": len(used),
            # That of the nearest row, on average over documents.
            "similarity": round(sum(nearest) / len(nearest), 6),
            "file": file,
        }

    def give(self, n: int, rankings: dict[str, Ranking], facts: dict[str, Any]) -> None:
        """Set the rankings by document for prompts of n demonstrations, and the facts about them
        (`rank`)."""
        self._rankings = rankings
        self._most = self.similar.most(n)
        self.facts = facts

    @functools.cached_property
    def _retriever(self) -> Retriever:
        # The import takes seconds, for scikit-learn and torch.
        from lm_eval_icl.demonstrations.retrieve import Retriever

        task = self._task
        labels = [0] * len(self.df)
        if self.similar.per_label:
            if task.OUTPUT_TYPE != "multiple_choice":
                raise InputError("per_label needs a task with options.")
            for row, doc in enumerate(self.df):
                label = label_of(task, doc)
                if label is None:
                    raise InputError(f"per_label: the answer of row {row} is none of its options.")
                labels[row] = label
        texts = self._texts(self.df, task.fewshot_cfg)
        return Retriever(self.similar, texts, pool_digest(self.df), labels)

    def _texts(self, docs: Sequence[Doc], template: Any) -> Texts:
        from lm_eval_icl.demonstrations.retrieve import Texts

        rows = [as_json(doc) for doc in docs]
        with recording():  # in which templates are compiled once
            texts = [copy_text(self._task, doc) for doc in docs]
            queries = [query_of(self._task, doc, template) for doc in docs]
        for place, query in enumerate(queries):
            if not query.strip():
                queries[place] = texts[place]
        return Texts(rows, texts, queries)

    def _fixed(self, n: int) -> list[int]:
        """The rows of the first demonstrations of every prompt, the same for all documents."""
        fixed = self.similar.fixed
        if fixed >= n:
            raise InputError(
                f"fixed={fixed}: must be less than the {n} demonstrations of a prompt."
            )
        if not fixed:
            return []
        drawn = FixedSampler(self.df, "stratified", self._task).set_rnd(self.seed)
        return drawn.rows(fixed, quiet=True)
