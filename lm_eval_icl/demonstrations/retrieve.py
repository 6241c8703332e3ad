"""Retrieves demonstrations from a pool. The ranking of the pool for a task's documents is kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import csc_array, diags_array
from scipy.sparse.linalg import norm

from lm_eval_icl import version
from lm_eval_icl.demonstrations.kept import folder
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError, refusing, require
from lm_eval_icl.files import read_json, write_atomically

# The rows of a pool in the order in which they are to be picked for a document -> their similarities to the document.
Ranking = dict[int, float]
# A model's identity, and a function that returns the model's hidden states: of the pool's rows with the given numbers,
# (N, d), and of all documents, (D, d).
Features = tuple[Mapping[str, Any], Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]]
_DECIMALS = (
    9  # similarities are rounded to these decimals; if two are equal, the lower row comes first
)


class BM25:
    """BM25 (Robertson and Zaragoza 2009) as in Lucene, of words in lower case, with k1 = 1.5 and b = 0.75.

    The pool has N texts, of which n_w contain the word w. f_w is how often w occurs in a text of L words:

        score = sum of ln(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f_w / (f_w + k1 * (1 - b + b * L / mean L))

    The sum is over the words of the query. A word that occurs several times counts as often.
    """

    def __init__(self, pool: Sequence[str], documents: Sequence[str]) -> None:
        require("bm25s", "retrieval", "by=bm25")
        import bm25s

        logging.getLogger("bm25s").setLevel(
            logging.WARNING
        )  # its other messages would fill lm-eval's log
        words, self._documents = (
            [re.findall(r"\w+", text.lower()) for text in part] for part in (pool, documents)
        )
        if not any(words):
            raise InputError("no document of the pool has words, which by=bm25 compares.")
        self._index = bm25s.BM25(k1=1.5, b=0.75, method="lucene", dtype="float64")
        self._index.index(words, show_progress=False)
        parts, shape = self._index.scores, (len(pool), len(self._index.scores["indptr"]) - 1)
        weights = csc_array((parts["data"], parts["indices"], parts["indptr"]), shape=shape).tocsr()
        lengths = norm(weights, axis=1)
        self._weights = diags_array(1 / np.where(lengths, lengths, 1)).tocsr() @ weights

    def scores(self, document: int) -> np.ndarray:
        """(N,) the similarity of each row of the pool to a document."""
        known = [word for word in self._documents[document] if word in self._index.vocab_dict]
        scores: np.ndarray = (
            self._index.get_scores(known) if known else np.zeros(self._weights.shape[0])
        )
        return scores

    def relevance(self, scores: np.ndarray) -> np.ndarray:
        """The scores divided by the highest score: numbers from 0 to 1."""
        return scores / max(scores.max(), 1e-300)

    def between(self, rows: np.ndarray) -> np.ndarray:
        """(n, n) the similarities of rows to each other, from 0 to 1: the cosines of the vectors of word weights."""
        return np.asarray((self._weights[rows] @ self._weights[rows].T).todense())


class Cosine:
    """The cosine of vectors, (N, d) of the pool and (D, d) of documents, with the methods of `BM25`."""

    def __init__(self, pool: np.ndarray, documents: np.ndarray) -> None:
        self._pool = self._unit_vectors(pool)
        self._documents = self._unit_vectors(documents)

    @staticmethod
    def _unit_vectors(vectors: np.ndarray) -> np.ndarray:
        exact = vectors.astype(np.float64)
        lengths = np.linalg.norm(exact, axis=1, keepdims=True)
        return exact / np.where(lengths, lengths, 1)

    def scores(self, document: int) -> np.ndarray:
        return self._pool @ self._documents[document]

    def relevance(self, scores: np.ndarray) -> np.ndarray:
        return (scores + 1) / 2

    def between(self, rows: np.ndarray) -> np.ndarray:
        return self.relevance(self._pool[rows] @ self._pool[rows].T)


def sentence_vectors(model: str, texts: Sequence[str]) -> np.ndarray:
    """(n, d) the vectors of texts by a model of sentence-transformers. An `InputError` says if it is missing."""
    require("sentence_transformers", "sentences", f"by={model}")
    with refusing(
        f"by={model}: sentence-transformers cannot load this model",
        "Or give by=bm25 or by=features.",
    ):
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(model)
    vectors: np.ndarray = encoder.encode(list(texts), show_progress_bar=False)
    return vectors


def dpp(relevance: np.ndarray, similarity: np.ndarray) -> list[int]:
    """The order in which a determinantal point process picks rows: relevant rows that differ from earlier picks.

    The kernel is r_i s_ij r_j with r = exp(relevance / 0.2), as in OpenICL's retriever (Ye et al. 2023), which draws
    sets from it. Here, each pick makes the determinant of the picked rows' kernel as large as possible (Chen et al.
    2018), so the first n rows are the picks for n. Rows that add nothing to the determinant come last.

    Args:
        relevance: (n,) numbers from 0 to 1 in descending order.
        similarity: (n, n) numbers from 0 to 1.
    """
    quality = np.exp((relevance - relevance.max()) / 0.2)
    kernel = quality[:, None] * similarity * quality
    gains, bases, picked = kernel.diagonal().copy(), np.zeros((0, len(quality))), list[int]()
    while len(picked) < len(quality) and gains.max() > 1e-10:
        best = int(gains.argmax())
        base = (kernel[best] - bases[:, best] @ bases) / np.sqrt(gains[best])
        picked, bases, gains = [*picked, best], np.vstack([bases, base]), gains - base**2
        gains[picked] = -np.inf
    return [*picked, *(row for row in range(len(quality)) if row not in picked)]


@dataclass(frozen=True)
class Texts:
    """Some documents, each as three texts."""

    rows: Sequence[str]  # the document as JSON, with all fields
    texts: Sequence[str]  # the rendered document, by which copies are recognized (`draw.as_text`)
    queries: Sequence[str]  # the rendered query, by which the document is retrieved


class Retriever:
    """Retrieves the rows of a pool that are similar to documents. If several rows have the same text, only the first is
    retrieved. A row that is the document itself, or has its text, is not retrieved for it.

    Args:
        sha256: the digest of the pool (`draw.pool_digest`).
        labels: the label of each row; zeros if labels are not used.

    Attributes:
        distinct: the rows that can be retrieved.
    """

    def __init__(self, similar: Similar, pool: Texts, sha256: str, labels: Sequence[int]) -> None:
        if similar.pool > len(pool.rows):
            raise InputError(f"pool={similar.pool}: the few-shot split has {len(pool.rows)} rows.")
        self.similar, self.pool, self.sha256, self.labels = similar, pool, sha256, labels
        members = sorted(
            Random("pool").sample(range(len(pool.rows)), similar.pool or len(pool.rows))
        )
        self._by_text = {
            pool.texts[row]: row for row in reversed(members)
        }  # the first row of each text
        self._by_row = {pool.rows[row]: self._by_text[pool.texts[row]] for row in members}
        self.distinct = sorted(self._by_text.values())

    def copies(self, documents: Texts) -> list[set[int]]:
        """For each document, the rows in `distinct` that have its text, or the text of the row that is the document."""
        pairs = zip(documents.rows, documents.texts, strict=True)
        return [
            {self._by_row.get(row, -1), self._by_text.get(text, -1)} - {-1} for row, text in pairs
        ]

    def rank(
        self, documents: Texts, n: int, prompts: str, features: Features | None
    ) -> tuple[list[Ranking], str]:
        """The rankings for documents with n demonstrations each, read from their file or made now, and the name of the
        file. `prompts` is the task's configuration as a text, with the templates."""
        similar, most = self.similar, self.similar.most(n)
        if similar.by == "features" and features is None:
            raise InputError(
                "by=features needs a model that lm_eval.evaluate loads from a checkpoint."
            )
        model = features[0] if features is not None and similar.by == "features" else None
        settings = [similar.by, bool(similar.per_label), similar.diverse, similar.pool, most, model]
        about = json.dumps(
            [settings, prompts, *documents.rows, version.version()], sort_keys=True, default=str
        )
        name = re.sub(r"[^\w.-]+", "-", similar.by)[-40:]
        path = (
            folder()
            / f"{name}-{self.sha256[:16]}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
        )
        if (kept := read_json(path)) is not None:
            return [dict(zip(*ranking, strict=True)) for ranking in kept], path.name
        rankings = self._ranked(documents, most, features)
        with contextlib.suppress(
            OSError
        ):  # if the file cannot be written, the next run ranks again
            write_atomically(
                path, json.dumps([[[*ranking], [*ranking.values()]] for ranking in rankings])
            )
        return rankings, path.name

    def _ranked(self, documents: Texts, most: int, features: Features | None) -> list[Ranking]:
        distinct = np.array(self.distinct)
        labels = (
            np.array(self.labels)[distinct]
            if self.similar.per_label
            else np.zeros(len(distinct), dtype=int)
        )
        queries = [self.pool.queries[row] for row in self.distinct]
        similarity: BM25 | Cosine
        if self.similar.by == "bm25":
            similarity = BM25(queries, documents.queries)
        elif features is not None and self.similar.by == "features":
            similarity = Cosine(*features[1](self.distinct))
        else:
            vectors = sentence_vectors(self.similar.by, [*queries, *documents.queries])
            similarity = Cosine(vectors[: len(queries)], vectors[len(queries) :])
        rankings = []
        for document, copies in enumerate(self.copies(documents)):
            scores = np.round(similarity.scores(document), _DECIMALS)
            order = np.argsort(-scores, kind="stable")
            order = order[~np.isin(distinct[order], [*copies])]
            order = order[
                pd.Series(labels[order]).groupby(labels[order]).cumcount().to_numpy() < most
            ]
            if self.similar.diverse and len(order):
                order = order[dpp(similarity.relevance(scores[order]), similarity.between(order))]
            rankings.append(
                dict(zip(distinct[order].tolist(), scores[order].tolist(), strict=True))
            )
        return rankings

    def rows(self, ranking: Ranking, n: int, fixed: Collection[int], seed: str) -> list[int]:
        """The n demonstrations of a document in the order of the prompt. The `fixed` rows come first."""
        closed = {self._by_text.get(self.pool.texts[row], -1) for row in fixed}
        picked = self.similar.pick(ranking, self.labels, n - len(fixed), closed)
        return [*fixed, *self.similar.in_prompt_order(picked, seed)]
