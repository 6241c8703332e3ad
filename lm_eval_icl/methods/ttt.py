"""TTT: The Surprising Effectiveness of Test-Time Training for Few-Shot Learning.

(Akyürek et al., 2024.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.declared import NotNegative, Positive
from lm_eval_icl.errors import Unsupported, log
from lm_eval_icl.inference.adapters import Adapter, Dropout, adapted_layers
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.schedule import Batch, ContextWork
from lm_eval_icl.inference.scoring import Scores, States
from lm_eval_icl.methods.answers import canonical, examples_of, leaks, loss_in_layout
from lm_eval_icl.methods.base import EncodedContext, Encoder, Method, Passes
from lm_eval_icl.methods.learned import Learned, Learning, Probability, Rate
from lm_eval_icl.prompts.tokens import Context


@dataclass(frozen=True)
class TTT(Learned):
    """Test-time training: an adapter is trained on permutations of the demonstrations.

    A text is the prefix and the demonstrations in a random order, in the layout of `layout`. The
    loss of a step is the mean cross-entropy over the answer tokens of all demonstrations of a batch
    of texts. AdamW (weight decay 0.01) trains a low-rank change of the linear layers of all blocks,
    except those that make keys alone (LoRA; `inference.adapters`). The learning rate falls from
    `lr` to 0 with a cosine. The adapter belongs to the demonstrations: they are encoded with it, in
    the order of the prompt, and their queries run with it. Nothing else does.

    Under an invariant layout all texts of a batch are alike, and one of them runs.

    Args:
        permutations: the number of texts.
        epochs: how many times the texts are run through, in a new order each. With 0, it is the
            method `layout`.
        batch: the number of texts of a step.
        rank: the rank of the change of a layer.
        alpha: the change is scaled by this number divided by the rank.
        dropout: the probability with which an input of a change is 0 in training.
    """

    rows_may_differ = False  # an adapter changes all rows of a batch

    permutations: Positive = 40
    epochs: NotNegative = 1
    batch: Positive = 5
    rank: Positive = 64
    alpha: Rate = 64.0
    lr: Rate = 1e-4
    dropout: Probability = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            "layout",
            fine=not leaks(self.first),
            must="a method under which no demonstration sees its own answer before it predicts it",
        )

    @property
    def needs_mask(self) -> bool:  # type: ignore[override]
        return self.first.needs_mask

    @property
    def steps(self) -> int:
        """The number of batches in all epochs."""
        return self.epochs * math.ceil(self.permutations / self.batch)

    def bind(self, model: PreTrainedModel) -> Method:
        """Find the layers that the adapter changes, and say which they are."""
        name = type(model).__name__
        if getattr(model, "_tp_size", None):
            raise Unsupported(
                f"{self.name}: no adapters under tensor parallelism: leave tp_plan out."
            )
        try:
            layers = adapted_layers(model)
        except LookupError as error:
            raise Unsupported(f"{self.name} finds no layers for its adapters: {error}.") from error
        names = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
        log.info("%s: adapters change %s in all blocks of %s", self.name, ", ".join(names), name)
        return self

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """The pass of a step over a text, and that of the prompt with the adapter."""
        row = self.first.lay_out(prefix, demonstrations, query, answer)
        if not self.steps or not demonstrations:
            return [("", row)]
        text = self.first.lay_out(prefix, demonstrations)
        return [
            (f"each of {self.steps} steps, for each order: learn to predict all answers", text),
            ("demonstrations, query and answer with the learned adapter", row),
        ]

    def batches(self, context: Context, generator: torch.Generator) -> list[list[Context]]:
        """The texts of each step. They do not depend on the order of the demonstrations."""
        order = canonical(context)
        texts = []
        for _ in range(self.permutations):
            drawn = torch.randperm(len(order), generator=generator)
            texts.append(context.keeping([order[i] for i in drawn.tolist()]))
        batches = []
        for _ in range(self.epochs):
            epoch = torch.randperm(self.permutations, generator=generator).tolist()
            for first in range(0, self.permutations, self.batch):
                chosen = epoch[first : first + self.batch]
                batches.append([texts[i] for i in chosen])
        if self.first.invariant:
            return [batch[:1] for batch in batches]
        return batches

    def learn(self, model: PreTrainedModel, context: Context) -> Iterator[Learning]:
        """See `Learned`. It runs inside `torch.no_grad`."""
        [memory] = self.first.encode(model, [context])
        yield Learning(math.nan, memory)
        generator = torch.Generator().manual_seed(self.seed)
        batches = self.batches(context, generator)
        begun = Adapter.begin(model, self.rank, self.alpha / self.rank, generator)
        parameters = [part.requires_grad_() for part in begun.parameters]
        drop = Dropout(self.dropout, int(torch.randint(2**31, (), generator=generator)))
        answer_tokens = sum(len(tokens) - begin for _, tokens, begin in examples_of(context))

        def losses(step: int) -> Iterator[Tensor]:
            texts = batches[step]
            for text in texts:
                with torch.enable_grad(), begun.on(model, drop):
                    loss = loss_in_layout(model, self.first.row(text), text)
                    share = loss / (len(texts) * answer_tokens)
                yield share

        for loss in self.descend(parameters, losses, weight_decay=0.01):
            # A copy, since the next step changes the parameters in place.
            adapter = begun.with_parameters([part.detach().clone() for part in parameters])
            with adapter.on(model):
                [memory] = self.first.encode(model, [context])
            yield Learning(loss, replace(memory, adapter=adapter))

    def work(self, context: Context, queries: Queries, once: bool) -> Sequence[ContextWork]:
        # A pass has the queries of one context, since it has one adapter.
        return super().work(context, queries, once=False)

    def scored(
        self, encoder: Encoder, batch: Batch, encoded: EncodedContext | None, states: States
    ) -> Scores:
        assert encoded is not None
        [memory] = encoded.memories
        with memory.adapted(encoder.model):
            return super().scored(encoder, batch, encoded, states)
