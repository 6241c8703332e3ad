"""Batch-ICL: Effective, Efficient, and Order-Agnostic In-Context Learning (Zhang et al., ACL Findings 2024)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.errors import Unsupported, whole
from lm_eval_icl.inference.memory import Memory, causal_pass
from lm_eval_icl.inference.residual import Replacement, residual_stream
from lm_eval_icl.inference.scoring import streams_packed
from lm_eval_icl.methods.base import ContextQuery, Memories, Method, Passes, optional
from lm_eval_icl.prompts.layouts import Layout, Pattern, before, lay_out
from lm_eval_icl.prompts.tokens import Context

DEFAULT_LAYER = 15


@dataclass(frozen=True)
class BatchICL(Method):
    """Batch-ICL: one one-shot pass for each demonstration, averaged in the residual stream (InvICL, Appendix A.2).

    For every i, an ordinary pass runs over P + D_i + Q. The residual streams of Q's last token after block k are
    averaged over i. In an ordinary pass over P + Q + A, this average replaces the residual stream of Q's last token
    after block k. Invariant. The average depends on the query, so two queries never share a memory. But all queries
    share the keys and values of P + D_i, and all options of a query share its passes.

    Args:
        layer: k, counted from 1, at most the number of the model's layers. None is 15, as in the paper, or the last
            layer of a model with fewer layers.
    """

    treats_demonstrations_alike = True
    needs_mask = False
    one_pass = False
    memory_depends_on_query = True
    layer: Annotated[int | None, optional(whole)] = None

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
        depth, name = model.config.get_text_config().num_hidden_layers, type(model).__name__
        layer = min(DEFAULT_LAYER, depth) if self.layer is None else self.layer
        self._check("layer", fine=layer <= depth, must=f"at most {depth}, the depth of {name}")
        shapes = []
        with suppress(LookupError), residual_stream(model, layer) as streams:
            causal_pass(model, [1, 2])
            shapes = [tuple(getattr(stream, "shape", ())) for stream in streams]
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][:2] != (1, 2):
            raise Unsupported(
                f"{self.name} needs blocks that hand on one residual stream, and those of {name} do not."
            )
        return replace(self, layer=layer)

    def pattern(self, n: int) -> Pattern:
        """The pattern of a single pass, which has one demonstration or none."""
        return Pattern(before(n))

    def layout(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Layout:
        """The layout of one pass. `repeat` has no effect, since the average over repeated passes is the same."""
        return lay_out(
            prefix, demonstrations, self.pattern(len(demonstrations)), self.positions, query, answer
        )

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """One pass for each demonstration, and the last pass, in which the query continues with the average of them."""
        last = self._pass(None, prefix, demonstrations, query, answer)
        if not demonstrations:
            return [("", last)]
        shots = [
            (f"one-shot pass {i + 1}", self._pass(i, prefix, demonstrations, query))
            for i in range(len(demonstrations))
        ]
        layer = self.layer or f"{DEFAULT_LAYER} (the last if there are fewer)"
        return [
            *shots,
            (
                f"last pass: after layer {layer}, Q's last token is its average over the other passes",
                last,
            ),
        ]

    def _pass(
        self, i: int | None, prefix: int, demonstrations: Sequence[int], query: int, answer: int = 0
    ) -> Layout:
        """The layout of prefix, demonstration i (None: no demonstration), query and answer.

        With symmetric positions, the query starts after the longest demonstration in all passes.
        """
        chosen = [] if i is None else [demonstrations[i]]
        query_start = (
            prefix + max(demonstrations, default=0) if self.positions == "symmetric" else None
        )
        pattern = self.pattern(len(chosen))
        layout = lay_out(
            prefix, chosen, pattern, self.positions, query, answer, query_start=query_start
        )
        return layout.numbered_from(i or 0)

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
    ) -> list[tuple[Memory, tuple[int, ...]]]:
        """Run every query on the memory of every demonstration, in one pass if queries may be packed. The last pass is
        still to be run; in it, the average replaces the residual stream of the query's last token."""
        assert self.layer is not None  # `bind` has set it
        zero_shot = [self._shot(context, ()) for context, _ in queries]
        one_shot = [
            [self._shot(context, (part,)) for part in context.demonstrations]
            for context, _ in queries
        ]
        all_shots = dict.fromkeys((*zero_shot, *chain(*one_shot)))
        contexts = [*dict.fromkeys(context for context, _ in all_shots if context.tokens)]
        encoded, nothing = dict(zip(contexts, memories(contexts), strict=True)), Memory([], [], 0)
        memory = {
            shot: replace(encoded.get(shot[0], nothing), query_start=shot[1]) for shot in all_shots
        }
        by_shot: dict[tuple[Context, int], dict[tuple[int, ...], None]] = defaultdict(
            dict
        )  # the queries of each shot
        for (_, query), shots in zip(queries, one_shot, strict=True):
            for shot in shots:
                by_shot[shot][query] = None
        work = [(memory[shot], [*shot_queries]) for shot, shot_queries in by_shot.items()]
        streams = self._streams(model, work, packed) if work else []
        last = {  # the residual stream of a query's last token, [width]
            (shot, query): stream
            for (shot, shot_queries), shot_streams in zip(by_shot.items(), streams, strict=True)
            for query, stream in zip(shot_queries, shot_streams, strict=True)
        }
        to_run = []
        for (_, query), zero, shots in zip(queries, zero_shot, one_shot, strict=True):
            residual = None
            if shots:
                stacked = torch.stack([last[shot, query] for shot in shots])
                mean = stacked.mean(
                    0, keepdim=True, dtype=torch.promote_types(stacked.dtype, torch.float32)
                )
                residual = Replacement(self.layer, len(query) - 1, mean)
            to_run.append((replace(memory[zero], residual=residual), query))
        return to_run

    def _shot(
        self, context: Context, demonstrations: tuple[tuple[int, ...], ...]
    ) -> tuple[Context, int]:
        """The context of a pass with one demonstration or none, and the query's first position. With symmetric
        positions, the query starts after the longest demonstration of the whole context."""
        shot, symmetric = Context(context.prefix, demonstrations), self.positions == "symmetric"
        return shot, len(context.prefix) + max(context.lengths, default=0) if symmetric else len(
            shot.tokens
        )

    def _streams(
        self,
        model: PreTrainedModel,
        work: Sequence[tuple[Memory, Sequence[tuple[int, ...]]]],
        packed: bool,
    ) -> Iterable[Tensor]:
        """The residual stream after block k of the last tokens of the queries of each memory, [queries, width]."""
        assert self.layer is not None
        if packed:
            yield from streams_packed(model, work, self.layer)
            return
        for memory, queries in work:
            query_streams = []
            for query in queries:
                places = (
                    None if memory.in_sequence else torch.arange(len(query)) + memory.query_start
                )
                with residual_stream(model, self.layer) as last:
                    causal_pass(model, query, memory, places)
                query_streams.append(last[-1][0, -1])  # a long query runs in several pieces
            yield torch.stack(query_streams)
