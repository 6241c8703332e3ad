"""Decision rules against their equations, computed literally, in probabilities and with loops."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_icl.decisions.rule import log_normalized
from lm_eval_icl.decisions.rules import (
    KNN,
    PMI,
    BatchCalibration,
    Contextual,
    Hidden,
    read,
    rendered,
    written,
)
from lm_eval_icl.errors import InputError


def logs(n, options, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(-6, scale, (n, options))


def softmax(row):
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [2, 3, 6])
def test_contextual_is_zhao_s(options):
    """W p with W = diag(p_cf)^-1, the mean of unnormalized probabilities normalized at the end."""
    scores = logs(20, options)
    content_free = logs(3, options, seed=1)
    p_cf = np.exp(content_free).mean(0)
    p_cf /= p_cf.sum()
    found = Contextual().values(scores, content_free)
    for row, calibrated in zip(scores, found, strict=True):
        weighted = np.diag(1 / p_cf) @ softmax(row)
        same(softmax(calibrated), weighted / weighted.sum())


@pytest.mark.parametrize("options", [2, 3, 6])
def test_batch_by_division_and_by_difference(options):
    scores = logs(300, options, scale=1) + np.arange(options)  # the last options are favored
    p = np.array([softmax(row) for row in scores])
    mean = [sum(column) / len(p) for column in p.T]
    divided = p / mean
    found = BatchCalibration().values(scores, scores)
    same(log_normalized(found), np.log(divided / divided.sum(1, keepdims=True)))
    difference = BatchCalibration(by="difference").values(scores, scores)
    same(difference, p - mean)
    if options == 2:
        assert (found.argmax(1) == difference.argmax(1)).all()
    else:
        assert (found.argmax(1) != difference.argmax(1)).any()
        of_scores = scores - scores.mean(0)
        assert (found.argmax(1) != of_scores.argmax(1)).any()  # a third function


def test_the_batch_that_calibrates_may_be_of_others():
    scores = logs(300, 3)
    others = logs(7, 3, seed=2)
    one = BatchCalibration().values(scores[:1], others)
    same(one, BatchCalibration().values(scores, others)[:1])


@given(st.integers(2, 40), st.integers(2, 5), st.integers(0, 99))
def test_what_all_options_of_a_document_share_changes_no_decision(n, options, seed):
    scores = logs(n, options, seed)
    shift = np.linspace(-700, 700, n)[:, None]
    moved = scores + shift
    for by in ("division", "difference"):
        rule = BatchCalibration(by=by)
        found = log_normalized(rule.values(moved, moved))
        expected = log_normalized(rule.values(scores, scores))
        np.testing.assert_allclose(found, expected, atol=1e-9)
    constant = logs(3, options, seed + 1)
    moved = Contextual().values(scores, constant - 1000)
    np.testing.assert_allclose(moved - 1000, Contextual().values(scores, constant), atol=1e-9)


def test_one_content_free_text_is_a_premise():
    scores = logs(5, 3)
    text = logs(1, 3, seed=1)
    same(Contextual().values(scores, text), PMI().values(scores, text))
    same(PMI().values(scores, text), scores - text)


def test_hidden_is_the_nearest_centroid():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(9, 4))
    anchors = rng.normal(size=(12, 4))
    labels = np.arange(12) % 3
    centroids = [sum(anchors[labels == label]) / 4 for label in range(3)]
    expected = []
    for state in states:
        expected.append([-math.dist(state, centroid) for centroid in centroids])
    same(Hidden().values(states, anchors, labels, 3), expected)


def kl_divergence(log_p, log_q):
    return sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))


def test_knn_votes_by_the_divergence_of_the_anchor_from_the_query():
    rng = np.random.default_rng(0)
    queries = log_normalized(rng.normal(0, 2, (25, 11)))
    anchors = log_normalized(rng.normal(0, 2, (14, 11)))
    labels = np.arange(14) % 2
    found = KNN().values(queries, anchors, labels, 2)
    backwards = 0
    for query, votes in zip(queries, found, strict=True):
        nearest = sorted(range(14), key=lambda i: kl_divergence(anchors[i], query))[:3]
        ones = sum(labels[i] for i in nearest)
        assert votes.tolist() == [3 - ones, ones]
        other_way = sorted(range(14), key=lambda i: kl_divergence(query, anchors[i]))[:3]
        backwards += other_way != nearest
    assert backwards  # the direction matters


def test_knn_of_tokens_without_probability():
    anchors = np.log([[0.5, 0.5, 1e-300], [0.3, 0.3, 0.4]])
    anchors[0, 2] = -np.inf
    query = np.array([[math.log(0.5), math.log(0.5), -np.inf]])
    assert KNN(k=1).values(query, anchors, [1, 0], 2).tolist() == [[0, 1]]


def test_numbers_that_are_none_are_refused():
    with pytest.raises(InputError, match="the model's numbers for a query contain NaN"):
        KNN().values([[math.nan]], [[1.0]] * 3, [0] * 3, 1)
    with pytest.raises(InputError, match="some hidden states are infinite"):
        Hidden().values([[math.inf]], [[1.0]], [0], 1)


def test_rules_as_users_write_them():
    (rule,) = read("contextual")
    assert str(rule) == "contextual"
    assert rule.arguments == {"texts": ("N/A", "", "[MASK]")}
    texts = ["batch:m=64:of=pool", "batch", "domain:of=test", "contextual:texts=N/A|x"]
    rules = read("+".join(texts))
    assert list(map(str, rules)) == texts
    assert [rule.is_transductive for rule in rules] == [False, True, True, False]
    assert read({"batch": {"of": "pool", "m": 64}, "pmi": None})[0] == rules[0]
    (premise,) = read("dcpmi:premise=\\n topic:")
    assert premise.arguments["premise"] == "\n topic:"
    assert "\n" not in str(premise)
    divided, subtracted = read("batch+batch:by=difference")
    assert divided.is_logarithmic
    assert not subtracted.is_logarithmic


def test_a_rule_needs_its_texts():
    with pytest.raises(InputError, match="contextual: texts="):
        read({"contextual": {"texts": []}})


REFUSED = {
    "contextal": "did you mean 'contextual'",
    "batch:by=mean": "by='mean': must be division or difference",
    "batch+batch": "names a rule twice",
}


@pytest.mark.parametrize("rules", REFUSED)
def test_rules_that_are_none(rules):
    with pytest.raises(InputError, match=REFUSED[rules]):
        read(rules)


def test_texts_that_all_make_an_empty_query_are_refused():
    source = SimpleNamespace(content_free=lambda doc, text: text)
    assert rendered(source, {}, ["N/A", " "]) == ["N/A"]
    with pytest.raises(InputError, match="all of its texts make an empty query: give other texts"):
        rendered(source, {}, [" ", "\n"])


@pytest.mark.parametrize("texts", [["a+b"], ["a:b", "+"], ["N/A"], ["2020"]])
def test_rules_are_written_as_they_are_read(texts):
    """Also texts that would be read as numbers, which are none."""
    rules = read({"contextual": {"texts": texts}})
    assert read(written(rules)) == rules
