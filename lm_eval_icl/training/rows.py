"""Rows of tokens to train on: prompts in the layout of a method, with the tokens to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.attention import additive
from lm_eval_icl.methods.answers import leaks, predicting
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.predictor import Predictor
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import TokenizedPrompt
from lm_eval_icl.training.episodes import Episode


def check_trainable(method: Method, loss: str = "query") -> None:
    """Refuse a method under which no model can be trained.

    Raises:
        InputError: the method is not one forward pass over one layout; or with `loss` "all", the
            mask lets demonstrations see the answers that they would be trained to predict.
    """
    if not method.one_pass:
        raise InputError(
            f"no model is trained under {method.name}, since it is more than one pass over one "
            f"layout. It runs on a checkpoint that was trained under {method.trained_under}: give "
            f"{method.trained_under}."
        )
    if loss == "all" and leaks(method):
        raise InputError(
            f"loss=all: under {method.name} a demonstration sees its own answer before it would "
            "have to predict it: give loss=query."
        )


@dataclass(frozen=True)
class TrainingRow:
    """An episode as the tokens of one row, and the tokens to predict.

    Attributes:
        ids: the n token ids of the row.
        layout: which of the n tokens sees which, and the position of each.
        targets: (index of a token in the row, id of the token that it has to predict).
    """

    ids: list[int]
    layout: Layout
    targets: list[tuple[int, int]]


def make_row(method: Method, prompt: TokenizedPrompt, answer: Sequence[int]) -> TrainingRow:
    """The row of a prompt and an answer, whose tokens are the targets.

    The answer's last token predicts nothing, so it is not in the row, as when it is scored.
    """
    context = prompt.context
    layout = method.row(context, len(prompt.query), len(answer) - 1)
    tokens = [*context.tokens, *prompt.query, *answer[:-1]]
    ids = [tokens[i] for i in layout.source]
    targets = list(enumerate(answer, start=len(layout) - len(answer)))
    return TrainingRow(ids, layout, targets)


class RowMaker:
    """Makes rows of episodes under a method.

    Args:
        predictor: the model's tokenizer and limits under the method.
        loss: "query" for the tokens of the query's answer; "all" for those of the demonstrations'
            answers too.
    """

    def __init__(self, predictor: Predictor, loss: str = "query") -> None:
        self.method = predictor.runner.method
        self.tokenizer = predictor.tokenizer
        self.limits = predictor.limits
        self.loss = loss
        check_trainable(self.method, loss)

    def why_not(self, episode: Episode, by_tokens: bool = False, option: str | None = None) -> str:
        """Why an episode does not fit the model, as the end of a sentence about its rows.

        Empty if it fits.

        Args:
            by_tokens: whether the row must also have no more tokens, copies included, than the
                model has positions, so that several methods are trained on the same episodes
                (InvICL, appendix A.4).
            option: the option that takes the place of the answer.
        """
        limits = self.limits
        prompt, answer = self.tokens(episode, option)
        if not answer:
            return "have an answer of no tokens"
        reason = limits.too_long(prompt, len(answer) - 1)
        if reason is not None:
            return reason.why
        layout = make_row(self.method, prompt, answer).layout
        # A window's mask has no more tokens than the model has positions.
        if (by_tokens or limits.keeps_window) and len(layout) > limits.positions:
            return f"have more tokens than {limits.model} has positions ({limits.positions:,})"
        # Beyond that length, rotary angles depend on the longest row of a batch.
        if limits.switch is not None and layout.reach > limits.switch[0]:
            return (
                f"cross position {limits.switch[0]}, from which on this model computes all "
                "positions in another way"
            )
        return ""

    def row(self, episode: Episode, option: str | None = None) -> TrainingRow:
        """The row of an episode, with its answer or with one of its options."""
        prompt, answer = self.tokens(episode, option)
        row = make_row(self.method, prompt, answer)
        if self.loss == "query":
            return row
        demonstrations = episode.example.prompt.demonstrations
        spans = dict(zip(demonstrations, episode.answer_spans(), strict=True))
        arranged = self.tokenizer.arranged(episode.example.prompt)
        spans_in_order = [spans[part] for part in arranged.demonstrations]
        inside = self.tokenizer.inside(arranged, spans_in_order)
        shown = predicting(row.layout, prompt.context.lengths, inside)
        row.targets[:0] = [(i, row.ids[i + 1]) for i in shown]
        return row

    def tokens(
        self, episode: Episode, option: str | None = None
    ) -> tuple[TokenizedPrompt, tuple[int, ...]]:
        """The ids of an episode's prompt, and of its answer or of one of its options."""
        prompt = episode.example.prompt
        answer = episode.example.answer if option is None else option
        if isinstance(prompt, EncodedPrompt) and isinstance(answer, EncodedText):
            self.tokenizer.check_known(prompt.tokens, answer.ids)
            return prompt.tokens, answer.ids
        return self.tokenizer.pair(self.tokenizer.arranged(prompt), answer)


def collate(rows: Sequence[TrainingRow], dtype: torch.dtype) -> dict[str, Any]:
    """A batch of rows, padded at their ends with tokens that see themselves alone.

    Args:
        rows: b rows of at most n tokens.
        dtype: the dtype of the mask.

    Returns:
        input_ids: [b, n].
        position_ids: [b, n], and the layouts and the mask_dtype from which `mask` makes the mask on
            the device; left out if every row is causal and sequential.
        target_row, target_id: of each target.
        target_share: of each target. Losses divided by it sum to a mean over the targets of each
            row, and then over the rows.
        read_at: the indices at which some row has a target, in ascending order.
        target_at: for each target, the place of its index in read_at.
    """
    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [row.ids[-1]] * (longest - len(row.ids)) for row in rows])
    batch: dict[str, Any] = {"input_ids": ids}
    if not all(row.layout.causal and row.layout.sequential for row in rows):
        positions = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            positions[i, : len(row.ids)] = row.layout.positions
        batch |= {
            "layouts": [row.layout for row in rows],
            "mask_dtype": dtype,
            "position_ids": positions,
        }
    targets: list[tuple[int, int, int, int]] = []
    for number, row in enumerate(rows):
        share = len(row.targets) * len(rows)
        targets += [(number, index, token, share) for index, token in row.targets]
    row_numbers, indices, tokens, shares = torch.tensor(targets).T.contiguous()
    read_at, target_at = indices.unique(return_inverse=True)
    return batch | {
        "target_row": row_numbers,
        "read_at": read_at,
        "target_at": target_at,
        "target_id": tokens,
        "target_share": shares,
    }


def mask(layouts: Sequence[Layout], n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask of rows that are padded to n tokens, which is added to the scores of attention.

    It has the shape [rows, 1, n, n]. It is made on the device, since its size is the square of a
    row's, which takes longer to move than a layout.
    """
    sees = torch.eye(n, dtype=torch.bool, device=device).repeat(len(layouts), 1, 1)
    for row_sees, layout in zip(sees, layouts, strict=True):
        at = torch.arange(len(layout), device=device)
        row_sees[: len(layout), : len(layout)] = layout.rule(at[:, None], at)
    return additive(sees, dtype)[:, None]


def mean_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The mean over a batch's rows of the mean cross-entropy of a row's targets (as in MetaICL)."""
    return (target_losses(model, batch) / batch["target_share"]).sum()


def row_losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The cross-entropy of each row's targets, summed: [rows]."""
    losses = target_losses(model, batch)
    sums = losses.new_zeros(len(batch["input_ids"]))
    return sums.index_add(0, batch["target_row"], losses)


def target_losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Run a batch, and return the negative log-probability of each target, in float32 or more.

    The result has the shape (targets,). The projection to the vocabulary runs only at the indices
    at which some row has a target.
    """
    ids = batch["input_ids"]
    read_at = batch["read_at"]
    inputs: dict[str, Any] = {}
    if "layouts" in batch:
        # Under a 4-D mask, most models would have no sliding window.
        attention_mask = torch.ones_like(ids)
        if not all(layout.causal for layout in batch["layouts"]):
            attention_mask = mask(batch["layouts"], ids.shape[1], batch["mask_dtype"], ids.device)
        inputs = {"attention_mask": attention_mask, "position_ids": batch["position_ids"]}
    logits = model(input_ids=ids, **inputs, logits_to_keep=read_at, use_cache=False).logits
    if logits.shape[1] != len(read_at):  # the model ignores logits_to_keep
        logits = logits[:, read_at]
    logits = logits[batch["target_row"], batch["target_at"]]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits, batch["target_id"], reduction="none")
