"""Retrieved demonstrations, against literal computations, rank by rank."""

import math
import re
import sys
from importlib.machinery import ModuleSpec
from random import Random
from types import ModuleType

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
            count = text.count(word)
            score += idf * count / (count + 1.5 * (0.25 + 0.75 * len(text) / mean))
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

    def determinant(row):
        rows = [*expected, row]
        return np.linalg.det(kernel[np.ix_(rows, rows)])

    for _ in range(6):
        rest = [row for row in range(12) if row not in expected]
        expected.append(max(rest, key=determinant))
    order = dpp(relevance, similarity)
    assert order[:6] == expected
    assert sorted(order) == list(range(12))
    assert order != list(range(12))
    assert dpp(np.ones(3), np.ones((3, 3))) == [0, 1, 2]  # nothing differs: the most relevant first


LABELS = [i % 3 for i in range(80)]
POOL = sentences(80, 2)
QUERIES = sentences(9, 3)
DISTINCT = [POOL.index(text) for text in dict.fromkeys(POOL)]  # the first of copies


GENERATOR = np.random.default_rng(2)
OF_POOL = GENERATOR.normal(size=(80, 4))
OF_QUERIES = GENERATOR.normal(size=(9, 4))
OF_POOL[DISTINCT[3]] = 2 * OF_POOL[DISTINCT[9]]  # a tie, but for rounding


def scores_by_features(query, rows):
    return [row @ query / math.sqrt((row @ row) * (query @ query)) for row in rows]


@pytest.fixture(params=["bm25", "features"])
def by(request):
    return request.param


@pytest.fixture
def expected(by):
    """For each query, all rows in their order."""
    orders = []
    for i, query in enumerate(QUERIES):
        if by == "bm25":
            scores = bm25(query, [POOL[row] for row in DISTINCT])
        else:
            scores = scores_by_features(OF_QUERIES[i], OF_POOL[DISTINCT])
        rounded = np.round(scores, 9)
        places = sorted(range(len(DISTINCT)), key=lambda place: (-rounded[place], place))
        orders.append([DISTINCT[place] for place in places])
    return orders


@pytest.fixture
def retrieved(by):
    """A function: the demonstrations of each query."""

    def retrieve(n, front=(), **ways):
        way = Retriever(read({"similar": {"by": by, **ways}}), texts(POOL), "f" * 64, LABELS)
        features = ({}, lambda rows: (OF_POOL[rows], OF_QUERIES))
        ranks, _ = way.rank(texts(QUERIES), n, "", features)
        return [way.rows(ranks[i], n, front, f"seed {i}") for i in range(len(QUERIES))]

    return retrieve


def test_the_most_similar_row_comes_last_or_first(retrieved, expected):
    assert retrieved(len(DISTINCT), order="first") == expected
    assert retrieved(4) == [order[:4][::-1] for order in expected]


def test_a_random_order_is_that_of_the_seed(retrieved, expected):
    shuffled = retrieved(8, order="random")
    assert [sorted(rows) for rows in shuffled] == [sorted(order[:8]) for order in expected]
    assert shuffled == retrieved(8, order="random") != [order[:8] for order in expected]


def test_every_label_has_its_most_similar_row(retrieved, expected):
    for rows, order in zip(retrieved(3, per_label=1), expected, strict=True):
        first_of_labels = {}
        for row in order:
            first_of_labels.setdefault(LABELS[row], row)
        assert sorted(rows) == sorted(first_of_labels.values())


def test_fixed_rows_stand_in_front(retrieved, expected):
    fixed = [expected[0][0], expected[1][2], 7]
    closed = {POOL.index(POOL[row]) for row in fixed}
    all_rows = retrieved(5, fixed, fixed=3, order="first")
    for rows, order in zip(all_rows, expected, strict=True):
        similar = [row for row in order if row not in closed]
        assert rows == [*fixed, *similar[:2]]


def test_diverse_rows_begin_with_the_most_similar(retrieved, expected):
    diverse = retrieved(4, diverse="dpp", order="first")
    assert [rows[0] for rows in diverse] == [order[0] for order in expected]
    assert diverse != retrieved(4, order="first")


def test_no_document_is_among_its_demonstrations():
    """Neither a row that says the same, nor a copy that stands for a row that is the document."""
    pool = Texts([*"012345"], [*"abacde"], [""] * 6)
    documents = Texts([*"9238"], [*"azyx"], [""] * 4)
    way = Retriever(Similar(by="features"), pool, "0" * 64, [0] * 6)
    assert way.distinct == [0, 1, 3, 4, 5]
    assert way.copies(documents) == [{0}, {0}, {3}, set()]
    of_documents = np.tile(np.arange(6, 0, -1), (4, 1))
    ranks, _ = way.rank(documents, 3, "", ({}, lambda rows: (np.eye(6)[rows], of_documents)))
    expected = "1345 1345 0145 01345".split()
    assert ["".join(map(str, rows)) for rows in ranks] == expected
    words = "5 demonstrations are asked for, and the pool has 4: lower"
    with pytest.raises(InputError, match=words):
        way.rows(ranks[0], 5, [], "")


def test_a_ranking_is_kept_for_most_numbers_of_demonstrations(cache):
    ranked = []

    def rank(n, sha="a" * 64, model="m", **ways):
        def vectors(rows):
            ranked.append(rows)
            return np.eye(200)[rows], np.ones((2, 200))

        pool = texts(sentences(200, 5, (9, 12)))
        way = Retriever(Similar(by="features", **ways), pool, sha, [0, 1] * 100)
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
    rank(4, sha="b" * 64)
    rank(4, model="k")
    rank(4, pool=150)
    rank(4, per_label=2)
    rank(4, diverse="dpp")
    assert list(map(len, ranked)) == [200, 200, 200, 200, 150, 200, 200]
    assert len(list(cache.iterdir())) == 7


VECTORS = dict(zip([*POOL, *QUERIES], [*OF_POOL, *OF_QUERIES], strict=True))


class SentenceTransformer:
    """A model of sentence-transformers that is no more than a table."""

    def __init__(self, name):
        if name != "a/table":
            raise OSError("there is no such model")

    def encode(self, sentences, show_progress_bar):
        return np.array([VECTORS[sentence] for sentence in sentences])


def test_rows_are_compared_by_vectors_of_sentences(monkeypatch):
    library = ModuleType("sentence_transformers")
    library.__spec__ = ModuleSpec(library.__name__, None)
    library.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, library.__name__, library)

    def rank(by):
        way = Retriever(Similar(by=by, order="first"), texts(POOL), "f" * 64, LABELS)
        return way.rank(texts(QUERIES), 4, "", None)[0]

    for query, ranking in zip(OF_QUERIES, rank("a/table"), strict=True):
        scores = scores_by_features(query, np.array([VECTORS[POOL[row]] for row in ranking]))
        assert list(ranking.values()) == pytest.approx(scores, abs=1e-9)
        assert scores == sorted(scores, reverse=True)
    says = "by=absent: sentence-transformers cannot load this model .OSError: .*by=bm25 or by=feat"
    with pytest.raises(InputError, match=says):
        rank("absent")


def test_what_cannot_be_is_one_line():
    with pytest.raises(InputError, match="=similar:b=bm25: similar: unknown argument 'b': did you"):
        read("similar:b=bm25")
    with pytest.raises(InputError, match="similar: diverse and per_label cannot be combined"):
        read({"similar": {"diverse": "dpp", "per_label": 1}})
    with pytest.raises(InputError, match="did you mean 'similar'"):
        read("similr")
    with pytest.raises(InputError, match="no document of the pool has words, which by=bm25"):
        BM25(["?", " "], ["a"])
    with pytest.raises(InputError, match=r"by=features needs a model that lm_eval.evaluate loads"):
        of_features = read("similar:by=features")
        Retriever(of_features, texts(POOL), "", LABELS).rank(texts(QUERIES), 2, "", None)


def test_a_way_has_one_name():
    same = ["similar:fixed=8:by=a/b", "similar:by=a/b:order=last:fixed=8"]
    names = {str(read(way)) for way in [*same, {"similar": {"by": "a/b", "fixed": 8}}]}
    assert names == {"similar:by=a/b:fixed=8"}
    assert str(read("similar")) == "similar"
