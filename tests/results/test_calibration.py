"""Expected calibration error, Brier score and the right option's log-probability.

They are compared with loops over the formulas.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from lm_eval_icl import results
from lm_eval_icl.results import metrics
from lm_eval_icl.results.collect import collect
from lm_eval_icl.results.read import read
from tests.boards import write, write_samples
from tests.results.files import board_of, by_method, samples_in

RANDOM = np.random.default_rng(0)
LOGPROBS = [tuple((RANDOM.normal(size=n) * 2 - 5).tolist()) for n in (2, 3, 4) * 30]
GOLDS = [int(RANDOM.integers(len(of_document))) for of_document in LOGPROBS]


def softmax(logprobs: tuple[float, ...]) -> list[float]:
    total = sum(math.exp(x) for x in logprobs)
    return [math.exp(x) / total for x in logprobs]


ANSWERS = [(softmax(logprobs), gold) for logprobs, gold in zip(LOGPROBS, GOLDS, strict=True)]


def expected_calibration_error() -> float:
    """Guo et al. 2017, equations 2 and 3: 15 bins ((m - 1) / 15, m / 15]."""
    error = 0.0
    for m in range(1, 16):
        right = []
        confidences = []
        for probabilities, gold in ANSWERS:
            confidence = max(probabilities)
            if (m - 1) / 15 < confidence <= m / 15:
                right.append(probabilities.index(confidence) == gold)
                confidences.append(confidence)
        if right:
            gap = abs(fmean(right) - fmean(confidences))
            error += len(right) / len(ANSWERS) * gap
    return error


def brier_score() -> float:
    total = 0.0
    for probabilities, gold in ANSWERS:
        for option, probability in enumerate(probabilities):
            total += (probability - (option == gold)) ** 2
    return total / len(ANSWERS)


EXPECTED = {
    "ece": expected_calibration_error(),
    "brier": brier_score(),
    "log_probability": fmean(math.log(probabilities[gold]) for probabilities, gold in ANSWERS),
}


def sampled(folder: Path, model: str = "icl", seed: int = 0) -> Path:
    """A run with these log-likelihoods in its samples."""
    scores = [probabilities.index(max(probabilities)) == gold for probabilities, gold in ANSWERS]
    file = write(folder / f"{model}{seed}", model, seed, n=len(GOLDS), right=scores)
    samples = samples_in(file)
    for sample, logprobs, gold in zip(samples, LOGPROBS, GOLDS, strict=True):
        sample["target"] = str(gold)
        sample["filtered_resps"] = [[str(x), "False"] for x in logprobs]
    write_samples(file, "t", samples)
    return file


def test_the_edges_of_bins():
    """A confidence of exactly m / 15 is in the bin that ends there; 1 is in the last."""
    sums = metrics.binned(np.array([[1 / 15, 0.0], [1.0, 1.0], [0.5, 1.0]]))
    by_bin = sums.reshape(3, 2, 15)
    assert by_bin[:, 1].argmax(axis=1).tolist() == [0, 14, 7]
    error = metrics.calibration_error(sums.reshape(3, -1).sum(axis=0))
    assert float(error) == pytest.approx((1 / 15 + 0.5) / 3)


@pytest.mark.parametrize("model", ["icl", "hf"])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_formula_the_table_and_the_board_have_the_same_number(tmp_path, model, name):
    """Also from collected files."""
    sampled(tmp_path / "out", model)
    collect(read([tmp_path / "out"], quiet=True)[0], tmp_path / "board")
    expected = pytest.approx(EXPECTED[name], rel=1e-12)
    for folder in (tmp_path / "out", tmp_path / "board"):
        function = getattr(results, name)
        assert function(results.documents(folder)) == expected
        board = board_of(folder, metric=name)
        assert board.entries[0].cells["t"].estimate.mean == expected
        (column,) = board.columns
        assert column.metric == name
        assert column.higher_is_better == (name == "log_probability")


def test_a_difference_of_calibration_errors(tmp_path):
    """Less is better; the same answers differ by nothing."""
    for model in ("icl", "pcw"):
        for seed in (0, 1):
            sampled(tmp_path, model, seed)
    rows = by_method(board_of(tmp_path, metric="ece"))
    difference = rows["pcw"].cells["t"].difference
    assert difference.mean == 0
    assert difference.p == 1


def test_orders_have_values_of_their_own_before_they_are_averaged(tmp_path):
    """Two orders whose errors would cancel in common bins."""
    for order, share in ((0, 1.0), (1, 0.8)):
        study = {"method": "icl", "study": {"order": order, "id": "s"}}
        right = [place < share * 40 for place in range(40)]
        file = write(tmp_path, "icl", right=right, order=order, put={"config.icl": study})
        samples = samples_in(file)
        for sample, is_right in zip(samples, right, strict=True):
            shares = (0.9, 0.1) if is_right else (0.1, 0.9)
            sample["filtered_resps"] = [[str(math.log(share)), "False"] for share in shares]
        write_samples(file, "t", samples)
    (cell,) = by_method(board_of(tmp_path, metric="ece"))["icl"].cells.values()
    assert cell.estimate.mean == pytest.approx(0.1)
    assert cell.estimate.low > 0.02


@pytest.mark.parametrize("label, gold", [("1", 0), (1, 1)])
def test_digits_in_a_column_of_texts_are_a_text(tmp_path, label, gold):
    file = write(tmp_path, gold=[gold] * 40, doc_to_target="label")
    samples = samples_in(file)
    for sample in samples:
        sample["doc"]["label"] = label
        sample["target"] = "1"
        for place, option in enumerate(("1", "0")):
            sample["arguments"][f"gen_args_{place}"]["arg_1"] = f" {option}"
    write_samples(file, "t", samples)
    assert set(results.documents(tmp_path).gold) == {gold}


def test_documents_have_what_people_group_by(tmp_path):
    sampled(tmp_path)
    table = results.documents(tmp_path)
    assert set(table.shots) == {4}
    assert set(table.options) == {("good", "bad")}
    assert set(table.arguments) == {"{}"}
    assert table.loglikelihoods.tolist() == LOGPROBS
    assert table.gold.tolist() == GOLDS
    assert all(sum(p) == pytest.approx(1) for p in table.probabilities)
    errors = table.groupby(["model", "shots", "filter"]).apply(results.ece)
    assert errors.tolist() == pytest.approx([EXPECTED["ece"]])


def test_without_samples_there_is_no_calibration(tmp_path):
    write(tmp_path, samples=False)
    runs, (left,) = read([tmp_path], quiet=True, metric="ece")
    assert not runs
    assert "needs samples" in left.why
