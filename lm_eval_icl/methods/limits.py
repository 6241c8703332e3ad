"""Whether a prompt, encoded by a method, stays within a model's limits."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Method
from lm_eval_icl.tokens import TokenizedPrompt


@dataclass(frozen=True)
class PromptLimits:
    """A model's limits (positions, attention window, RoPE switch), and whether a prompt, encoded by a method, stays
    within them.

    Attributes:
        method: the method, whose `footprint` says how many tokens and positions a context takes.
        model: the model's name, for messages.
        positions: how many positions the model has.
        window: how many tokens a row may have under the method's mask; None if only `positions` limits them.
        switch: the position from which on rotary angles of all positions change, and whether they change again with
            every longer sequence (`inference.positions.position_switch`); None if they do not change.
        hint: advice for the error, in addition to fewer demonstrations, if encoding takes too many positions.
    """

    method: Method
    model: str
    positions: int
    window: int | None
    switch: tuple[int, bool] | None
    hint: str

    def positions_needed(self, prompt: TokenizedPrompt, answer: int) -> int:
        """How many positions a prompt takes with an answer of `answer` positions."""
        footprint, query = self.method.footprint(prompt.context), len(prompt.query)
        encoding = footprint.positions + (query if self.method.memory_depends_on_query else 0)
        return max(encoding, footprint.query_start + query + answer)

    def tokens_needed(self, prompt: TokenizedPrompt, answer: int) -> int:
        """How many tokens the longest row has, memory entries included, with an answer of `answer` positions."""
        footprint, query = self.method.footprint(prompt.context), len(prompt.query)
        encoding = footprint.tokens + (query if self.method.memory_depends_on_query else 0)
        return max(encoding, footprint.kept + query + answer)

    def why_not(self, prompt: TokenizedPrompt, answer: int) -> str:
        """Why a prompt with such an answer does not fit, as the end of a sentence; empty if it fits."""
        needed = self.positions_needed(prompt, answer)
        if needed > self.positions:
            return f"do not fit the model's {self.positions} positions"
        if self.switch is not None:
            switch, ever = self.switch
            if needed > switch and ever:
                return (
                    f"cross position {switch}, from which on this model computes all positions anew with every longer "
                    "sequence (rotary angles of type dynamic)"
                )
            # The memory would have the rotary angles of short sequences, and the query those of long ones.
            if self.method.footprint(prompt.context).shortest_pass <= switch < needed:
                return (
                    f"cross position {switch} behind their demonstrations, from which on this model computes all "
                    "positions otherwise (rotary angles of type longrope)"
                )
        if self.window is not None and self.tokens_needed(prompt, answer) > self.window:
            return (
                f"do not fit the {self.window} tokens that {self.model} looks back at most (a sliding window or local "
                f"attention layers), and {self.method.name} needs a model that sees all that its mask shows"
            )
        return ""
