"""Continues texts on the memories of their contexts, as many in one batch as fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from lm_eval_icl.inference.generation import (
    GenerationSettings,
    combining,
    continue_from,
    stop_on_nonfinite,
)
from lm_eval_icl.inference.schedule import Text, first_texts
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.encoder import ContextEncoder
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt


@dataclass(frozen=True)
class TextBatch:
    """The first of some waiting prompts, which are continued in one batch."""

    method: Method
    encoder: ContextEncoder
    prompts: Sequence[TokenizedPrompt]
    names: Sequence[str]
    max_new_tokens: int
    generate: Callable[..., Tensor]
    settings: GenerationSettings
    single: Collection[Context]

    def run(self) -> list[list[int]]:
        """The generated ids of the texts of the batch."""
        model = self.encoder.model
        can = self.encoder.can
        texts = self.texts()
        rows = self.method.text_rows(self.encoder, texts)
        before = max(map(len, rows.memories)) + max(map(len, rows.queries))
        shared = can.can_share and can.sees_all_of(before + self.max_new_tokens)
        together: AbstractContextManager[None] = nullcontext()
        if rows.combine is not None:
            together = combining(model, rows.of_text, rows.combine)
        with stop_on_nonfinite(model, self.names[: len(texts)]), together:
            generated = continue_from(
                model, self.generate, rows.memories, rows.queries, self.settings.beams, shared
            )
        return generated[:: rows.of_text]

    def halve(self) -> str:
        """Halve the number of texts of a batch (`MemoryBudget.halve`)."""
        return self.encoder.budget.halve(0, len(self.texts()))

    def texts(self) -> list[Text]:
        """The first prompts, as many as fit into a batch now."""
        can = self.encoder.can
        sizes = self.encoder.budget.sizes
        prompts = self.prompts[: sizes.texts]
        texts = []
        for prompt in prompts:
            # Without `can_generate`, each prompt runs as a whole.
            single = prompt.context in self.single or not can.can_generate
            kept = self.method.footprint(prompt.context).kept
            texts.append(Text(prompt, kept, single and self.method.rows_may_differ))
        by_query = self.method.memory_depends_on_query
        count = first_texts(texts, self.max_new_tokens, sizes, can, self.settings, by_query)
        return texts[:count]
