"""The answers of demonstrations: where a layout has them, what they see, and the loss of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from lm_eval_icl.inference.attention import additive
from lm_eval_icl.inference.devices import device_of, kept_logits, on_device, to_device
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.prompt import Span
from lm_eval_icl.prompts.tokens import Context, Ids


def canonical(context: Context) -> list[int]:
    """The indices of the demonstrations, sorted by their ids."""
    return sorted(range(len(context.demonstrations)), key=context.demonstrations.__getitem__)


def examples_of(context: Context) -> list[tuple[int, Ids, int]]:
    """The demonstrations to learn from, in canonical order: their indices, their tokens up to the
    end of the answer, and the index of the first token that is predicted.
    """
    examples = []
    for i in canonical(context):
        begin, end = context.answers[i]
        tokens = context.demonstrations[i][:end]
        # No token of a demonstration predicts the demonstration's first token.
        begin = max(begin, 1)
        if begin < len(tokens):
            examples.append((i, tokens, begin))
    return examples


def leaks(method: Method) -> bool:
    """Whether the prediction of a demonstration's answer may depend on that answer.

    It may do so through any number of layers.
    """
    n = next((n for n in range(3, 1000) if not method.why_not(n)), 3)
    lengths = [2] * n  # a demonstration is an input and an answer of one token each
    layout = method.lay_out(1, lengths, 2, 1)
    reach = layout.mask
    for _ in range(len(layout.blocks)):
        reach = (reach.float() @ layout.mask.float()) > 0
    answers = [row[1] for row in kept_demonstrations(layout, lengths)]
    source = torch.tensor(layout.source)
    return any(bool(reach[at - 1][source == source[at]].any()) for at in answers)


def kept_demonstrations(layout: Layout, lengths: Sequence[int]) -> list[range]:
    """For each demonstration, the indices in the row of the copy to which the query attends.

    It is the last copy, if demonstrations are repeated.
    """
    prefix = sum(block.length for block in layout.blocks if block.name == "P")
    starts = {prefix + sum(lengths[:i]): i for i in range(len(lengths))}
    places: dict[int, range] = {}
    at = 0
    for block, kept in zip(layout.blocks, layout.kept, strict=True):
        if kept and block.name.startswith("D"):
            places[starts[block.source]] = range(at, at + block.length)
        at += block.length
    return [places[i] for i in range(len(lengths))]


def predicting(layout: Layout, lengths: Sequence[int], answers: Sequence[Span]) -> list[int]:
    """The indices in the row of the tokens that predict the tokens after them: the answers.

    Args:
        lengths, answers: the number of tokens of each demonstration, and its answer among them.
    """
    indices: list[int] = []
    copies = kept_demonstrations(layout, lengths)
    for copy, (begin, end) in zip(copies, answers, strict=True):
        # No token of a demonstration predicts the demonstration's first token.
        first = max(begin, 1)
        indices += copy[first - 1 : end - 1]
    return indices


def loss_in_layout(model: PreTrainedModel, layout: Layout, context: Context) -> Tensor:
    """The summed cross-entropy of the answers of all demonstrations, in one pass over a layout.

    Args:
        layout: of the context. Where it repeats demonstrations, the last copies predict.
    """
    ids = [context.tokens[i] for i in layout.source]
    read = predicting(layout, context.lengths, context.answers)
    device = device_of(model)
    tokens = on_device([ids], device)
    inputs: dict[str, Any] = {"use_cache": False}
    if not (layout.causal and layout.sequential):
        # Under a 4-D mask, most models would have no sliding window.
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["position_ids"] = to_device(layout.positions, device)[None]
    if not layout.causal:
        hidden = additive(layout.mask, model.dtype)
        inputs["attention_mask"] = to_device(hidden, device)[None, None]
    inputs["logits_to_keep"] = kept_logits(model, read)
    logits = model(tokens, **inputs).logits[0]
    if len(logits) != len(read):  # the model ignores logits_to_keep
        logits = logits[on_device(read, logits.device)]
    targets = on_device([ids[i + 1] for i in read], logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(wide), targets, reduction="sum")
