"""The base class of methods that ask several memories, and combine what these predict."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.methods.base import Footprint, Method, Passes, Positions
from lm_eval_icl.methods.icl import ICL
from lm_eval_icl.methods.pcw import PCW
from lm_eval_icl.prompts.tokens import Context


@dataclass(frozen=True)
class Several(PCW):
    """Several memories: the demonstrations are divided into windows, and each window is a context of its own.

    A query runs behind every memory, and the log-probabilities of the next token behind all of them are combined. The
    memories of windows are stored by themselves, and shared by all queries.

    Args:
        window_size: how many demonstrations a window has, at most all of them; the last window may have fewer.
    """

    positions: Positions = "sequential"

    @property
    def of_window(self) -> Method:
        return ICL(self.positions, self.repeat)

    @abstractmethod
    def next_token(self, logprobs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The combined distribution of the next token, [texts, vocabulary], and a state, [texts].

        Args:
            logprobs: [texts, memories, vocabulary], the log-probabilities behind the memories of `contexts`.
            state: what this function has returned for the token before it; None for the first token.
        """

    @abstractmethod
    def score(self, combined: Tensor, logprobs: Tensor, answer: Tensor) -> Tensor:
        """The log-probability of an answer of these ids, a number on the device of `combined`.

        Args:
            combined: [tokens, vocabulary], `next_token` for each of its tokens.
            logprobs: [memories, tokens, vocabulary], what it was combined from.
        """

    def combined(self, logprobs: Tensor) -> Tensor:
        """`next_token` for all tokens of an answer, [memories, tokens, vocabulary] -> [tokens, vocabulary]."""
        rows, state = [], None
        for at in range(logprobs.shape[1]):
            row, state = self.next_token(logprobs[None, :, at], state)
            rows.append(row)
        return torch.cat(rows)

    @property
    def invariant(self) -> bool:
        """Whether every window has one demonstration, so that no pass contains two."""
        return self.window_size == 1

    def contexts(self, context: Context) -> list[Context]:
        """The contexts whose memories a query asks: one for each window; the context itself without demonstrations."""
        size, demonstrations = self.window_size, context.demonstrations
        starts = range(0, max(len(demonstrations), 1), size)
        return [Context(context.prefix, demonstrations[start : start + size]) for start in starts]

    def passes(self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0) -> Passes:
        """One pass for each of `contexts`."""
        whole, layouts = Context((0,) * prefix, tuple((0,) * length for length in demonstrations)), []
        for i, context in enumerate(self.contexts(whole)):
            layout = self.of_window.layout(prefix, context.lengths, query, answer)
            title = f"memory {i + 1}" if context.demonstrations else f"memory {i + 1}: no demonstrations"
            layouts.append((title, layout.of_demonstrations(i * self.window_size)))
        return layouts

    def footprint(self, context: Context) -> Footprint:
        """The largest number that any window has, in every respect."""
        footprints = [dataclasses.astuple(self.of_window.footprint(window)) for window in self.contexts(context)]
        tokens, kept, positions, shortest, start = zip(*footprints, strict=True)
        shortest_pass = min(filter(None, shortest), default=0)  # one without tokens does not run
        return Footprint(max(tokens), max(kept), max(positions), shortest_pass, max(start))

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of windows."""
        return self.of_window.encode(model, contexts)
