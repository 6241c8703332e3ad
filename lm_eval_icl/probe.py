"""What a loaded model does, found out by trying: no list of architectures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.memory import Memory, causal_pass
from lm_eval_icl.scoring import score_alone, score_packed


@dataclass(frozen=True)
class Abilities:
    """Attributes:
    packs: it hides what a 4-D mask hides and places a token where `position_ids` says.
    window: how far it looks back at most, in tokens, counted by index; None for as far as it has.
    """

    packs: bool
    window: int | None

    def packs_to(self, length: int) -> bool:
        """Whether tokens up to index `length` can be packed without a window hiding what they should see."""
        return self.packs and (self.window is None or length <= self.window)


def probe(model: PreTrainedModel) -> Abilities:
    """Run a few tokens through the model: continued from a memory they must score as they do in one pass.

    Raises:
        InputError: the model does not continue from keys and values (a state-space model, say).
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids: list[int] = [(7 + 11 * i) % vocabulary for i in range(40)]
    context, query, other, answer = ids[:12], ids[12:20], ids[20:32], ids[32:36]

    expected = score_alone(model, Memory([], [], 0), [*context, *query], [answer])[0]
    try:
        memory = Memory(causal_pass(model, context), context, len(context))
        if not memory.layers or any(entry.shape[-2] != len(context) for layer in memory.layers for entry in layer):
            raise ValueError("its cache does not hold one key and one value a token")
        continued = score_alone(model, memory, query, [answer])[0]
        if not _close(continued, expected, model.dtype):
            raise ValueError(f"continued from them it gives {continued[0]:.4f}, in one pass {expected[0]:.4f}")
    except Exception as error:
        raise InputError(
            f"lm-eval-icl: {type(model).__name__} cannot be used: the demonstrations are kept as keys and "
            f"values of every layer, which this model does not continue from ({str(error).splitlines()[0]})."
        ) from error
    try:
        packed = score_packed(model, memory, [(other, answer), (query, answer)])[1]
        packs = _close(packed, expected, model.dtype)
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
        packs = False
    return Abilities(packs, _window(model))


def _close(score: tuple[float, bool], expected: tuple[float, bool], dtype: torch.dtype) -> bool:
    tolerance = 1e-4 if torch.finfo(dtype).eps < 1e-6 else 0.1
    return abs(score[0] - expected[0]) <= tolerance


def _window(model: PreTrainedModel) -> int | None:
    """The shortest window the configuration declares. A few tokens cannot show it, and a mask given by
    hand switches some models' windows off; up to its length a window hides nothing."""
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    if getattr(config, "use_sliding_window", True) is False:
        windows[0] = None
    return min((window for window in windows if isinstance(window, int)), default=None)
