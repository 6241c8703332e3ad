"""Decision rules against their equations, computed literally, in probabilities and with loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_icl.decisions.rule import log_normalized
from lm_eval_icl.decisions.rules import KNN, PMI, BatchCalibration, Contextual, Hidden, read
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
    found = BatchCalibration().values(scores, scores)
    same(log_normalized(found), np.log((p / mean) / (p / mean).sum(1, keepdims=True)))
    difference = BatchCalibration(by="difference").values(scores, scores)
    same(difference, p - mean)
    if options == 2:
        assert (found.argmax(1) == difference.argmax(1)).all()
    else:
        assert (found.argmax(1) != difference.argmax(1)).any()
        assert (found.argmax(1) != (scores - scores.mean(0)).argmax(1)).any()  # a third function
    others = logs(7, options, seed=2)
    same(
        BatchCalibration().values(scores[:1], others), BatchCalibration().values(scores, others)[:1]
    )


@given(st.integers(2, 40), st.integers(2, 5), st.integers(0, 99))
def test_what_all_options_of_a_document_share_changes_no_decision(n, options, seed):
    scores = logs(n, options, seed)
    shift = np.linspace(-700, 700, n)[:, None]
    for rule in (
        lambda scores: BatchCalibration().values(scores, scores),
        lambda scores: BatchCalibration(by="difference").values(scores, scores),
    ):
        np.testing.assert_allclose(
            log_normalized(rule(scores + shift)), log_normalized(rule(scores)), atol=1e-9
        )
    constant = logs(3, options, seed + 1)
    moved = Contextual().values(scores, constant - 1000)
    np.testing.assert_allclose(moved - 1000, Contextual().values(scores, constant), atol=1e-9)


def test_one_content_free_text_is_a_premise():
    scores = logs(5, 3)
    text = logs(1, 3, seed=1)
    same(Contextual().values(scores, text), PMI().values(scores, text))
    same(
        PMI().values(scores, text),
        [[s - t for s, t in zip(row, text[0], strict=True)] for row in scores],
    )


def test_hidden_is_the_nearest_centroid():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(9, 4))
    anchors = rng.normal(size=(12, 4))
    labels = np.arange(12) % 3
    expected = [
        [
            -math.dist(state, [sum(anchors[labels == c][:, j]) / 4 for j in range(4)])
            for c in range(3)
        ]
        for state in states
    ]
    same(Hidden().values(states, anchors, labels, 3), expected)


def test_knn_votes_by_the_divergence_of_the_anchor_from_the_query():
    rng = np.random.default_rng(0)
    queries, anchors = (log_normalized(rng.normal(0, 2, (n, 11))) for n in (25, 14))
    labels = np.arange(14) % 2
    found = KNN().values(queries, anchors, labels, 2)
    backwards = 0
    for query, votes in zip(queries, found, strict=True):
        kl = [
            sum(math.exp(a) * (a - q) for a, q in zip(anchor, query, strict=True))
            for anchor in anchors
        ]
        nearest = sorted(range(14), key=kl.__getitem__)[:3]
        assert votes.tolist() == [sum(labels[i] == c for i in nearest) for c in (0, 1)]
        other = [
            sum(math.exp(q) * (q - a) for a, q in zip(anchor, query, strict=True))
            for anchor in anchors
        ]
        backwards += sorted(range(14), key=other.__getitem__)[:3] != nearest
    assert backwards  # the direction matters


def test_knn_of_tokens_without_probability():
    anchors = np.log([[0.5, 0.5, 1e-300], [0.3, 0.3, 0.4]])
    anchors[0, 2] = -np.inf
    query = np.array([[math.log(0.5), math.log(0.5), -np.inf]])
    assert KNN(k=1).values(query, anchors, [1, 0], 2).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: KNN().values([[math.nan]], [[1.0]] * 3, [0] * 3, 1),
            "the model's numbers for a query contain NaN",
        ),
        (lambda: Hidden().values([[math.inf]], [[1.0]], [0], 1), "some hidden states are infinite"),
    ],
)
def test_what_cannot_be_used_is_refused(call, said):
    with pytest.raises(InputError, match=said):
        call()


def test_rules_as_users_write_them():
    (rule,) = read("contextual")
    assert str(rule) == "contextual"
    assert rule.arguments == {"texts": ("N/A", "", "[MASK]")}
    rules = read("batch:m=64:of=pool+batch+domain:of=test+contextual:texts=N/A|x")
    assert list(map(str, rules)) == [
        "batch:m=64:of=pool",
        "batch",
        "domain:of=test",
        "contextual:texts=N/A|x",
    ]
    assert [rule.is_transductive for rule in rules] == [False, True, True, False]
    assert read({"batch": {"of": "pool", "m": 64}, "pmi": None})[0] == rules[0]
    (premise,) = read("dcpmi:premise=\\n topic:")
    assert premise.arguments["premise"] == "\n topic:"
    assert "\n" not in str(premise)
    assert [rule.is_logarithmic for rule in read("batch+batch:by=difference")] == [True, False]


@pytest.mark.parametrize(
    "given, said",
    [
        ("contextal", "did you mean 'contextual'"),
        ("batch:by=mean", "by='mean': must be division or difference"),
        ("batch+batch", "names a rule twice"),
        ({"contextual": {"texts": []}}, "contextual: texts="),
    ],
)
def test_rules_that_are_none(given, said):
    with pytest.raises(InputError, match=said):
        read(given)
