"""Batch-ICL: Effective, Efficient, and Order-Agnostic In-Context Learning (Zhang et al., ACL Findings 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.blocks import residual_stream
from lm_eval_icl.inference.memory import Memory, causal_pass
from lm_eval_icl.layouts import Layout, Pattern, before, lay_out
from lm_eval_icl.methods.base import Method
from lm_eval_icl.tokens import Context

DEFAULT_LAYER = 15


@dataclass(frozen=True)
class BatchICL(Method):
    """Batch-ICL: one one-shot pass for each demonstration, averaged in the residual stream (InvICL, Appendix A.2).

    For every i, an ordinary pass runs over P + D_i + Q. The residual streams of Q's last token after block k are
    averaged over i. In an ordinary pass over P + Q + A, this average replaces the residual stream of Q's last token
    after block k. Invariant. The average depends on the query, so two queries never share a memory; but all queries
    share the keys and values of P + D_i, and all options of a query share its passes.

    Args:
        layer: k, counted from 1, at most the number of the model's layers. By default 15 as in the paper, or the last
            layer of a model that has fewer.
    """

    treats_demonstrations_alike = True
    needs_mask = False
    memory_depends_on_query = True
    layer: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None:
            self._check_whole("layer")

    @property
    def invariant(self) -> bool:
        """Always, whatever the positions: no pass contains two demonstrations."""
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
        try:
            with residual_stream(model, layer) as found:
                causal_pass(model, [1, 2])
            shapes = [tuple(getattr(stream, "shape", ())) for stream in found]
        except LookupError:
            shapes = []
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][:2] != (1, 2):
            raise Unsupported(
                f"batchicl needs a model whose blocks hand on one residual stream, and those of {name} do not."
            )
        return replace(self, layer=layer)

    def pattern(self, n: int) -> Pattern:
        """The pattern of a single pass, which has one demonstration or none."""
        return Pattern(before(n))

    def layout(self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0) -> Layout:
        """The layout of one pass. `repeat` has no effect, since repeating all passes does not change their average."""
        return lay_out(prefix, demonstrations, self.pattern(len(demonstrations)), self.positions, query, answer)

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> list[tuple[str, Layout]]:
        """One pass for each demonstration, and the last pass, in which the query continues from their average."""
        last = self._pass(None, prefix, demonstrations, query, answer)
        if not demonstrations:
            return [("", last)]
        found = [
            (f"one-shot pass {i + 1}", self._pass(i, prefix, demonstrations, query)) for i in range(len(demonstrations))
        ]
        layer = self.layer or f"{DEFAULT_LAYER} (the last if there are fewer)"
        return [*found, (f"last pass: after layer {layer}, Q's last token is its average over the other passes", last)]

    def _pass(self, i: int | None, prefix: int, demonstrations: Sequence[int], query: int, answer: int = 0) -> Layout:
        """The layout of prefix, demonstration i (None: no demonstration), query and answer.

        With symmetric positions, the query starts after the longest demonstration in all passes.
        """
        some = [] if i is None else [demonstrations[i]]
        query_start = prefix + max(demonstrations, default=0) if self.positions == "symmetric" else None
        layout = lay_out(prefix, some, self.pattern(len(some)), self.positions, query, answer, query_start=query_start)
        # `source` must index the prompt, which has all demonstrations.
        here, whole = prefix + sum(some), prefix + sum(demonstrations)
        blocks = [replace(b, source=b.source - here + whole) if b.name in "QA" else b for b in layout.blocks]
        if i is not None:
            source = prefix + sum(demonstrations[:i])
            blocks = [replace(b, name=f"D{i + 1}", source=source) if b.name == "D1" else b for b in blocks]
        return replace(layout, blocks=tuple(blocks))

    def encode_query(
        self,
        model: PreTrainedModel,
        context: Context,
        query: tuple[int, ...],
        memories: Callable[[Context], Memory],
    ) -> tuple[Memory, tuple[int, ...]]:
        """Run a pass for each demonstration, and the last pass without the query's last token, which is run later."""
        assert self.layer is not None  # `bind` has filled it in
        zero_shot = memories(Context(context.prefix, ()))
        if not context.demonstrations:
            return zero_shot, query
        # Unless positions are symmetric, the query's positions are those that the model computes by itself.
        row = self._pass(None, len(context.prefix), context.lengths, len(query)).positions[-len(query) :]
        positions = row if self.positions == "symmetric" else None
        last = []  # for each demonstration, the residual stream of the query's last token, [width]
        for demonstration in context.demonstrations:
            one_shot = memories(Context(context.prefix, (demonstration,)))
            with residual_stream(model, self.layer) as stream:
                causal_pass(model, query, one_shot, positions)
            last.append(stream[-1][0, -1])
        mean = torch.stack(last).mean(0, dtype=torch.promote_types(last[0].dtype, torch.float32))

        memory = zero_shot
        if len(query) > 1:
            memory = memory.followed_by(
                query[:-1], causal_pass(model, query[:-1], zero_shot, None if positions is None else positions[:-1])
            )
        return replace(memory, query_start=int(row[-1]), residual=(self.layer, mean)), query[-1:]
