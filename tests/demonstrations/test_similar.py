"""Retrieved demonstrations, against literal computations, rank by rank."""

import math
import re
from random import Random

import numpy as np
import pytest

from lm_eval_icl.demonstrations.how import read
from lm_eval_icl.demonstrations.retrieve import BM25, Retriever, Texts, dpp
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError
from tests.evaluation import WORDS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EVAL_ICL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "demonstrations"


def sentences(n, seed, words=(3, 9)):
    rnd = Random(seed)
    return [" ".join(rnd.choices(WORDS, k=rnd.randint(*words))) for _ in range(n)]


def texts(queries):
    return Texts([f"row {query}" for query in queries], queries, queries)


def bm25(query, pool):
    """The formula of `BM25`, word by word."""
    pool = [re.findall(r"\w+", text.lower()) for text in pool]
    words = re.findall(r"\w+", query.lower())
    mean = sum(map(len, pool)) / len(pool)
    scores = []
    for text in pool:
        score = 0.0
        for word in words:
            having = sum(word in other for other in pool)
            idf = math.log(1 + (len(pool) - having + 0.5) / (having + 0.5))
            score += (
                idf * text.count(word) / (text.count(word) + 1.5 * (0.25 + 0.75 * len(text) / mean))
            )
        scores.append(score)
    return scores


def test_bm25_is_the_formula():
    pool = sentences(60, 0)
    queries = [*sentences(20, 1), "Film, FILM: film!", "unknown words", "?"]
    similarity = BM25(pool, queries)
    for i, query in enumerate(queries):
        assert similarity.scores(i) == pytest.approx(bm25(query, pool), abs=1e-12)


def test_dpp_maximizes_the_determinant_pick_by_pick():
    generator = np.random.default_rng(1)
    vectors = generator.normal(size=(12, 6))
    relevance = np.sort(generator.random(12))[::-1]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = (unit @ unit.T + 1) / 2
    quality = np.exp(relevance / 0.2)
    kernel = quality[:, None] * similarity * quality / quality.max() ** 2
    expected = []
    for _ in range(6):
        rest = [row for row in range(12) if row not in expected]
        expected.append(
            max(
                rest,
                key=lambda row: np.linalg.det(kernel[np.ix_([*expected, row], [*expected, row])]),
            )
        )
    order = dpp(relevance, similarity)
    assert order[:6] == expected
    assert sorted(order) == list(range(12))
    assert order != list(range(12))
    assert dpp(np.ones(3), np.ones((3, 3))) == [0, 1, 2]  # nothing differs: the most relevant first


@pytest.mark.parametrize("by", ["bm25", "features"])
def test_a_way_is_what_it_says_rank_by_rank(by):
    pool = sentences(80, 2)
    queries = sentences(9, 3)
    labels = [i % 3 for i in range(80)]
    rows = [pool.index(text) for text in dict.fromkeys(pool)]  # the first of copies
    generator = np.random.default_rng(2)
    vectors = generator.normal(size=(80, 4))
    of_queries = generator.normal(size=(9, 4))
    vectors[rows[3]] = 2 * vectors[rows[9]]  # a tie, but for rounding

    def scores(i):
        if by == "bm25":
            return bm25(queries[i], [pool[row] for row in rows])
        document = of_queries[i]
        return [
            row @ document / math.sqrt((row @ row) * (document @ document)) for row in vectors[rows]
        ]

    def retrieved(n, front=(), **ways):
        way = Retriever(read({"similar": {"by": by, **ways}}), texts(pool), "f" * 64, labels)
        found = way.rank(texts(queries), n, "", ({}, lambda rows: (vectors[rows], of_queries)))[0]
        return [way.rows(found[i], n, front, f"seed {i}") for i in range(9)]

    expected = []
    for i in range(9):
        values = np.round(scores(i), 9)
        expected.append(
            [
                rows[place]
                for place in sorted(range(len(rows)), key=lambda place: (-values[place], place))
            ]
        )
    assert retrieved(len(rows), order="first") == expected
    assert retrieved(4) == [order[:4][::-1] for order in expected]
    shuffled = retrieved(8, order="random")
    assert [sorted(found) for found in shuffled] == [sorted(order[:8]) for order in expected]
    assert shuffled == retrieved(8, order="random") != [order[:8] for order in expected]
    of_label = [
        [next(row for row in order if labels[row] == label) for label in range(3)]
        for order in expected
    ]
    assert [sorted(found) for found in retrieved(3, per_label=1)] == [
        sorted(picked) for picked in of_label
    ]
    fixed = [expected[0][0], expected[1][2], 7]
    closed = {pool.index(pool[row]) for row in fixed}
    assert retrieved(5, fixed, fixed=3, order="first") == [
        [*fixed, *[row for row in order if row not in closed][:2]] for order in expected
    ]
    diverse = retrieved(4, diverse="dpp", order="first")
    assert all(expected[i][0] == found[0] for i, found in enumerate(diverse))
    assert diverse != retrieved(4, order="first")


def test_no_document_is_among_its_demonstrations():
    """Neither a row that says the same, nor what stands for a row that is the same but says something else."""
    pool = Texts(["r0", "r1", "r2", "r3", "r4", "r5"], ["a", "b", "a", "c", "d", "e"], [""] * 6)
    documents = Texts(["r9", "r2", "r3", "r8"], ["a", "z", "y", "x"], [""] * 4)
    way = Retriever(Similar(by="features"), pool, "0" * 64, [0] * 6)
    assert way.distinct == [0, 1, 3, 4, 5]
    assert way.copies(documents) == [{0}, {0}, {3}, set()]
    ranks, _ = way.rank(
        documents, 3, "", ({}, lambda rows: (np.eye(6)[rows], np.tile(np.arange(6, 0, -1), (4, 1))))
    )
    assert [[*ranking] for ranking in ranks] == [
        [1, 3, 4, 5],
        [1, 3, 4, 5],
        [0, 1, 4, 5],
        [0, 1, 3, 4, 5],
    ]
    with pytest.raises(
        InputError, match="5 demonstrations are asked for, and the pool has 4: lower"
    ):
        way.rows(ranks[0], 5, [], "")


def test_a_ranking_is_kept_for_most_numbers_of_demonstrations(cache):
    ranked = []

    def rank(n, sha="a" * 64, model="m", **ways):
        def vectors(rows):
            ranked.append(rows)
            return np.eye(200)[rows], np.ones((2, 200))

        way = Retriever(
            Similar(by="features", **ways), texts(sentences(200, 5, (9, 12))), sha, [0, 1] * 100
        )
        ranks, file = way.rank(texts(["one", "two"]), n, "", ({"model": model}, vectors))
        assert (cache / file).is_file()
        assert sha[:16] in file
        return ranks

    first = rank(4)
    assert rank(128) == rank(1, order="first", fixed=0) == first
    assert len(ranked) == 1
    assert len(first[0]) == 128
    assert len(rank(129)[0]) == 200
    assert len(ranked) == 2
    for others in (
        {"sha": "b" * 64},
        {"model": "k"},
        {"pool": 150},
        {"per_label": 2},
        {"diverse": "dpp"},
    ):
        rank(4, **others)
    assert list(map(len, ranked)) == [200, 200, 200, 200, 150, 200, 200]
    assert len(list(cache.iterdir())) == 7


@pytest.mark.parametrize(
    "way, says",
    [
        (
            "similar:b=bm25",
            "demonstrations=similar:b=bm25: similar: unknown argument 'b': did you mean 'by'",
        ),
        (
            {"similar": {"diverse": "dpp", "per_label": 1}},
            "similar: diverse and per_label cannot be combined",
        ),
        ("similr", "did you mean 'similar'"),
    ],
)
def test_what_cannot_be_is_one_line(way, says):
    with pytest.raises(InputError, match=re.escape(says)):
        read(way)
    ways = [
        "similar:fixed=8:by=a/b",
        "similar:by=a/b:order=last:fixed=8",
        {"similar": {"by": "a/b", "fixed": 8}},
    ]
    assert {str(read(way)) for way in ways} == {"similar:by=a/b:fixed=8"}
    assert str(read("similar")) == "similar"
