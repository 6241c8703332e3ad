"""Choosing demonstrations: every selector against a slow version of its paper, word for word."""

import math
from itertools import pairwise, product
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
    noise = rng.standard_normal((size, width))
    spread = rng.uniform(0.5, 3, width)
    features = noise * spread + rng.standard_normal(width)
    odds = np.exp(1.5 * rng.standard_normal((size, classes)))
    probabilities = odds / odds.sum(1, keepdims=True)
    return Pool(labels, features.astype(np.float32), probabilities.astype(np.float32))


def select(name, pool, n, seed, balance=False, **arguments):
    return selecting.select(make(name, {"balance": balance, **arguments}), pool, n, seed)


def counts(pool, rows):
    """How many of the rows each class has."""
    return np.bincount(pool.labels[list(rows)], minlength=pool.classes).tolist()


def permuted(pool, order):
    return Pool(pool.labels[order], pool.features[order], pool.probabilities[order])


# The papers' definitions, one number at a time. Each takes the pool, n and the first row (for
# k_center) and returns the rows in the order of picking.


def highest(scores):
    """The lowest row of the highest score.

    Two rows that are nearest to each other, and gain for no third one, gain the same but for
    rounding.
    """
    best = max(scores.values())
    return min(row for row, score in scores.items() if score >= best - 1e-9 * abs(best))


def greedy(size, n, score, picks=()):
    """Always the row for which score(picks, row) is the highest."""
    picks = [*picks]
    while len(picks) < n:
        rows = set(range(size)) - set(picks)
        picks.append(highest({row: score(picks, row) for row in rows}))
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

    def score(picks, row):
        return min(math.dist(features[row], features[pick]) for pick in picks)

    return greedy(len(features), n, score, [first])


def by_probabilities(measure):
    """The selection of the rows of the highest measure of their probabilities."""

    def slow(pool, n, first):
        rows = np.sort(pool.probabilities).tolist()
        return greedy(len(rows), n, lambda _, row: measure(rows[row]))

    return slow


slow_entropy = by_probabilities(lambda probabilities: -sum(p * math.log(p) for p in probabilities))
slow_least_confidence = by_probabilities(lambda probabilities: 1 - probabilities[-1])
slow_margin = by_probabilities(lambda probabilities: probabilities[-2] - probabilities[-1])


def slow_cal(pool, n, first, k=10):
    units = [vector / math.hypot(*vector) for vector in pool.features.astype(float)]
    probabilities = pool.probabilities.astype(float)

    def divergence(row, other):
        return sum(probabilities[other] * np.log(probabilities[other] / probabilities[row]))

    def score(_, row):
        others = set(range(len(units))) - {row}
        nearest = sorted(others, key=lambda other: (math.dist(units[row], units[other]), other))[:k]
        return sum(divergence(row, other) for other in nearest) / len(nearest)

    return greedy(len(units), n, score)


def gradient_embeddings(pool) -> np.ndarray:
    """(N, C (d + 1)) the gradients themselves."""
    rows = []
    columns = zip(pool.labels, pool.features, pool.probabilities, strict=True)
    for label, vector, probabilities in columns:
        residual = probabilities.astype(float) - np.eye(len(probabilities))[label]
        rows.append(np.outer(residual, [1, *vector.astype(float)]).ravel())
    return np.array(rows)


def of_all_pairs(measure, vectors):
    return [[measure(one, other) for other in vectors] for one in vectors]


def slow_craig(pool, n, first):
    vectors = gradient_embeddings(pool)
    distance = of_all_pairs(math.dist, vectors)
    above = max(map(max, distance))

    def score(picks, row):
        chosen = [*picks, row]
        return sum(max(above - of_row[pick] for pick in chosen) for of_row in distance)

    return greedy(len(vectors), n, score)


def cosine(one, other):
    return one @ other / math.hypot(*one) / math.hypot(*other)


def similarity(pool) -> list[list[float]]:
    def similar(one, other):
        return 0.5 + 0.5 * cosine(one, other)

    return of_all_pairs(similar, gradient_embeddings(pool))


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
        to_pool = sum(similar[one][pick] for one, pick in product(range(len(similar)), chosen))
        among_themselves = sum(similar[one][pick] for one, pick in product(chosen, chosen))
        return lam * to_pool - among_themselves

    return greedy(len(similar), n, score)


def slow_gradmatch(pool, n, first, lam=1.0):
    """Orthogonal matching pursuit on the gradients themselves.

    Ridge regression is rows appended to them.
    """
    vectors = gradient_embeddings(pool)
    target = vectors.mean(0)
    picks = []
    left = target
    while len(picks) < n:
        rows = set(range(len(vectors))) - set(picks)
        picks.append(highest({row: vectors[row] @ left for row in rows}))
        stacked = np.vstack([vectors[picks].T, math.sqrt(lam) * np.eye(len(picks))])
        wanted = np.concatenate([target, np.zeros(len(picks))])
        weights = np.linalg.lstsq(stacked, wanted, rcond=None)[0]
        left = target - weights @ vectors[picks]
    return picks


SLOW = {name: globals()[f"slow_{name}"] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [2, 4])
def test_a_selector_follows_its_paper(name, classes):
    for seed in range(4):
        pool = make_pool(seed, classes=classes)
        rows = select(name, pool, 9, seed)
        assert list(rows) == SLOW[name](pool, 9, rows[0])


@pytest.mark.parametrize("name", NAMES)
def test_with_balance_it_follows_its_paper_inside_each_class(name):
    pool = make_pool(0)
    rows = select(name, pool, 11, 0, balance=True)
    for label in range(3):
        of_class = np.flatnonzero(pool.labels == label)
        picked = [row for row in rows if pool.labels[row] == label]
        first = of_class.tolist().index(picked[0])
        expected = SLOW[name](pool.at(of_class), len(picked), first)
        assert picked == of_class[expected].tolist()


@pytest.mark.parametrize(
    "name, argument",
    [("cal", {"k": 3}), ("gradmatch", {"lam": 50.0}), ("graph_cut", {"lam": 0.1})],
)
def test_arguments_of_a_selector(name, argument):
    changed = 0
    for seed in range(4):
        pool = make_pool(seed)
        rows = select(name, pool, 9, seed, **argument)
        assert list(rows) == SLOW[name](pool, 9, None, **argument)
        changed += rows != select(name, pool, 9, seed)
    assert changed


def test_gradients_are_never_formed_but_their_inner_products_are_right():
    pool = make_pool(0, size=600)  # more rows than are worked on at once
    vectors = gradient_embeddings(pool)
    products = vectors @ vectors.T
    assert np.allclose(gradients.gram(pool), products, rtol=1e-5, atol=1e-6 * products.max())
    distances = [np.linalg.norm(vectors - one, axis=1) for one in vectors]
    tolerance = 1e-5 * np.linalg.norm(vectors, axis=1).max()
    assert np.allclose(gradients.distances(pool), distances, atol=tolerance)


def test_probabilities_are_divided_by_their_sum():
    pool = make_pool(0)
    doubled = Pool(pool.labels, pool.features, 2 * pool.probabilities)
    assert np.allclose(doubled.distributions(), pool.distributions())


# Rules for all.


def test_classes_get_the_same_number_and_the_seed_draws_who_gets_more():
    pool = make_pool(0, size=60, classes=4)
    seen = set()
    for seed in range(20):
        rows = select("entropy", pool, 10, seed, balance=True)
        assert sorted(counts(pool, rows)) == [2, 2, 3, 3]
        seen.add(tuple(counts(pool, rows)))
    assert len(seen) > 3


def test_what_a_short_class_lacks_is_made_up_for_in_turns():
    labels = np.array([0] + [1] * 3 + [2] * 20)
    pool = Pool(labels, np.random.default_rng(0).standard_normal((24, 2)))
    for seed in range(10):
        assert sorted(quotas(pool, 12, Random(seed)).items()) == [(0, 1), (1, 3), (2, 8)]
        rows = select("herding", pool, 12, seed, balance=True)
        assert counts(pool, rows) == [1, 3, 8]
        assert len(set(rows)) == 12
    assert sorted(select("herding", pool, 24, 0, balance=True)) == list(range(24))


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
    assert len(set(choice)) == n
    assert set(choice) <= set(range(15))
    assert choice == select(name, pool, n, seed, balance)
    assert choice[: n - 1] == select(name, pool, n - 1, seed, balance)
    if balance:
        assert np.ptp(counts(pool, choice)) <= 1


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_tie_goes_to_the_lowest_row(name):
    features = np.ones((9, 3), np.float32)
    alike = Pool(np.zeros(9, int), features, np.full((9, 2), 0.5, np.float32))
    assert select(name, alike, 4, 0) == (0, 1, 2, 3)
    # The copy of a row that is picked first does not come in its place, wherever it stands.
    for seed in range(4):
        pool = make_pool(seed)
        first = select(name, pool, 1, 0)[0]
        both = permuted(pool, np.array([*range(40), first]))
        rows = select(name, both, 1, 0)
        if rows[0] in (first, 40):
            assert rows == (first,)
            reverse = permuted(both, np.arange(41)[::-1])
            assert select(name, reverse, 1, 0) == (0,)


def test_the_order_in_the_prompt_is_drawn_by_the_seed_from_the_set():
    assert in_prompt_order([5, 3, 9, 1], 0) == in_prompt_order([1, 3, 5, 9], 0)
    assert sorted(in_prompt_order([5, 3, 9, 1], 0)) == [1, 3, 5, 9]
    assert len({in_prompt_order([5, 3, 9, 1], seed) for seed in range(50)}) > 15


# Bad input.


def test_arguments_that_cannot_be_are_one_line():
    words = "cal: k=0: must be a whole number, 1 or more."
    with pytest.raises(InputError, match=f"^lm-eval-icl: {words}"):
        make("cal", {"k": 0})
    words = "gradmatch: lam=-1: must be a number, 0 or more."
    with pytest.raises(InputError, match=f"^lm-eval-icl: {words}"):
        make("gradmatch", {"lam": -1})


# Searches. What a set is worth is known here, so the best one is too.


class Worth:
    """Scores sets by the worth of their rows, and a little by their order.

    The accuracy is rounded, so that it ties.
    """

    def __init__(self, pool, seed=0):
        rng = np.random.default_rng(seed)
        size = len(pool.labels)
        self.worth = rng.uniform(0, 1, size)
        self.about = rng.uniform(-1, 1, (size, size))
        self.order = 0.01
        self.scored = []
        self.pairs = 0
        self.dev: set[tuple[int, ...]] = set()

    def score(self, rows, dev=()):
        self.scored.append(rows)
        self.dev.add(tuple(dev))
        rising = sum(one < other for one, other in pairwise(rows))
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
    order = sorted(range(35), key=lambda i: (-scores[i][0], -scores[i][1], i))
    first, second, *_ = order
    assert best == ScoredSet(drawn[first], *scores[first])
    assert scores[first][0] == scores[second][0]  # so that the log-probability has decided
    assert all(counts(pool, rows) == [2, 2, 2] for rows in drawn) == balance


def slow_lens(options, pool, n, generator, worth):
    """The authors' search after the paper's InfoScore; nothing is kept for a second use."""
    labels = pool.labels.tolist()
    size = len(labels)
    classes = list(range(pool.classes))
    generator.shuffle(classes)
    want = {label: n // len(classes) + (at < n % len(classes)) for at, label in enumerate(classes)}

    # The filter: the rows that tell most about others, of each class as many.

    def information(row, other):
        return worth.info(row, [other])[0]

    def mean_of_others(row):
        values = [information(row, other) for other in inform if other != row]
        return sum(values) / len(values)

    order = list(range(size))
    generator.shuffle(order)
    rows = list(range(size))
    scored = options.l
    kept = size
    done = False
    while not done:
        inform = order[:scored]
        done = int(kept / options.rho) <= options.m
        kept = options.m if done else int(kept / options.rho)
        score = {row: mean_of_others(row) for row in rows}
        best = sorted(rows, key=lambda row: (-score[row], row))
        rows = []
        for label in classes:
            of_class = [row for row in best if labels[row] == label]
            rows += of_class[: kept // len(classes)]
        rows.sort()
        scored = int(scored * options.rho)
    others = [row for row in range(size) if row not in rows]
    dev = generator.sample(others, options.dev)

    # How good sets look.

    features = {row: np.array([information(row, other) for other in inform]) for row in rows}
    mean = standardized({row: features[row].mean() for row in rows})  # with its own
    similar = {}
    for one, other in product(rows, rows):
        similar[one, other] = cosine(features[one], features[other])
    similar = standardized(similar)

    def looks_of_set(chosen):
        pairs = sum(similar[pair] for pair in product(chosen, chosen))
        return sum(mean[row] for row in chosen) / n - options.diversity * pairs / n**2

    def random_set():
        chosen = []
        for label, number in want.items():
            of_class = [row for row in rows if labels[row] == label]
            chosen += generator.sample(of_class, number)
        return chosen

    def substituted(chosen):
        at = generator.randrange(len(chosen))
        before = chosen[:at]
        after = chosen[at + 1 :]
        looks = {}
        for row in rows:
            if row not in chosen and labels[row] == labels[chosen[at]]:
                alike = sum(similar[row, other] for other in before + after)
                looks[row] = mean[row] - options.diversity * alike / (n - 1)
        top = sorted(looks, key=lambda row: (-looks[row], row))[:4]
        weights = [math.exp(looks[row] - looks[top[0]]) for row in top]
        return before + generator.choices(top, weights) + after

    # Sets that look good and have little in common, and random ones if these are too few.

    now = [random_set() for _ in range(160)]
    seen = {}
    for _ in range(20):
        for chosen in now[:]:
            now += [substituted(chosen) for _ in range(16)]
        sets = {tuple(sorted(chosen)) for chosen in now}
        seen |= {chosen: looks_of_set(chosen) for chosen in sets - seen.keys()}
        ranked = sorted(sets, key=lambda chosen: (-seen[chosen], chosen))
        now = [list(chosen) for chosen in ranked[:16]]
    now = []
    used = set()
    for chosen in sorted(seen, key=lambda chosen: (-seen[chosen], chosen)):
        if len(now) < options.beams and len(used & set(chosen)) <= 4:
            now.append(generator.sample(chosen, n))
            used |= set(chosen)
    while len(now) < options.beams:
        now.append(random_set())

    # What they are worth.

    for _ in range(options.iterations):
        made = []
        for chosen in now:
            made += [substituted(chosen) for _ in range(options.substitutions)]
            made += [generator.sample(chosen, n) for _ in range(options.shuffles)]
        sets = sorted(set(map(tuple, made + now)))
        scored = [ScoredSet(chosen, *worth.score(chosen, dev)) for chosen in sets]
        ranked = sorted(scored, key=lambda one: (-one.accuracy, -one.log_probability, one.rows))
        now = [list(one.rows) for one in ranked[: options.beams]]
    return ranked[0]


def standardized(values):
    numbers = list(values.values())
    middle = np.mean(numbers)
    spread = np.std(numbers, ddof=1)
    return {key: (value - middle) / spread for key, value in values.items()}


SMALL = Lens(m=24, rho=2.0, l=3, beams=4, iterations=3, substitutions=4, shuffles=2, dev=7)


@pytest.mark.parametrize("n, seed", [(6, 0), (8, 1)])
def test_lens_follows_the_search_of_its_authors(n, seed):
    pool = make_pool(seed, size=110)
    mine = Worth(pool, seed)
    slow = Worth(pool, seed)
    found = lens(SMALL, pool, n, Random(seed), mine.info, mine.score)
    assert SMALL.diversity == 4.0
    assert found == slow_lens(SMALL, pool, n, Random(seed), slow)
    assert mine.dev == slow.dev
    assert set(mine.scored) == set(slow.scored)


def test_lens_without_substitutes_tries_orders_alone():
    """The filter keeps as many rows of each label as a set has, and all rows tell the same."""
    pool = make_pool(0)
    worth = Worth(pool)
    how = Lens(m=6, l=3, beams=2, iterations=2, substitutions=2, dev=7)
    best = lens(how, pool, 6, Random(0), lambda row, others: np.zeros(len(others)), worth.score)
    tried = list(worth.scored)
    assert {tuple(sorted(rows)) for rows in tried} == {tuple(sorted(best.rows))}
    assert len(tried) > 4
    assert counts(pool, best.rows) == [2, 2, 2]
    assert (best.accuracy, best.log_probability) == max(worth.score(rows) for rows in tried)


def test_the_rounds_of_the_filter_are_the_published_ones():
    assert Lens().rounds(5000) == [(14, 2500), (28, 1250), (56, 625), (112, 500)]
    assert Lens().rounds(300) == [(14, 300)]


def test_a_class_without_rows_is_one_line():
    pool = Pool(np.array([0, 0, 2]), np.zeros((3, 2)))
    words = "label 1 has no rows in the pool of 3 rows: raise pool=, or give balance=False"
    with pytest.raises(InputError, match=words):
        select("herding", pool, 2, 0, balance=True)


def test_too_few_rows_to_score_sets_on_are_one_line():
    worth = Worth(make_pool(0))
    words = "lens: dev=100 exceeds the 10 of the pool's 40"
    with pytest.raises(InputError, match=words):
        lens(Lens(m=30), make_pool(0), 6, Random(0), worth.info, worth.score)
