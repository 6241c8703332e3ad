"""Batch-ICL: one-shot passes whose average answers.

"Batch-ICL: Effective, Efficient, and Order-Agnostic In-Context Learning" (Zhang et al., ACL
Findings 2024).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.declared import Positive
from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.memory import Memory, causal_pass
from lm_eval_icl.inference.residual import Replacement, replaced_stream, residual_stream
from lm_eval_icl.inference.scoring import streams_packed
from lm_eval_icl.methods.base import Passes
from lm_eval_icl.methods.by_query import ByQuery, ContextQuery, Memories, MemoryQuery
from lm_eval_icl.methods.plain import Plain
from lm_eval_icl.prompts.layouts import Layout, Pattern, before, lay_out
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

DEFAULT_LAYER = 15


class Shot(NamedTuple):
    """The part of a pass before the query: prefix and one demonstration, or the prefix alone."""

    context: Context
    query_start: int  # the position of the query's first token


@dataclass(frozen=True)
class BatchICL(ByQuery):
    """Batch-ICL: one one-shot pass for each demonstration, averaged in the residual stream.

    For every i, an ordinary pass runs over P + D_i + Q. The residual streams of Q's last token
    after block k are averaged over i. In an ordinary pass over P + Q + A, this average replaces the
    residual stream of Q's last token after block k. Invariant. The average depends on the query, so
    two queries never share a memory. But all queries share the keys and values of P + D_i, and all
    options of a query share its passes.

    Args:
        layer: k, counted from 1, at most the number of the model's layers. None is 15, as in the
            paper, or the last layer of a model with fewer layers.
    """

    treats_demonstrations_alike = True
    needs_mask = False
    one_pass = False

    layer: Positive | None = None

    @property
    def invariant(self) -> bool:
        """True for all positions, since no pass has two demonstrations."""
        return True

    def bind(self, model: PreTrainedModel) -> BatchICL:
        """Fill in the default layer, and check that the model's blocks return one residual stream.

        Raises:
            InputError: `layer` is more than the number of the model's layers.
            Unsupported: the blocks do not return one residual stream, [1, tokens, width].
        """
        name = type(model).__name__
        depth = model.config.get_text_config().num_hidden_layers
        layer = min(DEFAULT_LAYER, depth) if self.layer is None else self.layer
        self._check("layer", fine=layer <= depth, must=f"at most {depth}, the depth of {name}")
        shapes = []
        with suppress(LookupError), residual_stream(model, layer) as streams:
            causal_pass(model, [1, 2])
            shapes = [tuple(getattr(stream, "shape", ())) for stream in streams]
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][:2] != (1, 2):
            raise Unsupported(
                f"{self.name} needs blocks that hand on one residual stream, and those of {name} "
                "do not."
            )
        return replace(self, layer=layer)

    def pattern(self, n: int) -> Pattern:
        """The pattern of a single pass, which has one demonstration or none."""
        return Pattern(before(n))

    def lay_out(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Layout:
        """The layout of one pass. `repeat` has no effect: repeated passes have the same average."""
        pattern = self.pattern(len(demonstrations))
        return lay_out(prefix, demonstrations, pattern, self.positions, query, answer)

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """One pass for each demonstration, and the last pass, which goes on from their average."""
        # With symmetric positions, the query starts after the longest demonstration in all passes.
        query_start = None
        if self.positions == "symmetric":
            query_start = prefix + max(demonstrations, default=0)

        def one_pass(shown: Sequence[int], answer: int) -> Layout:
            pattern = self.pattern(len(shown))
            return lay_out(
                prefix, shown, pattern, self.positions, query, answer, query_start=query_start
            )

        passes = []
        for i, demonstration in enumerate(demonstrations):
            row = one_pass([demonstration], 0).numbered_from(i)
            passes.append((f"one-shot pass {i + 1}", row))
        title = ""
        if demonstrations:
            layer = self.layer or f"{DEFAULT_LAYER} (the last if there are fewer)"
            average = "Q's last token is its average over the other passes"
            title = f"last pass: after layer {layer}, {average}"
        return [*passes, (title, one_pass([], answer))]

    def tokens_for(self, context: Context, query: int) -> tuple[int, int]:
        """A query runs in a pass for each demonstration, and in the last pass."""
        passes = len(context.demonstrations) + 1
        return passes * query, passes * len(context.prefix) + sum(context.lengths)

    def encode_queries(
        self,
        model: PreTrainedModel,
        queries: Sequence[ContextQuery],
        memories: Memories,
        packed: bool = False,
    ) -> list[MemoryQuery]:
        """Run every query on the memory of every demonstration, in one pass if it is `packed`.

        The last pass is still to be run. In it, the average replaces the residual stream of the
        query's last token.
        """
        assert self.layer is not None  # `bind` has set it
        shots_of = [self._shots(context) for context, _ in queries]
        memory_of = self._memories(dict.fromkeys(chain(*shots_of)), memories)
        queries_of: dict[Shot, dict[Ids, None]] = {}
        for (_, query), (_, *shots) in zip(queries, shots_of, strict=True):
            for shot in shots:
                queries_of.setdefault(shot, {})[query] = None
        work = [(memory_of[shot], list(shown)) for shot, shown in queries_of.items()]
        stream_of: dict[Shot, dict[Ids, Tensor]] = {}
        for shot, streams in zip(queries_of, self._streams(model, work, packed), strict=True):
            stream_of[shot] = dict(zip(queries_of[shot], streams, strict=True))
        encoded = []
        for (_, query), (zero_shot, *shots) in zip(queries, shots_of, strict=True):
            residual = None
            if shots:
                stacked = torch.stack([stream_of[shot][query] for shot in shots])
                wide = torch.promote_types(stacked.dtype, torch.float32)
                mean = stacked.mean(0, keepdim=True, dtype=wide)
                residual = Replacement(self.layer, len(query) - 1, mean)
            encoded.append((replace(memory_of[zero_shot], residual=residual), query))
        return encoded

    def _shots(self, context: Context) -> list[Shot]:
        """The parts before the query: without a demonstration, and with each of them.

        With symmetric positions, the query starts after the longest demonstration in all passes.
        """
        shots = []
        for part in ((), *((shown,) for shown in context.demonstrations)):
            shot = Context(context.prefix, part)
            query_start = len(shot.tokens)
            if self.positions == "symmetric":
                query_start = len(context.prefix) + max(context.lengths, default=0)
            shots.append(Shot(shot, query_start))
        return shots

    def _memories(self, shots: Collection[Shot], memories: Memories) -> dict[Shot, Memory]:
        """The memory of each shot."""
        encoded = memories([shot.context for shot in shots])
        return {
            shot: replace(memory, query_start=shot.query_start)
            for shot, memory in zip(shots, encoded, strict=True)
        }

    def _streams(
        self, model: PreTrainedModel, work: Sequence[tuple[Memory, Sequence[Ids]]], packed: bool
    ) -> Sequence[Tensor]:
        """The residual streams of the queries' last tokens: for each memory, [queries, width]."""
        assert self.layer is not None
        if packed and work:
            return streams_packed(model, work, self.layer)
        streams = []
        for memory, queries in work:
            last_tokens = []
            for query in queries:
                positions = None
                if not memory.in_sequence:
                    positions = torch.arange(len(query)) + memory.query_start
                with residual_stream(model, self.layer) as pieces:
                    causal_pass(model, query, memory, positions)
                last_tokens.append(pieces[-1][0, -1])  # a long query runs in several pieces
            streams.append(torch.stack(last_tokens))
        return streams

    def by_definition(self, plain: Plain, prompt: TokenizedPrompt, answer: Ids) -> list[Tensor]:
        """The mean residual stream of Q's last token over P + D_i + Q, put into P + Q + A."""
        context = prompt.context
        prefix = context.prefix
        sizes = (len(prefix), context.lengths, len(prompt.query), len(answer))
        *shots, last = [layout for _, layout in self.passes(*sizes)]
        row = [*prefix, *prompt.query, *answer]
        if not shots:
            return [plain.run(last, row)]
        layer = self.layer or DEFAULT_LAYER
        with residual_stream(plain.model, layer) as streams:
            for layout, demonstration in zip(shots, context.demonstrations, strict=True):
                plain.run(layout, [*prefix, *demonstration, *prompt.query])
        mean = torch.stack([stream[0, -1:] for stream in streams]).mean(0)
        token = len(prefix) + len(prompt.query) - 1
        with replaced_stream(plain.model, layer, [token], mean):
            return [plain.run(last, row)]
