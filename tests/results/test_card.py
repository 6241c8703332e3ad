"""The robustness card: every number against loops over the samples."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from lm_eval_icl.leaderboard import card as shown
from lm_eval_icl.leaderboard import figures
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results.card import spread
from tests.boards import write, write_samples
from tests.results.files import board_of, row_of, samples_in

N = 60
SEEDS = (0, 1, 2)
ORDERS = (0, 1, 2)
FORMATS = (0, 1, 2)
SHARES = {"icl": 0.8, "pcw": 0.7}
RANDOM_LABELS = "random"
FLIPPED_LABELS = "flipped:0.25"
TEMPLATE = "Text: {{text}}\nLabel:"


class Condition(NamedTuple):
    """What a run varies; the defaults are the plain run."""

    labels: str = ""
    format: int = 0
    shots: int = 4
    order: int = 0


PLAIN = Condition()
VARIED = [
    Condition(order=1),
    Condition(order=2),
    Condition(FLIPPED_LABELS),
    Condition(RANDOM_LABELS),
    Condition(format=1),
    Condition(format=2),
    Condition(shots=1),
    Condition(shots=8),
]
Samples = list[dict[str, Any]]


def settings_of(condition: Condition) -> dict[str, Any]:
    """How a task's configuration tells of the labels and of the format."""
    metadata: dict[str, Any] = {"version": 1.0}
    if condition.labels:
        metadata["labels"] = condition.labels
    if not condition.format:
        return {"metadata": metadata, "doc_to_text": TEMPLATE}
    metadata["format"] = condition.format
    metadata["unformatted"] = {"doc_to_text": TEMPLATE}
    return {"metadata": metadata, "doc_to_text": f"in format {condition.format}"}


def run(
    folder: Path, model: str, seed: int, share: float, condition: Condition, task: str = "t"
) -> Samples:
    """The samples of a run with random answers and log-likelihoods, in a study's order."""
    labels, number, shots, order = condition
    name = f"{model}{labels or None}{task}"
    rng = np.random.default_rng([*map(ord, name), seed, order, number, shots])
    says = [i % 2 if right else 1 - i % 2 for i, right in enumerate(rng.random(N) < share)]
    study = {"order": order, "seed": seed, "split": "test"}
    other_prompts = f"{labels}{number}{shots}\n\n"
    file = write(
        folder / f"{model}{labels}{number}{shots}{order}{task}",
        model,
        seed,
        task=task,
        n=N,
        says=says,
        order=order,
        shots=shots,
        evil=other_prompts,
        put={"config.icl": {"method": model, "study": study}},
        **settings_of(condition),
    )
    samples = samples_in(file, task)
    for sample, said in zip(samples, says, strict=True):
        logprobs = [float(-rng.random() * 3 - 0.01)] * 2
        logprobs[said] = 0.0
        sample["filtered_resps"] = [[str(x), "False"] for x in logprobs]
    write_samples(file, task, samples)
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("card")


@pytest.fixture(scope="module")
def made(folder):
    """The samples of each run by method, condition and seed."""
    samples = {}
    for model, seed, condition in itertools.product(SHARES, SEEDS, [*VARIED, PLAIN]):
        share = SHARES[model]
        if condition != PLAIN:
            share -= 0.1
        if condition.labels == RANDOM_LABELS:
            share -= 0.2
        samples[model, condition, seed] = run(folder, model, seed, share, condition)
    return samples


@pytest.fixture(scope="module")
def board(made, folder):
    return board_of(folder)


def card_of(board, model):
    """Name of a property -> its estimate, of a method's row."""
    (row,) = (row for row in board.card.rows if row.entry.method == model)
    return {column.name: estimate for column, estimate in row.values.items()}


def accuracy(samples):
    return fmean(sample["acc"] for sample in samples)


def logprobs_of(sample):
    return [float(logprob) for logprob, _ in sample["filtered_resps"]]


def flips(samples, others):
    """How often two runs say different things of a document."""
    pairs = zip(map(logprobs_of, samples), map(logprobs_of, others), strict=True)
    return fmean((mine[1] > mine[0]) != (theirs[1] > theirs[0]) for mine, theirs in pairs)


def right_probabilities(samples):
    for number, sample in enumerate(samples):
        logprobs = logprobs_of(sample)
        yield math.exp(logprobs[number % 2]) / sum(map(math.exp, logprobs))


class Loops:
    """The card of a method, by loops over its samples."""

    def __init__(self, made, model):
        self.made = made
        self.model = model
        self.in_orders = [[self.samples(seed, order=order) for order in ORDERS] for seed in SEEDS]
        self.all = list(itertools.chain.from_iterable(self.in_orders))

    def samples(self, seed, **condition):
        return self.made[self.model, Condition(**condition), seed]

    def accuracy(self, **condition):
        """Mean over the seeds."""
        return fmean(accuracy(self.samples(seed, **condition)) for seed in SEEDS)

    def order_flips(self):
        rates = []
        for orders in self.in_orders:
            rates += [flips(x, y) for x, y in itertools.combinations(orders, 2)]
        return fmean(rates)

    def format_spread(self):
        spreads = []
        for seed in SEEDS:
            values = [accuracy(self.samples(seed, format=number)) for number in FORMATS]
            spreads.append(max(values) - min(values))
        return fmean(spreads)

    def set_spread(self):
        of_sets = [fmean(map(accuracy, orders)) for orders in self.in_orders]
        return max(of_sets) - min(of_sets)

    def values(self):
        right = []
        for samples in self.all:
            right += right_probabilities(samples)
        plain = self.accuracy()
        return {
            "accuracy": fmean(map(accuracy, self.all)),
            "order flips": self.order_flips(),
            "format spread": self.format_spread(),
            "set spread": self.set_spread(),
            "shots gain": self.accuracy(shots=8) - self.accuracy(shots=1),
            "flipped 0.25 cost": plain - self.accuracy(labels=FLIPPED_LABELS),
            "random labels cost": plain - self.accuracy(labels=RANDOM_LABELS),
            "log-prob": fmean(map(math.log, right)),
            "brier": fmean(2 * (1 - p) ** 2 for p in right),
        }


@pytest.mark.parametrize("model", SHARES)
def test_every_number_is_a_loop_over_the_samples(made, board, model):
    estimates = card_of(board, model)
    expected = Loops(made, model).values()
    for name, value in expected.items():
        estimate = estimates[name]
        assert estimate.mean == pytest.approx(value, abs=1e-12), name
        assert estimate.low <= estimate.mean <= estimate.high
    assert set(estimates) == {*expected, "ece"}
    assert 0 < estimates["ece"].mean < 1
    assert estimates["accuracy"].documents == N
    assert estimates["accuracy"].sets == len(SEEDS)


def test_formats_are_orders_of_a_set_on_the_board(board):
    """Beside seed and order, of one row, three sets of demonstrations; flips are of orders."""
    entry = row_of(board, "icl, 4 shots")
    (column,) = board.columns
    cell = entry.cells[column.name]
    assert [prompt_set.label for prompt_set in cell.sets] == ["seed 0", "seed 1", "seed 2"]
    runs = [(unit.run.format, unit.run.order) for unit in cell.sets[0].answered]
    assert runs == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    assert cell.sensitivity.mean == pytest.approx(card_of(board, "icl")["order flips"].mean)
    conditions = [entry.conditions for entry in board.entries if entry.method == "icl"]
    assert sum("labels=random" in words for words in conditions) == 1


def test_a_spread_and_its_interval():
    """Over documents: what the same would be for others. Variants that are the same have none."""
    rng = np.random.default_rng(0)
    scores = (rng.random((400, 1, 3)) < [0.5, 0.6, 0.9]).astype(float)
    varied = spread(scores)
    assert varied.mean == pytest.approx(np.ptp(scores.mean(axis=(0, 1))))
    ends = scores[:, 0, 2] - scores[:, 0, 0]
    half = 1.966 * ends.std(ddof=1) / 20
    assert (varied.high - varied.low) / 2 == pytest.approx(half, rel=0.1)
    same = spread(np.repeat(scores[:, :, :1], 3, axis=2))
    assert same.mean == same.low == 0 < same.high < 0.013


def test_over_tasks_which_count_alike(tmp_path):
    """A board without labels and formats has no card."""
    for task, seed in itertools.product("tu", SEEDS):
        run(tmp_path / task / "plain", "icl", seed, 0.9, PLAIN, task)
    plain = board_of(tmp_path)
    assert plain.card is None
    assert "What predictions depend on" not in page(plain, figures.svgs(plain))
    for task, seed in itertools.product("tu", SEEDS):
        run(tmp_path / task / "random", "icl", seed, 0.5, Condition(RANDOM_LABELS), task)
    costs = []
    for task in "tu":
        costs.append(card_of(board_of(tmp_path / task), "icl")["random labels cost"].mean)
    both = card_of(board_of(tmp_path), "icl")["random labels cost"]
    assert both.mean == pytest.approx(fmean(costs))
    assert both.low < both.mean < both.high


def test_the_card_in_the_terminal(board, tmp_path):
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    console.print(shown.table(board.card, "Title"))
    text = console.export_text()
    words = " ".join(text.split())
    short = [column.name for column in board.card.properties if " " not in column.name]
    assert short
    assert all(name in words for name in short)
    assert max(map(len, text.splitlines())) <= 80
    assert "Title" in text
    for part in first_texts(board):
        assert part in text


def first_texts(board):
    """How the first property of the first row is written: its value and its interval."""
    first = board.card.properties[0]
    return shown.texts(first, board.card.rows[0].values[first])


def test_the_card_on_the_page_and_as_a_figure_with_its_numbers(board, tmp_path):
    html = page(board, figures.svgs(board))
    assert "What predictions depend on" in html
    assert "random labels cost, %" in html
    assert first_texts(board)[1] in html
    paths = figures.draw(board, tmp_path / "figures", ["card"])
    assert [path.name for path in paths] == ["card.svg", "card.png", "card.csv"]
    lines = paths[-1].read_text().splitlines()
    assert len(lines) == 1 + len(board.card.rows) * len(board.card.properties)
