"""What a loaded model can do, as plain data. `inference.trials` finds it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PositionSwitch(NamedTuple):
    """A model's rotary angles change when a sequence becomes long."""

    length: int  # longer sequences have other angles at all of their positions
    always_changes: bool  # the angles change again with every further token


@dataclass(frozen=True)
class Capabilities:
    """What a model can do."""

    # Why the model gives other results from its cache than in one pass. Every prompt is then run
    # whole. Empty if it does not.
    no_memory: str = ""
    is_hybrid: bool = False  # it keeps states that no mask and no `position_ids` change
    obeys_mask: bool = False  # a token that a 4-D mask hides does not influence the result
    sees_ahead: bool = False  # a token attends to later tokens if a 4-D mask shows them
    obeys_positions: bool = False  # a token's position is that in `position_ids`, not its index
    window: int | None = None  # a token attends to this many tokens up to itself, by index
    # The window also holds under a 4-D mask (GPT-Neo). In other models, a token attends to all
    # tokens that the mask shows.
    keeps_window: bool = False
    scaled_from: int | None = None  # attention in longer rows also depends on a token's index
    position_switch: PositionSwitch | None = None
    can_trim: bool = False  # the last layer can run for some tokens alone (`last_layer_at`)
    can_batch: bool = False  # queries of different lengths can be rows of a batch (`score_rows`)
    # transformers' `generate` continues from the model's cache, and counts positions as the model.
    can_generate: bool = False
    can_pad: bool = False  # `generate` continues queries of different lengths in one batch, too
    can_share: bool = False  # `can_pad`, and attention can read one memory for all rows of a batch

    @property
    def can_pack(self) -> bool:
        """Several queries can be packed into one row."""
        return self.obeys_mask and self.obeys_positions

    @property
    def can_divide(self) -> bool:
        """Whether a part of a prompt can run on the memory of another part, at given positions."""
        return self.can_pack and self.position_switch is None

    def can_pack_to(self, length: int) -> bool:
        """A row of `length` tokens can be packed, and no window hides what the mask shows."""
        return self.can_pack and self.sees_all_of(length)

    def sees_all_of(self, length: int) -> bool:
        """The last of `length` tokens attends to all, with no scaling by their index."""
        limits = (self.window, self.scaled_from)
        return all(limit is None or length <= limit for limit in limits)
