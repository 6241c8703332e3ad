"""Batch-ICL: Effective, Efficient, and Order-Agnostic In-Context Learning (Zhang et al., ACL Findings 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from lm_eval_icl.blocks import residual_stream
from lm_eval_icl.errors import Unsupported
from lm_eval_icl.layouts import Layout, Pattern, before
from lm_eval_icl.memory import Memory, causal_pass
from lm_eval_icl.methods.method import Extent, Method
from lm_eval_icl.tokens import Context

DEFAULT_LAYER = 15


@dataclass(frozen=True)
class BatchICL(Method):
    """Batch-ICL: as many one-shot passes as demonstrations, averaged in the residual stream (InvICL, Appendix A.2).

    For every i an ordinary pass over P + D_i + Q; the residual streams of Q's last token after block k are
    averaged over i, and stand in for that token's own in an ordinary pass over P + Q + A. Invariant. The
    average depends on the query, so no two queries share a memory; they share the keys and values of P + D_i,
    and a query's options its passes.

    Args:
        layer: k, from 1; at most the model's depth. By default the paper's 15, or the last block of a model
            that is less deep.
    """

    symmetric_mask = True
    masks = False
    per_query = True
    layer: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None:
            self._check_whole("layer")

    @property
    def invariant(self) -> bool:
        """In any positions: no two demonstrations are in one pass."""
        return True

    def bind(self, model: PreTrainedModel) -> BatchICL:
        """The default layer filled in, and the model's blocks tried.

        Raises:
            InputError: the layer is beyond the model's depth.
            Unsupported: the blocks give something else than one residual stream, [1, tokens, width].
        """
        depth, name = model.config.get_text_config().num_hidden_layers, type(model).__name__
        layer = min(DEFAULT_LAYER, depth) if self.layer is None else self.layer
        self._check("layer", layer <= depth, f"at most {depth}, the depth of {name}")
        try:
            with residual_stream(model, layer) as found:
                causal_pass(model, [1, 2])
            shapes = [tuple(getattr(stream, "shape", ())) for stream in found]
        except LookupError:
            shapes = []
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][:2] != (1, 2):
            raise Unsupported(
                f"lm-eval-icl: batchicl needs a model whose blocks hand on one residual stream, and those of {name} do "
                "not."
            )
        return replace(self, layer=layer)

    def pattern(self, n: int) -> Pattern:
        """Of a single pass, which has one demonstration or none."""
        return Pattern(before(n))

    def repeated(self, context: Context) -> tuple[tuple[int, ...], ...]:
        """Once: a pass that is averaged twice is averaged once."""
        return context.demonstrations

    def passes(
        self, context: Context, query: tuple[int, ...] = (), answer: tuple[int, ...] = ()
    ) -> list[tuple[str, Layout]]:
        """A pass a demonstration, and the last one, whose query goes on from their average."""
        last = self.layout(Context(context.prefix, ()), query, answer)
        if not context.demonstrations:
            return [("", last)]
        found = []
        for i, demonstration in enumerate(context.demonstrations, 1):
            layout = self.layout(Context(context.prefix, (demonstration,)), query)
            blocks = [(f"D{i}" if name == "D1" else name, length) for name, length in layout.blocks]
            found.append((f"one-shot pass {i}", replace(layout, blocks=blocks)))
        layer = self.layer or f"{DEFAULT_LAYER} (or the last)"
        found.append((f"last pass: after block {layer}, Q's last token is what the others have there, averaged", last))
        if self.positions == "symmetric":
            start = self.extent(context).query_start
            for _, layout in found:
                behind = sum(length for name, length in layout.blocks if name in "QA")
                layout.positions[len(layout.tokens) - behind :] = start + torch.arange(behind)
        return found

    def extent(self, context: Context) -> Extent:
        """The longest of the one-shot passes, and where the query stands in the last pass."""
        prefix, lengths = len(context.prefix), [len(part) for part in context.demonstrations] or [0]
        longest = prefix + max(lengths)
        # Symmetric positions put it behind the longest demonstration in all passes, the last one included.
        query_start = longest if self.positions == "symmetric" else prefix
        return Extent(longest, prefix, longest, prefix or min(lengths), query_start)

    def encode_query(
        self,
        model: PreTrainedModel,
        context: Context,
        query: tuple[int, ...],
        memories: Callable[[Context], Memory],
    ) -> tuple[Memory, tuple[int, ...]]:
        """A pass a demonstration, and the last pass up to the query's last token, which is still to run."""
        assert self.layer is not None  # `bind` has filled it in
        zero_shot = memories(Context(context.prefix, ()))
        if not context.demonstrations:
            return zero_shot, query
        start = 0 if self.positions == "none" else self.extent(context).query_start
        positions = start + torch.arange(len(query)) if self.positions == "symmetric" else None
        last = []  # the residual stream of the query's last token, [width] a demonstration
        for demonstration in context.demonstrations:
            one_shot = memories(Context(context.prefix, (demonstration,)))
            with residual_stream(model, self.layer) as stream:
                causal_pass(model, query, one_shot, positions)
            last.append(stream[0][0, -1])
        mean = torch.stack(last).mean(0, dtype=torch.promote_types(last[0].dtype, torch.float32))

        memory = zero_shot
        if len(query) > 1:
            memory = memory.followed_by(
                query[:-1], causal_pass(model, query[:-1], zero_shot, None if positions is None else positions[:-1])
            )
        query_start = start + (0 if self.positions == "none" else len(query) - 1)
        return replace(memory, query_start=query_start, residual=(self.layer, mean)), query[-1:]
