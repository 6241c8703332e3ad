"""Choosing demonstrations: every selector against a slow version that follows its paper word for word."""

import itertools
import math
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations import selector as selecting
from lm_eval_icl.demonstrations.how import make
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.searches import BestRandom, Lens, ScoredSet, lens
from lm_eval_icl.demonstrations.selector import in_prompt_order, quotas
from lm_eval_icl.demonstrations.selectors import SELECTORS
from lm_eval_icl.errors import InputError

NAMES = list(SELECTORS)
DETERMINISTIC = [name for name in NAMES if name != "k_center"]


def make_pool(seed, size=40, width=6, classes=3):
    """A random pool in which every class has rows."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(size) % classes)
    features = rng.standard_normal((size, width)) * rng.uniform(
        0.5, 3, width
    ) + rng.standard_normal(width)
    odds = np.exp(1.5 * rng.standard_normal((size, classes)))
    return Pool(
        labels, features.astype(np.float32), (odds / odds.sum(1, keepdims=True)).astype(np.float32)
    )


def select(name, pool, n, seed, balance=True, **arguments):
    return selecting.select(make(name, {"balance": balance, **arguments}), pool, n, seed)


def permuted(pool, order):
    return Pool(pool.labels[order], pool.features[order], pool.probabilities[order])


# The papers' definitions, one number at a time. Each takes the pool, n and the first row (for k_center) and returns the
# rows in the order of picking.


def highest(scores):
    """The lowest row of the highest score.

    Two rows that are nearest to each other, and gain for no third one, gain the same but for rounding.
    """
    best = max(scores.values())
    return min(row for row, score in scores.items() if score >= best - 1e-9 * abs(best))


def greedy(size, n, score):
    """Always the row for which score(picks, row) is the highest."""
    picks = []
    while len(picks) < n:
        picks.append(highest({row: score(picks, row) for row in range(size) if row not in picks}))
    return picks


def slow_herding(pool, n, first):
    features = pool.features.astype(float)
    mean = sum(features) / len(features)

    def score(picks, row):
        total = sum((features[pick] for pick in picks), features[row])
        return -math.dist((len(picks) + 1) * mean, total)

    return greedy(len(features), n, score)


def slow_k_center(pool, n, first):
    features = pool.features.astype(float)
    picks = [first]
    while len(picks) < n:
        rows = (row for row in range(len(features)) if row not in picks)
        picks.append(
            highest(
                {
                    row: min(math.dist(features[row], features[pick]) for pick in picks)
                    for row in rows
                }
            )
        )
    return picks


def by_probabilities(measure):
    """The selection of the rows of the highest measure of their probabilities."""

    def slow(pool, n, first):
        return greedy(
            len(pool.labels), n, lambda _, row: measure(sorted(pool.probabilities[row].tolist()))
        )

    return slow


slow_entropy = by_probabilities(lambda probabilities: -sum(p * math.log(p) for p in probabilities))
slow_least_confidence = by_probabilities(lambda probabilities: 1 - probabilities[-1])
slow_margin = by_probabilities(lambda probabilities: probabilities[-2] - probabilities[-1])


def slow_cal(pool, n, first, k=10):
    units = [vector / math.hypot(*vector) for vector in pool.features.astype(float)]
    probabilities = pool.probabilities.astype(float).tolist()

    def score(_, row):
        others = sorted(
            (math.dist(units[row], units[other]), other)
            for other in range(len(units))
            if other != row
        )[:k]
        divergences = [
            sum(
                p * math.log(p / q)
                for p, q in zip(probabilities[other], probabilities[row], strict=True)
            )
            for _, other in others
        ]
        return sum(divergences) / len(divergences)

    return greedy(len(units), n, score)


def gradient_embeddings(pool) -> np.ndarray:
    """(N, C (d + 1)) the gradients themselves."""
    rows = []
    for label, vector, probabilities in zip(
        pool.labels, pool.features, pool.probabilities, strict=True
    ):
        residual = probabilities.astype(float) - np.eye(len(probabilities))[label]
        rows.append(np.outer(residual, [1, *vector.astype(float)]).ravel())
    return np.array(rows)


def slow_craig(pool, n, first):
    vectors = gradient_embeddings(pool)
    distance = [[math.dist(one, other) for other in vectors] for one in vectors]
    above = max(map(max, distance))

    def score(picks, row):
        return sum(
            max(above - distance[other][pick] for pick in [*picks, row])
            for other in range(len(vectors))
        )

    return greedy(len(vectors), n, score)


def cosine(one, other):
    return sum(one * other) / math.hypot(*one) / math.hypot(*other)


def similarity(pool) -> list[list[float]]:
    vectors = gradient_embeddings(pool)
    return [[0.5 + 0.5 * cosine(one, other) for other in vectors] for one in vectors]


def coverage(similar, picks):
    """The function that facility location maximizes."""
    return sum(max(row[pick] for pick in picks) for row in similar)


def slow_facility_location(pool, n, first):
    similar = similarity(pool)
    return greedy(len(similar), n, lambda picks, row: coverage(similar, [*picks, row]))


def slow_graph_cut(pool, n, first, lam=1.0):
    similar = similarity(pool)

    def score(picks, row):
        chosen = [*picks, row]
        to_pool = sum(similar[one][pick] for one in range(len(similar)) for pick in chosen)
        return lam * to_pool - sum(similar[one][other] for one in chosen for other in chosen)

    return greedy(len(similar), n, score)


def slow_gradmatch(pool, n, first, lam=1.0):
    """Orthogonal matching pursuit on the gradients themselves, with ridge regression as rows appended to them."""
    vectors = gradient_embeddings(pool)
    target = vectors.mean(0)
    picks, left = [], target
    while len(picks) < n:
        picks.append(
            highest({row: vectors[row] @ left for row in range(len(vectors)) if row not in picks})
        )
        stacked = np.vstack([vectors[picks].T, math.sqrt(lam) * np.eye(len(picks))])
        weights = np.linalg.lstsq(
            stacked, np.concatenate([target, np.zeros(len(picks))]), rcond=None
        )[0]
        left = target - weights @ vectors[picks]
    return picks


SLOW = {name: globals()[f"slow_{name}"] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [2, 4])
def test_a_selector_follows_its_paper(name, classes):
    for seed in range(4):
        pool = make_pool(seed, classes=classes)
        rows = select(name, pool, 9, seed, balance=False)
        assert list(rows) == SLOW[name](pool, 9, rows[0])


@pytest.mark.parametrize("name", NAMES)
def test_with_balance_it_follows_its_paper_inside_each_class(name):
    pool = make_pool(0)
    rows = select(name, pool, 11, 0)
    for label in range(3):
        of_class = np.flatnonzero(pool.labels == label)
        picked = [row for row in rows if pool.labels[row] == label]
        first = of_class.tolist().index(picked[0])
        assert picked == of_class[SLOW[name](pool.at(of_class), len(picked), first)].tolist()


@pytest.mark.parametrize(
    ("name", "argument"),
    [("cal", {"k": 3}), ("gradmatch", {"lam": 50.0}), ("graph_cut", {"lam": 0.1})],
)
def test_arguments_of_a_selector(name, argument):
    changed = 0
    for seed in range(4):
        pool = make_pool(seed)
        rows = select(name, pool, 9, seed, balance=False, **argument)
        assert list(rows) == SLOW[name](pool, 9, None, **argument)
        changed += rows != select(name, pool, 9, seed, balance=False)
    assert changed


def test_gradients_are_never_formed_but_their_inner_products_are_right():
    pool = make_pool(0, size=600)  # more rows than are worked on at once
    vectors = gradient_embeddings(pool)
    products = vectors @ vectors.T
    assert np.allclose(gradients.gram(pool), products, rtol=1e-5, atol=1e-6 * products.max())
    lengths = np.linalg.norm(vectors, axis=1)
    assert np.allclose(
        gradients.distances(pool),
        [np.linalg.norm(vectors - one, axis=1) for one in vectors],
        atol=1e-5 * lengths.max(),
    )


def test_probabilities_are_divided_by_their_sum():
    pool = make_pool(0)
    doubled = Pool(pool.labels, pool.features, 2 * pool.probabilities)
    assert np.allclose(doubled.distributions(), pool.distributions())


# Rules for all.


def test_classes_get_the_same_number_and_the_seed_draws_who_gets_more():
    pool = make_pool(0, size=60, classes=4)
    seen = set()
    for seed in range(20):
        counts = np.bincount(pool.labels[list(select("entropy", pool, 10, seed))], minlength=4)
        assert sorted(counts) == [2, 2, 3, 3]
        seen.add(tuple(counts))
    assert len(seen) > 3


def test_what_a_short_class_lacks_is_made_up_for_in_turns():
    pool = Pool(
        np.array([0] + [1] * 3 + [2] * 20), np.random.default_rng(0).standard_normal((24, 2))
    )
    for seed in range(10):
        assert sorted(quotas(pool, 12, Random(seed)).items()) == [(0, 1), (1, 3), (2, 8)]
        rows = select("herding", pool, 12, seed)
        assert np.bincount(pool.labels[list(rows)]).tolist() == [1, 3, 8] and len(set(rows)) == 12
    assert sorted(select("herding", pool, 24, 0)) == list(range(24))


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(0, 10**6), st.integers(2, 12), st.booleans(), st.sampled_from([1, 2]))
@settings(max_examples=25, deadline=None)
def test_any_choice(name, seed, n, balance, digits):
    """Values of few digits, so that there are many ties and copies."""
    pool = make_pool(seed, size=15, width=2)
    probabilities = np.round(pool.probabilities, digits)
    probabilities[:, -1] += 1 - probabilities.sum(1)
    pool = Pool(pool.labels, np.round(pool.features, digits - 1), np.abs(probabilities))
    choice = select(name, pool, n, seed, balance)
    assert len(set(choice)) == n and set(choice) <= set(range(15))
    assert choice == select(name, pool, n, seed, balance)
    assert choice[: n - 1] == select(name, pool, n - 1, seed, balance)
    if balance:
        assert np.ptp(np.bincount(pool.labels[list(choice)], minlength=3)) <= 1


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_tie_goes_to_the_lowest_row(name):
    alike = Pool(np.zeros(9, int), np.ones((9, 3), np.float32), np.full((9, 2), 0.5, np.float32))
    assert select(name, alike, 4, 0, balance=False) == (0, 1, 2, 3)
    # The copy of a row that is picked first does not come in its place, wherever it stands.
    for seed in range(4):
        pool = make_pool(seed)
        first = select(name, pool, 1, 0, balance=False)[0]
        both = permuted(pool, np.array([*range(40), first]))
        if (rows := select(name, both, 1, 0, balance=False))[0] in (first, 40):
            assert rows == (first,)
            reverse = permuted(both, np.arange(41)[::-1])
            assert select(name, reverse, 1, 0, balance=False) == (0,)


def test_the_order_in_the_prompt_is_drawn_by_the_seed_from_the_set():
    assert in_prompt_order([5, 3, 9, 1], 0) == in_prompt_order([1, 3, 5, 9], 0)
    assert sorted(in_prompt_order([5, 3, 9, 1], 0)) == [1, 3, 5, 9]
    assert len({in_prompt_order([5, 3, 9, 1], seed) for seed in range(50)}) > 15


# Bad input.


@pytest.mark.parametrize(
    ("how", "arguments", "words"),
    [
        ("cal", {"k": 0}, "cal: k=0: must be a whole number, 1 or more."),
        ("gradmatch", {"lam": -1}, "gradmatch: lam=-1: must be a number, 0 or more."),
    ],
)
def test_what_cannot_be_chosen_is_one_line(how, arguments, words):
    with pytest.raises(InputError, match=f"^lm-eval-icl: {re.escape(words)}"):
        make(how, arguments)


# Searches. What a set is worth is known here, so the best one is too.


class Worth:
    """Scores sets by the worth of their rows, and a little by their order; the accuracy is rounded, so that it ties."""

    def __init__(self, pool, seed=0):
        rng = np.random.default_rng(seed)
        self.worth = rng.uniform(0, 1, len(pool.labels))
        self.about = rng.uniform(-1, 1, (len(pool.labels), len(pool.labels)))
        self.order = 0.01
        self.scored = []
        self.pairs = 0
        self.dev: set[tuple[int, ...]] = set()

    def score(self, rows, dev=()):
        self.scored.append(rows)
        self.dev.add(tuple(dev))
        rising = sum(one < other for one, other in itertools.pairwise(rows))
        value = sum(self.worth[row] for row in sorted(rows)) + self.order * rising
        return value // 2 / len(rows), value - 20

    def info(self, row, others):
        self.pairs += len(others)
        return np.array([self.worth[row] + 0.3 * self.about[row, other] for other in others])


@pytest.mark.parametrize("balance", [True, False])
def test_best_random_is_the_best_of_what_it_draws(balance):
    pool = make_pool(0)
    worth = Worth(pool)
    best = BestRandom(balance=balance, sets=35).search(pool, 6, Random(1), worth.score)
    drawn = list(worth.scored)
    scores = [worth.score(rows) for rows in drawn]
    order = sorted(range(35), key=lambda index: (-scores[index][0], -scores[index][1], index))
    assert best == ScoredSet(drawn[order[0]], *scores[order[0]])
    assert scores[order[0]][0] == scores[order[1]][0]  # so that the log-probability has decided
    counts = [np.bincount(pool.labels[list(rows)], minlength=3).tolist() for rows in drawn]
    assert all(count == [2, 2, 2] for count in counts) == balance


def slow_lens(
    pool,
    n,
    generator,
    worth,
    m,
    rho,
    l,  # noqa: E741
    beams,
    iterations,
    substitutions,
    shuffles,
    diversity,
    dev,
):
    """The authors' search after the paper's InfoScore, with nothing kept that can be computed again."""
    labels, size = pool.labels.tolist(), len(pool.labels)
    classes = list(range(pool.classes))
    generator.shuffle(classes)
    want = {label: n // len(classes) + (at < n % len(classes)) for at, label in enumerate(classes)}

    def c(row, other):
        return worth.info(row, [other])[0]

    def mean_of_others(row, inform):
        values = [c(row, other) for other in inform if other != row]
        return sum(values) / len(values)

    order = list(range(size))
    generator.shuffle(order)
    rows, scored, kept = list(range(size)), l, size
    while True:
        inform = order[:scored]
        done = int(kept / rho) <= m
        kept = m if done else int(kept / rho)
        score = {row: mean_of_others(row, inform) for row in rows}
        best = {label: sorted((row for row in rows if labels[row] == label), key=lambda row: (-score[row], row))
                for label in classes}  # fmt: skip
        rows = sorted(row for label in classes for row in best[label][: kept // len(classes)])
        if done:
            break
        scored = int(scored * rho)
    dev_rows = generator.sample([row for row in range(size) if row not in rows], dev)

    features = {row: [c(row, other) for other in inform] for row in rows}
    mean = {
        row: sum(features[row]) / len(inform) for row in rows
    }  # with what it tells about itself
    sim = {(a, b): sum(x * y for x, y in zip(features[a], features[b], strict=True))
           / math.hypot(*features[a]) / math.hypot(*features[b]) for a in rows for b in rows}  # fmt: skip

    def standardized(values):
        middle = sum(values.values()) / len(values)
        spread = math.sqrt(
            sum((value - middle) ** 2 for value in values.values()) / (len(values) - 1)
        )
        return {key: (value - middle) / spread for key, value in values.items()}

    mean, sim = standardized(mean), standardized(sim)

    def random_set():
        return [row for label in classes
                for row in generator.sample([row for row in rows if labels[row] == label], want[label])]  # fmt: skip

    def substituted(chosen):
        at = generator.randrange(len(chosen))
        others = chosen[:at] + chosen[at + 1 :]
        looks = {row: mean[row] - diversity * sum(sim[row, other] for other in others) / len(others)
                 for row in rows if row not in chosen and labels[row] == labels[chosen[at]]}  # fmt: skip
        top = sorted(looks, key=lambda row: (-looks[row], row))[:4]
        weights = [math.exp(looks[row] - looks[top[0]]) for row in top]
        return chosen[:at] + generator.choices(top, weights) + chosen[at + 1 :]

    def looks(chosen):
        pairs = [sim[one, other] for one in chosen for other in chosen]
        return sum(mean[row] for row in chosen) / n - diversity * sum(pairs) / n**2

    now, seen = [random_set() for _ in range(160)], {}
    for _ in range(20):
        now += [substituted(chosen) for chosen in now for _ in range(16)]
        now = sorted(
            {tuple(sorted(chosen)) for chosen in now},
            key=lambda chosen: (-seen.setdefault(chosen, looks(chosen)), chosen),
        )
        now = [list(chosen) for chosen in now[:16]]
    now, used = [], set()
    for chosen in sorted(seen, key=lambda chosen: (-seen[chosen], chosen)):
        if len(now) < beams and len(used & set(chosen)) <= 4:
            now.append(generator.sample(chosen, n))
            used |= set(chosen)
    while len(now) < beams:
        now.append(random_set())

    for _ in range(iterations):
        made = []
        for chosen in now:
            made += [substituted(chosen) for _ in range(substitutions)]
            made += [generator.sample(chosen, n) for _ in range(shuffles)]
        sets = sorted(set(map(tuple, made + now)))
        scored = [ScoredSet(chosen, *worth.score(chosen, dev_rows)) for chosen in sets]
        ranked = sorted(scored, key=lambda one: (-one.accuracy, -one.log_probability, one.rows))
        now = [list(one.rows) for one in ranked[:beams]]
    return ranked[0]


SMALL = {
    "m": 24,
    "rho": 2.0,
    "l": 3,
    "beams": 4,
    "iterations": 3,
    "substitutions": 4,
    "shuffles": 2,
    "dev": 7,
}


def test_lens_follows_the_search_of_its_authors():
    for n, seed in ((6, 0), (8, 1)):
        pool = make_pool(seed, size=110)
        mine, slow = Worth(pool, seed), Worth(pool, seed)
        found = lens(Lens(**SMALL), pool, n, Random(seed), mine.info, mine.score)
        assert found == slow_lens(pool, n, Random(seed), slow, diversity=4.0, **SMALL)
        assert mine.dev == slow.dev and set(mine.scored) == set(slow.scored)


def test_the_rounds_of_the_filter_are_the_published_ones():
    assert Lens().rounds(5000) == [(14, 2500), (28, 1250), (56, 625), (112, 500)]
    assert Lens().rounds(300) == [(14, 300)]


def test_what_cannot_be_chosen_from_a_pool_is_one_line():
    labels, features = np.array([0, 0, 2]), np.zeros((3, 2))
    with pytest.raises(
        InputError,
        match="label 1 has no rows in the pool of 3 rows: raise pool=, or give balance=False",
    ):
        select("herding", Pool(labels, features), 2, 0)
    with pytest.raises(
        InputError,
        match="lens: dev=100 exceeds the 10 of the pool's 40",
    ):
        worth = Worth(make_pool(0))
        lens(Lens(m=30), make_pool(0), 6, Random(0), worth.info, worth.score)
