"""MoICL: Mixtures of In-Context Learners (Hong et al., ACL 2025)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from lm_eval_icl.declared import NotNegative, Positive
from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.devices import to_device
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.learned import Rate
from lm_eval_icl.methods.several import Weighted
from lm_eval_icl.prompts.tokens import Context, Ids


class LabeledRow(NamedTuple):
    """A query that is no demonstration, its options, and the index of the right one."""

    query: Ids
    options: Sequence[Ids]
    label: int


@dataclass(frozen=True)
class MoICL(Weighted):
    """A mixture of windows, whose weights are fitted on labeled rows.

    With the log-likelihoods s_b of an option on window b, its value is sum_b w_b s_b. The weights
    begin at 1/n for n windows and may become negative. They are fitted by Adam, one step for each
    row, with the cross-entropy of the row's options times N / (the number of rows of its class).
    (The authors' code gives this factor to a mean over a batch of one row, where it has no effect.
    For options of one token, their logits give the same probabilities as log-likelihoods.) There is
    no dev set: the weights are those after the last epoch. With one window it is `icl`.

    Args:
        rows: the number of labeled rows, drawn from the few-shot documents that are neither
            demonstrations nor evaluated.
        epochs: how many times the rows are run through. With 0, all weights are equal.
        lr: the learning rate.
        seed: of the order of the rows, drawn anew for each epoch.
        weights: the weights, one for each window. None to fit them.
        per_document: fit also if every document has other demonstrations.
    """

    learns = True

    rows: Positive = 64
    epochs: NotNegative = 5
    lr: Rate = 0.1
    seed: NotNegative = 0
    weights: Annotated[tuple[float, ...], Field(min_length=1)] | None = None
    per_document: bool = False

    @property
    def rows_wanted(self) -> int:
        return self.rows if self.epochs and self.weights is None else 0

    def for_context(self, runner: Any, context: Context) -> Method:
        """The method with the weights that are fitted for the windows of a context."""
        windows = self.contexts(context)
        if len(windows) == 1 or not self.rows_wanted:
            return self
        rows: Sequence[LabeledRow] = runner.rows.get(context, ())
        if not rows:
            raise InputError(
                f"{self.name} fits its weights on labeled rows of a task, and this prompt has no "
                "rows: take a task with options, or give weights=[...] or epochs=0."
            )
        begun = time.perf_counter()
        queries = {row.query: row.options for row in rows}
        inner = runner.under(self.window_method)
        by_window = []
        for window in windows:
            values = {}
            for requests, scored in inner.score({window: queries}):
                for (_, query, answer), (value, _) in zip(requests, scored, strict=True):
                    values[query, answer] = value
            by_window.append(values)
        scores = []
        for row in rows:
            table = []
            for values in by_window:
                table.append([values[row.query, option] for option in row.options])
            scores.append(torch.tensor(table, dtype=torch.double))
        labels = [row.label for row in rows]
        weights = fit_weights(scores, labels, self.epochs, self.lr, self.seed)
        runner.tokens_run += inner.tokens_run
        runner.passes_run += inner.passes_run
        learned = runner.encoder.learned
        learned["contexts"] += 1
        learned["rows"] += len(rows)
        learned["seconds"] += time.perf_counter() - begun
        return replace(self, weights=tuple(weights.tolist()))

    def mixed(self, logprobs: Tensor) -> Tensor:
        windows = logprobs.shape[1]
        numbers = self.weights or [1 / windows] * windows
        weights = to_device(torch.tensor(numbers, dtype=logprobs.dtype), logprobs.device)
        return torch.einsum("tm...,m->t...", logprobs, weights)


def fit_weights(
    scores: Sequence[Tensor], labels: Sequence[int], epochs: int, lr: float, seed: int
) -> Tensor:
    """The weights of windows with which labeled rows are predicted best.

    Args:
        scores: for each row, [windows, options] the log-likelihoods, in float64.
        labels: for each row, the index of the right option.

    Returns:
        [windows].
    """
    windows = len(scores[0])
    weights = torch.full((windows,), 1 / windows, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr)
    counts = Counter(labels)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for row in torch.randperm(len(labels), generator=generator).tolist():
            label = labels[row]
            with torch.enable_grad():
                loss = cross_entropy(weights @ scores[row], torch.tensor(label))
                weighted = loss * len(labels) / counts[label]
            [weights.grad] = torch.autograd.grad(weighted, [weights])
            optimizer.step()
    return weights.detach()
