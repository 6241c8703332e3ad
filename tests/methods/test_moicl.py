"""Mixtures of windows, whose weights are fitted, against a loop written from the paper."""

import math

import pytest
import torch

from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import Predictor, make
from lm_eval_icl.methods.moicl import LabeledRow, fit_weights
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context
from tests import tiny

pytestmark = pytest.mark.usefixtures("tried_once")

CONTEXT = Context((1, 60), ((15, 26, 37, 8), (9, 40, 11, 12, 13), (14, 75, 16)))
OPTIONS = [(22, 23), (24,), (70, 5, 6)]
ROWS = [
    LabeledRow((20 + i, 30 + i), OPTIONS, label) for i, label in enumerate([0, 1, 2, 2, 0, 2, 2])
]
QUERIES = {(50, 51): OPTIONS, (52,): OPTIONS}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    return tiny.build(request.param, torch.float64)


def log_likelihood(model, window, query, answer):
    """Of an answer after a window, in one ordinary pass."""
    before = [*CONTEXT.prefix, *window, *query]
    with torch.no_grad():
        logprobs = model(torch.tensor([[*before, *answer]])).logits[0].log_softmax(-1)
    first = len(before) - 1
    return sum(float(logprobs[first + i, token]) for i, token in enumerate(answer))


def windows_of(size):
    parts = CONTEXT.demonstrations
    return [sum(parts[i : i + size], ()) for i in range(0, len(parts), size)]


def literal_weights(scores, labels, epochs, lr, seed):
    """Adam by hand, on the weighted cross-entropy of one row a step."""
    n = len(scores[0])
    weights = [1 / n] * n
    mean = [0.0] * n
    square = [0.0] * n
    t = 0
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for row in torch.randperm(len(labels), generator=generator).tolist():
            t += 1
            by_window = scores[row]
            label = labels[row]
            values = [0.0] * len(by_window[0])
            for weight, window in zip(weights, by_window, strict=True):
                for y, score in enumerate(window):
                    values[y] += weight * score
            largest = max(values)
            exps = [math.exp(value - largest) for value in values]
            shares = [e / sum(exps) for e in exps]
            factor = len(labels) / labels.count(label)
            for b, window in enumerate(by_window):
                expected = sum(p * s for p, s in zip(shares, window, strict=True))
                g = factor * (expected - window[label])
                mean[b] = 0.9 * mean[b] + 0.1 * g
                square[b] = 0.999 * square[b] + 0.001 * g * g
                corrected = mean[b] / (1 - 0.9**t)
                root = math.sqrt(square[b] / (1 - 0.999**t))
                weights[b] -= lr * corrected / (root + 1e-8)
    return weights


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_and_scores_are_those_of_a_literal_loop(model, size, plain):
    arguments = {"window_size": size, "rows": len(ROWS), "epochs": 2, "seed": 4}
    runner = MethodRunner(model, make("moicl", arguments), plain=plain)
    runner.rows[CONTEXT] = ROWS
    by_request = tiny.scores(runner, {CONTEXT: QUERIES})
    weights = runner.method_of(CONTEXT).weights
    windows = windows_of(size)
    labels = []
    scores = []
    for row in ROWS:
        labels.append(row.label)
        by_window = []
        for window in windows:
            by_window.append([log_likelihood(model, window, row.query, o) for o in OPTIONS])
        scores.append(by_window)
    expected = literal_weights(scores, labels, 2, 0.1, 4)
    assert weights == pytest.approx(expected, abs=1e-9)
    assert min(weights) < 0 or max(weights) > 1 / len(windows) + 0.05
    assert len(by_request) == 6
    for (_, query, answer), (logprob, _) in by_request.items():
        mixed = 0.0
        for weight, window in zip(expected, windows, strict=True):
            mixed += weight * log_likelihood(model, window, query, answer)
        assert logprob == pytest.approx(mixed, abs=1e-8)
    assert runner.encoder.learned["rows"] == len(ROWS)


@pytest.mark.parametrize("plain", [False, True])
def test_the_passes_of_a_fit_count_once(model, plain):
    runner = MethodRunner(model, make("moicl"), plain=plain)
    runner.rows[CONTEXT] = ROWS
    sizes = []

    def note(module, args, inputs):
        ids = args[0] if args else inputs["input_ids"]
        sizes.append(ids.numel())

    with model.register_forward_pre_hook(note, with_kwargs=True):
        tiny.scores(runner, {CONTEXT: QUERIES})
    assert (runner.passes_run, runner.tokens_run) == (len(sizes), sum(sizes))


def test_without_epochs_it_is_the_ensemble(model):
    def logprobs(method):
        scores = tiny.scores(MethodRunner(model, method), {CONTEXT: QUERIES})
        return {request: logprob for request, (logprob, _) in scores.items()}

    ensemble = logprobs(make("ensemble"))
    assert logprobs(make("moicl", {"epochs": 0})) == pytest.approx(ensemble)
    of_first_window = logprobs(make("moicl", {"weights": [1, 0, 0]}))
    for (_, query, answer), logprob in of_first_window.items():
        alone = log_likelihood(model, CONTEXT.demonstrations[0], query, answer)
        assert logprob == pytest.approx(alone, abs=1e-9)


def test_a_window_that_misleads_gets_a_negative_weight():
    """Window 1 prefers the right option, window 2 the wrong one."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (40,), generator=generator).tolist()
    scores = []
    for label in labels:
        row = torch.randn(2, 2, generator=generator, dtype=torch.double)
        row[0, label] += 1
        row[1, label] -= 1
        scores.append(row)
    right, wrong = fit_weights(scores, labels, 5, 0.1, 0).tolist()
    assert right > 0.5 and wrong < -0.5


def test_rows_are_needed(model):
    runner = MethodRunner(model, make("moicl"))
    with pytest.raises(InputError, match=r"labeled rows.*take a task with options"):
        list(runner.score({CONTEXT: QUERIES}))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"weights": ["a"]}, "must be a list, each a number"),
        ({"rows": 0}, "rows=0: must be a whole number, 1 or more"),
    ],
    ids=["weights", "rows"],
)
def test_what_is_refused(arguments, why):
    with pytest.raises(InputError, match=why):
        make("moicl", arguments)


def test_texts_are_generated_with_given_weights(checkpoint):
    """With all weight on one window, they are those after this window."""
    model, tokenizer = tiny.load(checkpoint("llama"))
    first = "Review: dull\nSentiment: no\n\n"
    second = "Review: warm\nSentiment: yes\n\n"

    def text(method, shown):
        predictor = Predictor(model, tokenizer, method)
        return predictor.generate(shown, ["Review: odd\nSentiment:"], max_new_tokens=6)

    mixture = make("moicl", {"weights": [0, 1]})
    window = make("pcw", {"positions": "sequential"})
    assert text(mixture, [first, second]) == text(window, [second])
