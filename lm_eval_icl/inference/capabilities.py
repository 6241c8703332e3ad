"""What a loaded model can do, found by running a few tokens through it; there is no list of architectures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.memory import Memory, causal_pass
from lm_eval_icl.inference.scoring import score_alone, score_packed


@dataclass(frozen=True)
class Capabilities:
    """What a model can do.

    Attributes:
        obeys_mask: a token that is hidden by a 4-D mask does not influence the result.
        obeys_positions: a token's position is the one given in `position_ids`, whatever its index.
        window: how many tokens back a token attends at most, counted by index; None if there is no limit.
        can_trim_last_block: the last block can be run for some tokens of a pass only
            (`lm_eval_icl.inference.blocks.last_block_at`).
    """

    obeys_mask: bool
    obeys_positions: bool
    window: int | None
    can_trim_last_block: bool

    @property
    def can_pack(self) -> bool:
        """Whether several queries can be packed into one row."""
        return self.obeys_mask and self.obeys_positions

    def can_pack_to(self, length: int) -> bool:
        """Whether a row of `length` tokens can be packed without a window hiding tokens that should be seen."""
        return self.can_pack and (self.window is None or length <= self.window)


def probe(model: PreTrainedModel) -> Capabilities:
    """Find out what a model can do, by running a few tokens through it.

    Two answers, scored one after the other on a memory, must have the scores that they have in a single pass. A hidden
    token must not change a score in any bit, in any precision, with one exception: a mixture of experts multiplies all
    tokens of one expert at once, so a hidden token changes the shape of that product and with it the rounding. There,
    a difference of 32 units in the last place is allowed, but at most a tenth of the difference that the token makes
    when it is seen.

    Raises:
        InputError: the model cannot continue from keys and values (a state-space model, say), or its log-probabilities
            are NaN or infinite.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids: list[int] = [(7 + 11 * i) % vocabulary for i in range(64)]
    context, query, other, another = ids[:12], ids[12:20], ids[20:32], ids[32:44]
    answer, second = ids[44:48], ids[48:52]
    # What must stay hidden begins otherwise than the query, or the two would share tokens of the packed row.
    other, another = [(query[0] + 1) % vocabulary, *other[1:]], [(query[0] + 2) % vocabulary, *another[1:]]
    nothing = Memory([], [], 0)

    def in_one_pass(*parts: list[int], answer: list[int] = answer) -> float:
        return score_alone(model, nothing, [token for part in parts for token in part], [answer])[0][0]

    try:
        expected, without = in_one_pass(context, query), in_one_pass(query)
        expected_second = in_one_pass(context, query, answer=second)
        memory = Memory(causal_pass(model, context), context, len(context))
        if not memory.layers or any(entry.shape[-2] != len(context) for layer in memory.layers for entry in layer):
            raise ValueError("its cache does not hold one key and one value a token")
        continued, continued_second = (score for score, _ in score_alone(model, memory, query, [answer, second]))
        noise = 1e-3 * abs(expected)
        if torch.finfo(model.dtype).bits < 32:  # noisy, but a model that ignores the memory differs by more than this
            noise = max(noise, abs(without - expected) / 2)
        for found, wanted in ((continued, expected), (continued_second, expected_second)):
            if math.isfinite(wanted) and not abs(found - wanted) <= noise:
                raise ValueError(f"continued from them it gives {found:.4f}, in one pass {wanted:.4f}")
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be used: the demonstrations are kept as keys and values of every layer, "
            f"which this model does not continue from ({' '.join(str(error).split())[:200]})."
        ) from error

    if not math.isfinite(expected):
        raise InputError(
            f"{type(model).__name__} cannot be used: the log-probability of a few tokens is {expected} "
            f"({model.dtype}). The checkpoint is broken, or its numbers overflow: try --model_args dtype=float32."
        )

    def alone(start: int) -> float:
        return score_alone(model, replace(memory, query_start=start), query, [answer])[0][0]

    def packed(beside: list[int], trim: bool = False) -> float:
        return score_packed(model, memory, [(beside, answer), (query, answer)], trim_last_block=trim)[1][0]

    rounding = 32 * torch.finfo(model.dtype).eps * abs(expected)
    try:
        obeys_positions = alone(len(context) + 7) != alone(len(context))
    except Exception:  # the model takes no `position_ids`
        obeys_positions = False
    try:
        visible = abs(in_one_pass(context, other, query) - in_one_pass(context, another, query))
        allowed = min(visible / 10, rounding) if _has_experts(model) else 0.0
        whole = packed(other)
        obeys_mask = abs(whole - packed(another)) <= allowed
    except Exception:  # the model takes no 4-D mask
        obeys_mask = False
    try:
        trims = obeys_mask and obeys_positions
        trims = trims and abs(packed(other, trim=True) - whole) <= min(visible / 10, rounding)
    except Exception:  # the last block's arguments or output are not of the usual form
        trims = False
    return Capabilities(obeys_mask, obeys_positions, _window(model), trims)


def _has_experts(model: PreTrainedModel) -> bool:
    """Whether the model is a mixture of experts: its configuration has a number of experts, under any of the names
    that transformers uses for it."""
    config = model.config.get_text_config().to_dict()
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in config.items())


def _window(model: PreTrainedModel) -> int | None:
    """The shortest attention window in the configuration; None if there is none.

    It is read from the configuration since a few tokens do not show it: a window hides nothing in rows up to its
    length, and some models have no window under a 4-D mask.
    """
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    if getattr(config, "use_sliding_window", True) is False:
        windows[0] = None
    return min((window for window in windows if isinstance(window, int)), default=None)
