"""Expected calibration error, Brier score and the right option's log-probability, against loops over the formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from lm_eval_icl import results
from lm_eval_icl.results import metrics
from lm_eval_icl.results.build import build
from lm_eval_icl.results.collect import collect
from lm_eval_icl.results.read import read
from tests.boards import samples_of, write

RANDOM = np.random.default_rng(0)
LOGPROBS = [tuple((RANDOM.normal(size=n) * 2 - 5).tolist()) for n in (2, 3, 4) * 30]
GOLDS = [int(RANDOM.integers(len(of_document))) for of_document in LOGPROBS]


def softmax(logprobs: tuple[float, ...]) -> list[float]:
    total = sum(math.exp(x) for x in logprobs)
    return [math.exp(x) / total for x in logprobs]


def guo(probabilities: list[list[float]], golds: list[int]) -> float:
    """Guo et al. 2017, equations 2 and 3: 15 bins ((m - 1) / 15, m / 15]."""
    error = 0.0
    for m in range(1, 16):
        in_bin = [
            (p, g)
            for p, g in zip(probabilities, golds, strict=True)
            if (m - 1) / 15 < max(p) <= m / 15
        ]
        if in_bin:
            accuracy = sum(p.index(max(p)) == g for p, g in in_bin) / len(in_bin)
            error += (
                len(in_bin)
                / len(golds)
                * abs(accuracy - sum(max(p) for p, _ in in_bin) / len(in_bin))
            )
    return error


EXPECTED = {
    "ece": guo([softmax(x) for x in LOGPROBS], GOLDS),
    "brier": sum(
        (p - (k == g)) ** 2 for x, g in zip(LOGPROBS, GOLDS, strict=True) for k, p in enumerate(softmax(x))
    ) / len(GOLDS),
    "log_probability": sum(math.log(softmax(x)[g]) for x, g in zip(LOGPROBS, GOLDS, strict=True)) / len(GOLDS),
}  # fmt: skip


def sampled(folder: Path, model: str = "icl", seed: int = 0) -> Path:
    """A run with these log-likelihoods in its samples."""
    n = len(GOLDS)
    says = [x.index(max(x)) for x in LOGPROBS]
    scores = [float(a == b) for a, b in zip(says, GOLDS, strict=True)]
    file = write(folder / f"{model}{seed}", model, seed, n=n, right=scores)
    samples = [json.loads(line) for line in samples_of(file, "t").open()]
    for sample, logprobs, gold in zip(samples, LOGPROBS, GOLDS, strict=True):
        sample |= {"target": str(gold), "filtered_resps": [[str(x), "False"] for x in logprobs]}
    samples_of(file, "t").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return file


def test_the_edges_of_bins():
    """A confidence of exactly m / 15 is in the bin that ends there; 1 is in the last."""
    sums = metrics.binned(np.array([[1 / 15, 0.0], [1.0, 1.0], [0.5, 1.0]])).reshape(3, 2, 15)
    assert sums[:, 1].argmax(axis=1).tolist() == [0, 14, 7]
    assert float(metrics.calibration_error(sums.reshape(3, -1).sum(axis=0))) == pytest.approx(
        (1 / 15 + 0.5) / 3
    )


@pytest.mark.parametrize("model", ["icl", "hf"])
def test_functions_on_documents_and_metrics_of_a_board(tmp_path, model):
    """The same numbers three ways: by the formulas, of a table, and of a board's cells; also from collected files."""
    sampled(tmp_path / "out", model)
    collect(read([tmp_path / "out"], quiet=True)[0], tmp_path / "board")
    for folder in (tmp_path / "out", tmp_path / "board"):
        table = results.documents(folder)
        for name, expected in EXPECTED.items():
            assert getattr(results, name)(table) == pytest.approx(expected, rel=1e-12)
            (run,), left_out = read([folder], quiet=True, metric=name)
            board = build([run], left_out)
            cell = board.entries[0].cells["t"]
            (column,) = board.columns
            assert cell.estimate.mean == pytest.approx(expected, rel=1e-12)
            assert column.metric == name
            assert column.higher_is_better == (name == "log_probability")


def test_a_difference_of_calibration_errors(tmp_path):
    """Less is better; the same answers differ by nothing."""
    for model in ("icl", "pcw"):
        for seed in (0, 1):
            sampled(tmp_path, model, seed)
    board = build(*read([tmp_path], quiet=True, metric="ece"))
    difference = next(e for e in board.entries if e.method == "pcw").cells["t"].difference
    assert difference.mean == 0
    assert difference.p == 1


def test_documents_have_what_people_group_by(tmp_path):
    sampled(tmp_path)
    table = results.documents(tmp_path)
    assert set(table.shots) == {4}
    assert set(table.options) == {("good", "bad")}
    assert set(table.arguments) == {"{}"}
    assert table.loglikelihoods.tolist() == LOGPROBS
    assert table.gold.tolist() == GOLDS
    assert all(sum(p) == pytest.approx(1) for p in table.probabilities)
    assert table.groupby(["model", "shots", "filter"]).apply(results.ece).tolist() == pytest.approx(
        [EXPECTED["ece"]]
    )


def test_without_samples_there_is_no_calibration(tmp_path):
    write(tmp_path, samples=False)
    runs, (left,) = read([tmp_path], quiet=True, metric="ece")
    assert not runs
    assert "needs samples" in left.why
