"""The robustness card: every number against loops over the samples."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from lm_eval_icl.leaderboard import card as shown
from lm_eval_icl.leaderboard import figures
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results.build import build
from lm_eval_icl.results.card import spread
from lm_eval_icl.results.read import read
from tests.boards import samples_of, write

N = 60
SEEDS = (0, 1, 2)
SHARES = {"icl": 0.8, "pcw": 0.7}


def one(
    folder: Path,
    model: str,
    seed: int,
    share: float,
    *,
    order=0,
    labels=None,
    number=0,
    shots=4,
    task="t",
):
    """A run with random answers and log-likelihoods, in a study's order."""
    rng = np.random.default_rng([*map(ord, f"{model}{labels}{task}"), seed, order, number, shots])
    metadata = {
        "version": 1.0,
        **({"labels": labels} if labels else {}),
        **({"format": number} if number else {}),
    }
    own = {"metadata": metadata, "doc_to_text": "Text: {{text}}\nLabel:"}
    if number:
        metadata["unformatted"] = {"doc_to_text": own["doc_to_text"]}
        own["doc_to_text"] = f"in format {number}"
    says = [i % 2 if ok else 1 - i % 2 for i, ok in enumerate(rng.random(N) < share)]
    evil = f"{labels}{number}{shots}\n\n"  # other prompts
    put = {
        "config.icl": {"method": model, "study": {"order": order, "seed": seed, "split": "test"}}
    }
    file = write(folder / f"{model}{labels}{number}{shots}{order}{task}", model, seed, task=task, n=N, says=says,
                 order=order, shots=shots, evil=evil, put=put, **own)  # fmt: skip
    samples = [json.loads(line) for line in samples_of(file, task).open()]
    for sample, said in zip(samples, says, strict=True):
        other = float(-rng.random() * 3 - 0.01)
        scores = [0.0, other] if said == 0 else [other, 0.0]
        sample["filtered_resps"] = [[str(x), "False"] for x in scores]
    samples_of(file, task).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return samples


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, and the samples of each run on the task t, by method, labels, format, shots, order and seed."""
    folder = tmp_path_factory.mktemp("card")
    samples = {}
    varied = [
        {"order": 1},
        {"order": 2},
        {"labels": "flipped:0.25"},
        {"labels": "random"},
        {"number": 1},
    ]
    varied += [{"number": 2}, {"shots": 1}, {"shots": 8}, {}]
    for model, seed, axes in itertools.product(SHARES, SEEDS, varied):
        share = SHARES[model] - 0.1 * len(axes) - 0.2 * (axes.get("labels") == "random")
        key = [axes.get(name, default) for name, default in
               (("labels", ""), ("number", 0), ("shots", 4), ("order", 0))]  # fmt: skip
        samples[model, *key, seed] = one(folder, model, seed, share, **axes)
    return folder, samples


@pytest.fixture(scope="module")
def board(made):
    runs, left_out = read([made[0]], quiet=True)
    assert not left_out
    return build(runs)


def acc(samples):
    return [sample["acc"] for sample in samples]


def says(samples):
    return [
        int(float(s["filtered_resps"][1][0]) > float(s["filtered_resps"][0][0])) for s in samples
    ]


@pytest.mark.parametrize("model", SHARES)
def test_every_number_is_a_loop_over_the_samples(made, board, model):
    of = {key[1:]: samples for key, samples in made[1].items() if key[0] == model}
    row = next(row for row in board.card.rows if row.entry.method == model)
    found = {of_row.name: estimate for of_row, estimate in row.values.items()}
    orders = (0, 1, 2)
    sets = [of["", 0, 4, 0, seed] for seed in SEEDS]
    every = [of["", 0, 4, order, seed] for order in orders for seed in SEEDS]
    gold = fmean(fmean(acc(samples)) for samples in sets)
    pairs = [(of["", 0, 4, a, seed], of["", 0, 4, b, seed])
             for seed in SEEDS for a, b in itertools.combinations(orders, 2)]  # fmt: skip
    of_formats = [
        [fmean(acc(of["", number, 4, 0, seed])) for number in (0, 1, 2)] for seed in SEEDS
    ]
    of_sets = [fmean(fmean(acc(of["", 0, 4, order, seed])) for order in orders) for seed in SEEDS]
    expected = {
        "accuracy": fmean(fmean(acc(samples)) for samples in every),
        "order flips": fmean(
            fmean(a != b for a, b in zip(says(x), says(y), strict=True)) for x, y in pairs
        ),
        "format spread": fmean(max(values) - min(values) for values in of_formats),
        "set spread": max(of_sets) - min(of_sets),
        "shots gain": fmean(
            fmean(acc(of["", 0, 8, 0, s])) - fmean(acc(of["", 0, 1, 0, s])) for s in SEEDS
        ),
    }
    for labels in ("flipped:0.25", "random"):
        flipped = fmean(fmean(acc(of[labels, 0, 4, 0, seed])) for seed in SEEDS)
        expected[{"random": "random labels cost"}.get(labels, "flipped 0.25 cost")] = gold - flipped
    right = [math.exp(float(s["filtered_resps"][i % 2][0])) / sum(math.exp(float(x)) for x, _ in s["filtered_resps"])
             for samples in every for i, s in enumerate(samples)]  # fmt: skip
    expected["log-prob"] = fmean(map(math.log, right))
    expected["brier"] = fmean(2 * (1 - p) ** 2 for p in right)
    for name, value in expected.items():
        assert found[name].mean == pytest.approx(value, abs=1e-12), name
        assert found[name].low <= found[name].mean <= found[name].high
    assert set(found) == {*expected, "ece"}
    assert 0 < found["ece"].mean < 1
    assert found["accuracy"].documents == N
    assert found["accuracy"].sets == len(SEEDS)


def test_formats_are_orders_of_a_set_on_the_board(board):
    """Beside seed and order: of one row, three sets of demonstrations; flips are of orders alone."""
    entry = next(
        e
        for e in board.entries
        if e.method == "icl" and "labels" not in e.conditions and "4 shots" in e.label
    )
    (column,) = (column.name for column in board.columns)
    cell = entry.cells[column]
    assert [of.label for of in cell.sets] == ["seed 0", "seed 1", "seed 2"]
    runs = [(unit.run.format, unit.run.order) for unit in cell.sets[0].answered]
    assert runs == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    row = next(row for row in board.card.rows if row.entry.method == "icl")
    flips = next(estimate for of, estimate in row.values.items() if of.name == "order flips")
    assert cell.sensitivity.mean == pytest.approx(flips.mean)
    labeled = [e.conditions for e in board.entries if e.method == "icl"]
    assert sum("labels=random" in words for words in labeled) == 1


def test_a_spread_and_its_interval():
    """Over documents: what the same would be for others. Variants that are the same have none."""
    rng = np.random.default_rng(0)
    found = spread(scores := (rng.random((400, 1, 3)) < [0.5, 0.6, 0.9]).astype(float))
    assert found.mean == pytest.approx(np.ptp(scores.mean(axis=(0, 1))))
    ends = scores[:, 0, 2] - scores[:, 0, 0]
    assert (found.high - found.low) / 2 == pytest.approx(1.966 * ends.std(ddof=1) / 20, rel=0.1)
    same = spread(np.repeat(scores[:, :, :1], 3, axis=2))
    assert same.mean == same.low == 0 < same.high < 0.013


def test_over_tasks(tmp_path):
    """Tasks count alike; a board without labels and formats has no card."""
    for task, seed in itertools.product("tu", SEEDS):
        one(tmp_path / task / "plain", "icl", seed, 0.9, task=task)
    plain = build(read([tmp_path], quiet=True)[0])
    assert plain.card is None
    assert "What predictions depend on" not in page(plain, figures.svgs(plain))
    for task, seed in itertools.product("tu", SEEDS):
        one(tmp_path / task / "random", "icl", seed, 0.5, labels="random", task=task)
    (row,) = build(read([tmp_path], quiet=True)[0]).card.rows
    cost = {of.name: estimate for of, estimate in row.values.items()}["random labels cost"]
    alone = [build(read([tmp_path / task], quiet=True)[0]).card.rows[0].values for task in "tu"]
    single = [estimate.mean for values in alone for of, estimate in values.items() if of.labels]
    assert cost.mean == pytest.approx(fmean(single))
    assert cost.low < cost.mean < cost.high


def test_what_people_see(board, tmp_path):
    """In the terminal, on the page, and as a figure with its numbers."""
    from rich.console import Console

    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    console.print(shown.table(board.card, "Title"))
    text = console.export_text()
    assert all(
        of.name in " ".join(text.split()) for of in board.card.properties if " " not in of.name
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "Title" in text
    value, interval = shown.texts(
        board.card.properties[0], board.card.rows[0].values[board.card.properties[0]]
    )
    assert value in text
    assert interval in text
    html = page(board, figures.svgs(board))
    assert "What predictions depend on" in html
    assert "random labels cost, %" in html
    assert interval in html
    paths = figures.draw(board, tmp_path / "figures", ["card"])
    assert [path.name for path in paths] == ["card.svg", "card.png", "card.csv"]
    lines = paths[-1].read_text().splitlines()
    assert len(lines) == 1 + len(board.card.rows) * len(board.card.properties)
