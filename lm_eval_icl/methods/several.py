"""The base class of methods that run a query on several memories and combine the predictions."""

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
    """Several memories: the demonstrations are divided into windows, and each window is encoded as a separate context.

    A query runs on every memory, and the log-probabilities of the next token on all memories are combined. The memory
    of each window is stored separately, and shared by all queries.

    Args:
        window_size: how many demonstrations a window has, at most all of them; the last window may have fewer.
    """

    positions: Positions = "sequential"

    @property
    def window_method(self) -> Method:
        return ICL(self.positions, self.repeat)

    @abstractmethod
    def next_token(self, logprobs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The combined distribution of the next token, [texts, vocabulary], and a state, [texts].

        Args:
            logprobs: [texts, memories, vocabulary], the log-probabilities on the memories of `contexts`.
            state: the state that this function returned for the token before; None for the first token.
        """

    @abstractmethod
    def score(self, combined: Tensor, logprobs: Tensor, answer: Tensor) -> Tensor:
        """The log-probability of an answer with these ids, [tokens]: a number on the device of `combined`.

        Args:
            combined: [tokens, vocabulary], `next_token` for each token of the answer.
            logprobs: [memories, tokens, vocabulary], the log-probabilities that were combined.
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
        """Whether every window has one demonstration, so that no pass has two demonstrations."""
        return self.window_size == 1

    def contexts(self, context: Context) -> list[Context]:
        """The contexts whose memories a query runs on: one for each window, or the context if it has none."""
        size, demonstrations = self.window_size, context.demonstrations
        starts = range(0, max(len(demonstrations), 1), size)
        return [Context(context.prefix, demonstrations[start : start + size]) for start in starts]

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """One pass for each of `contexts`."""
        whole, layouts = (
            Context((0,) * prefix, tuple((0,) * length for length in demonstrations)),
            [],
        )
        for i, context in enumerate(self.contexts(whole)):
            layout = self.window_method.layout(prefix, context.lengths, query, answer)
            title = (
                f"memory {i + 1}"
                if context.demonstrations
                else f"memory {i + 1}: no demonstrations"
            )
            layouts.append((title, layout.numbered_from(i * self.window_size)))
        return layouts

    def footprint(self, context: Context) -> Footprint:
        """The largest of each number over all windows, and the shortest pass of those that have tokens."""
        footprints = [
            dataclasses.astuple(self.window_method.footprint(window))
            for window in self.contexts(context)
        ]
        tokens, kept, positions, shortest, start = zip(*footprints, strict=True)
        return Footprint(
            max(tokens),
            max(kept),
            max(positions),
            min(filter(None, shortest), default=0),
            max(start),
        )

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of windows."""
        return self.window_method.encode(model, contexts)
