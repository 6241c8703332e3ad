"""What a loaded model does, found out by trying: no list of architectures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.memory import Memory, causal_pass
from lm_eval_icl.scoring import score_alone, score_packed


@dataclass(frozen=True)
class Abilities:
    """Attributes:
    hides: it hides what a 4-D mask hides.
    places: it places a token where `position_ids` says, whatever its index.
    window: how far it looks back at most, in tokens, counted by index; None for as far as it has.
    cuts: its last block can run for some tokens of a pass alone (`lm_eval_icl.blocks.last_block_at`).
    """

    hides: bool
    places: bool
    window: int | None
    cuts: bool

    @property
    def packs(self) -> bool:
        """Whether queries can run side by side in one row."""
        return self.hides and self.places

    def packs_to(self, length: int) -> bool:
        """Whether tokens up to index `length` can be packed without a window hiding what they should see."""
        return self.packs and (self.window is None or length <= self.window)


def probe(model: PreTrainedModel) -> Abilities:
    """Run a few tokens through the model.

    Continued from a memory they must score as in one pass. A token that is hidden may change nothing, and a
    position that is given must: both hold to the last bit, whatever the precision.

    Raises:
        InputError: the model does not continue from keys and values (a state-space model, say).
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids: list[int] = [(7 + 11 * i) % vocabulary for i in range(60)]
    context, query, other, another, answer = ids[:12], ids[12:20], ids[20:32], ids[32:44], ids[44:48]
    nothing = Memory([], [], 0)

    def in_one_pass(*parts: list[int]) -> float:
        return score_alone(model, nothing, [token for part in parts for token in part], [answer])[0][0]

    try:
        expected, without = in_one_pass(context, query), in_one_pass(query)
        memory = Memory(causal_pass(model, context), context, len(context))
        if not memory.layers or any(entry.shape[-2] != len(context) for layer in memory.layers for entry in layer):
            raise ValueError("its cache does not hold one key and one value a token")
        continued = score_alone(model, memory, query, [answer])[0][0]
        # Half precision is noisy; forgetting the context is more than noise.
        if math.isfinite(expected) and not abs(continued - expected) <= max(
            abs(without - expected) / 2, 1e-3 * abs(expected)
        ):
            raise ValueError(f"continued from them it gives {continued:.4f}, in one pass {expected:.4f}")
    except Exception as error:
        raise InputError(
            f"lm-eval-icl: {type(model).__name__} cannot be used: the demonstrations are kept as keys and values "
            f"of every layer, which this model does not continue from ({' '.join(str(error).split())[:200]})."
        ) from error

    if not math.isfinite(expected):
        raise InputError(
            f"lm-eval-icl: {type(model).__name__} cannot be used: the log-probability of a few tokens is {expected} "
            f"({model.dtype}). The checkpoint is broken, or its numbers overflow: try --model_args dtype=float32."
        )

    def alone(start: int) -> float:
        return score_alone(model, replace(memory, query_start=start), query, [answer])[0][0]

    def packed(beside: list[int], cut: bool = False) -> float:
        return score_packed(model, memory, [(beside, answer), (query, answer)], cut=cut)[1][0]

    try:
        places = alone(len(context) + 7) != alone(len(context))
    except Exception:  # it does not take positions
        places = False
    try:
        visible = abs(in_one_pass(context, other, query) - in_one_pass(context, another, query))
        # Exactly nothing, but for a mixture of experts, whose matrix products are cut otherwise.
        hides = abs(packed(other) - packed(another)) <= visible / 10
    except Exception:  # it does not take a 4-D mask
        hides = False
    try:
        rounding = 32 * torch.finfo(model.dtype).eps * abs(expected)
        cuts = hides and places and abs(packed(other, cut=True) - packed(other)) <= min(visible / 10, rounding)
    except Exception:  # its blocks take and give other things
        cuts = False
    return Abilities(hides, places, _window(model), cuts)


def _window(model: PreTrainedModel) -> int | None:
    """The shortest window the configuration declares. A few tokens cannot show it, and a mask given by
    hand switches some models' windows off; up to its length a window hides nothing."""
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    if getattr(config, "use_sliding_window", True) is False:
        windows[0] = None
    return min((window for window in windows if isinstance(window, int)), default=None)
