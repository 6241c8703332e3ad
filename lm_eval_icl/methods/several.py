"""The base classes of methods that run a query on several memories and combine the predictions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.inference.schedule import Batch, Text
from lm_eval_icl.inference.scoring import Scores, States, score_together
from lm_eval_icl.methods.base import (
    EncodedContext,
    Encoder,
    Method,
    Passes,
    Positions,
    Rows,
)
from lm_eval_icl.methods.icl import ICL
from lm_eval_icl.methods.pcw import PCW
from lm_eval_icl.methods.plain import Plain
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


@dataclass(frozen=True)
class Several(PCW):
    """Several memories: the demonstrations are divided into windows, each a context of its own.

    A query runs on every memory, and the predictions of the next token on all memories are
    combined. The memory of each window is stored separately, and shared by all queries. A method
    defines `next_token`. If it divides the demonstrations in another way than into windows of
    `window_size`, it also defines `contexts` and `invariant`.

    Args:
        window_size: how many demonstrations a window has, at most all of them. The last window may
            have fewer.
    """

    one_pass = False
    rows_may_differ = False

    positions: Positions = "sequential"

    @abstractmethod
    def next_token(self, logprobs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Combine the predictions of the next token.

        Args:
            logprobs: [texts, memories, vocabulary] the log-probabilities on the memories of
                `contexts`.
            state: [texts] what this function returned as the state for the token before. None for
                the first token.

        Returns:
            The combined log-probabilities, [texts, vocabulary], and a state for the next token, or
            None.
        """

    def score(self, combined: Tensor, logprobs: Tensor, answer: Tensor) -> Tensor:
        """The log-probability of an answer: a number on the device of `combined`.

        Here, it is the sum over its tokens.

        Args:
            combined: [tokens, vocabulary] `next_token` for each token of the answer.
            logprobs: [memories, tokens, vocabulary] the log-probabilities that were combined.
            answer: [tokens] the answer's ids.
        """
        return combined.gather(-1, answer[:, None]).sum()

    def combined(self, logprobs: Tensor) -> Tensor:
        """`next_token` for all tokens of an answer: [memories, tokens, vocabulary] to [tokens,
        vocabulary].
        """
        rows = []
        state = None
        for at in range(logprobs.shape[1]):
            row, state = self.next_token(logprobs[None, :, at], state)
            rows.append(row)
        return torch.cat(rows)

    @property
    def invariant(self) -> bool:
        """Whether every window has one demonstration, so that no pass has two demonstrations."""
        return self.window_size == 1

    # The windows.

    @property
    def window_method(self) -> Method:
        """The method that encodes a window."""
        return ICL(self.positions, self.repeat)

    def contexts(self, context: Context) -> list[Context]:
        """One context for each window, or the context itself if it has no demonstrations."""
        size = self.window_size
        demonstrations = context.demonstrations
        starts = range(0, max(len(demonstrations), 1), size)
        return [Context(context.prefix, demonstrations[start : start + size]) for start in starts]

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """One pass for each of `contexts`."""
        whole = Context((0,) * prefix, tuple((0,) * length for length in demonstrations))
        passes: Passes = []
        shown = 0
        for window in self.contexts(whole):
            title = f"memory {len(passes) + 1}"
            if not window.demonstrations:
                title += ": no demonstrations"
            layout = self.window_method.lay_out(prefix, window.lengths, query, answer)
            passes.append((title, layout.numbered_from(shown)))
            shown += len(window.demonstrations)
        return passes

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of windows."""
        return self.window_method.encode(model, contexts)

    # How the kind of method is run.

    def scored(
        self, encoder: Encoder, batch: Batch, encoded: EncodedContext | None, states: States
    ) -> Scores:
        if encoded is None or len(encoded.memories) == 1:
            return super().scored(encoder, batch, encoded, states)
        pairs = [(query, answer) for _, query, answer in batch.requests]
        return score_together(
            encoder.model,
            encoded.memories,
            pairs,
            self,
            encoder.softmax_dtype,
            at_once=batch.tokens > 0,
            trim_last_layer=encoder.can.can_trim,
        )

    def text_rows(self, encoder: Encoder, texts: Sequence[Text]) -> Rows:
        """A row for each text and memory. The rows of a text get the same next token."""
        windows = self.contexts(texts[0].prompt.context)
        if len(windows) == 1:
            return super().text_rows(encoder, texts)
        memories = encoder.memories(windows)
        queries = []
        for text in texts:
            queries += [text.prompt.query] * len(windows)
        return Rows(memories * len(texts), queries, len(windows), self.next_token)

    def by_definition(self, plain: Plain, prompt: TokenizedPrompt, answer: Ids) -> list[Tensor]:
        logits = []
        for window in self.contexts(prompt.context):
            alone = TokenizedPrompt(window, prompt.query)
            logits += self.window_method.by_definition(plain, alone, answer)
        return logits


@dataclass(frozen=True)
class Weighted(Several):
    """Several memories, whose windows may have weights.

    The log-likelihoods of an answer are combined as those of the next token are. A method defines
    `mixed`.

    Args:
        weights: a number for each window, in order.
    """

    weights: tuple[float, ...] | None = None

    @abstractmethod
    def mixed(self, logprobs: Tensor) -> Tensor:
        """Combine log-probabilities by the weights: [texts, memories, ...] -> [texts, ...]."""

    @property
    def invariant(self) -> bool:
        """Whether every window has one demonstration, and no weights are given."""
        return super().invariant and self.weights is None

    def why_not(self, n: int) -> str:
        """There must be as many weights as windows."""
        windows = math.ceil(n / self.window_size)
        if self.weights is not None and n and len(self.weights) != windows:
            return f"weights: has {len(self.weights)} numbers, and must have {windows}"
        return super().why_not(n)

    def contexts(self, context: Context) -> list[Context]:
        """One context for each window. Each needs a weight, also after some were left out."""
        windows = super().contexts(context)
        if len(windows) > 1 and (why := self.why_not(len(context.demonstrations))):
            raise InputError(f"{self.name}: {why}.")
        return windows

    def next_token(self, logprobs: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        return self.mixed(logprobs).log_softmax(-1), None

    def score(self, combined: Tensor, logprobs: Tensor, answer: Tensor) -> Tensor:
        ids = answer.expand(len(logprobs), -1)[..., None]
        by_memory = logprobs.gather(-1, ids)[..., 0].sum(-1)
        return self.mixed(by_memory[None]).squeeze()
