"""Plain mode: every request computed alone, by the definition of its method, with none of the optimizations.

A request is a context, a query and an answer. Each of its forward passes is one row of the model, under the dense mask
and at the positions of the layout that the method gives (`Method.passes`). The model's own attention computes it. No
keys and values are kept for another request, nothing is packed or batched, and a text is generated without a cache. It
is slow, and the optimized code is compared with it, so the two share only the methods' layouts and formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.attention import Attended, AttentionCall, additive, attention_by
from lm_eval_icl.inference.blocks import replaced_stream, residual_stream
from lm_eval_icl.inference.caches import cache_arguments, without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.scoring import Scores, States
from lm_eval_icl.methods.batchicl import BatchICL
from lm_eval_icl.methods.deepthink import DeepThink
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Ids, TokenizedPrompt


@dataclass
class Plain:
    """Scores and texts of single requests, on a model."""

    model: PreTrainedModel
    softmax_dtype: (
        torch.dtype | None
    )  # of the softmax over the vocabulary; None for at least float32

    def score(
        self, method: Any, prompt: TokenizedPrompt, answer: Ids, states: States = None
    ) -> Scores:
        """The score of one answer. `states` is as for `MethodRunner.score`."""
        hidden: list[Tensor] = []
        projection: Any = self.model.get_output_embeddings()
        with projection.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0])):
            by_memory, predicted = self._predicted(method, prompt, answer[:-1])
        ids = torch.tensor(answer, device=predicted.device)
        numbers = predicted.gather(-1, ids[:, None])[:, 0]
        greedy = predicted.argmax(-1) == ids
        if len(by_memory) > 1:
            numbers = method.score(predicted, by_memory, ids)[None]
            greedy = greedy.all()[None]
        vectors = by_memory[:, 0] if states == "log_probs" else hidden[-1][:, -len(answer)]
        return Scores(torch.stack((numbers, greedy.to(numbers))), [len(numbers)], vectors)

    def generate(
        self, method: Any, prompt: TokenizedPrompt, generate: Callable[..., Tensor]
    ) -> list[int]:
        """The ids that `generate` (as for `MethodRunner.generate`) puts after a prompt. In each step, the model's
        forward pass is replaced by the prediction of the next token after the text so far."""
        inner: Any = without_adapter(self.model)
        forward = inner.forward

        def predict(input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
            inner.forward = forward
            texts = [tuple(ids[len(prompt) :]) for ids in input_ids.tolist()]
            logits = [self._predicted(method, prompt, text)[1][-1:] for text in texts]
            inner.forward = predict
            return CausalLMOutputWithPast(logits=torch.stack(logits))

        inner.forward = predict
        inner.prepare_inputs_for_generation = lambda input_ids, **_: {"input_ids": input_ids}
        try:
            row = [*prompt.context.tokens, *prompt.query]
            ids = generate(torch.tensor([row], device=device_of(self.model)))
        finally:
            inner.forward = forward
            del inner.prepare_inputs_for_generation
        return list(ids[0, len(prompt) :].tolist())

    def _predicted(
        self, method: Any, prompt: TokenizedPrompt, answer: Ids
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities after the query and after each token of the answer: on each memory of the context,
        [memories, 1 + tokens of the answer, vocabulary], and all of them combined, [1 + tokens, vocabulary]."""
        by_memory = []
        for window in method.contexts(prompt.context):
            alone = TokenizedPrompt(window, prompt.query)
            logits = self._logits(method.window_method, alone, answer)[-len(answer) - 1 :]
            dtype = self.softmax_dtype or torch.promote_types(logits.dtype, torch.float32)
            by_memory.append(logits.log_softmax(-1, dtype=dtype))
        stacked = torch.stack(by_memory)
        return stacked, method.combined(stacked) if len(by_memory) > 1 else by_memory[0]

    def _logits(self, method: Any, prompt: TokenizedPrompt, answer: Ids) -> Tensor:
        """The logits of the last tokens of a request, [tokens, vocabulary]."""
        context = prompt.context
        prefix = context.prefix
        lengths = len(prefix), context.lengths, len(prompt.query), len(answer)
        *before, last = [layout for _, layout in method.passes(*lengths)]
        after = [*prompt.query, *answer]
        row = [*context.tokens, *after]
        if isinstance(method, BatchICL):
            # The residual streams of Q's last token over P + D_i + Q are averaged, and put into P + Q + A.
            row = [*prefix, *after]
            if before:
                layer: Any = method.layer
                with residual_stream(self.model, layer) as streams:
                    for layout, demonstration in zip(before, context.demonstrations, strict=True):
                        self._run(layout, [*prefix, *demonstration, *prompt.query])
                mean = torch.stack([stream[0, -1:] for stream in streams]).mean(0)
                token = len(prefix) + len(prompt.query) - 1
                with replaced_stream(self.model, layer, [token], mean):
                    return self._run(last, row)
        elif isinstance(method, DeepThink):
            return self._run(last, row, self._refined(method, row, *before) if before else None)
        elif not (method.one_pass or method.reads_in_parts):
            raise Unsupported(f"{method.name} encodes by code of its own: leave plain=True out.")
        part = method.reading(context)
        if part is None:
            return self._run(last, row)
        first, reading = part
        at = (..., slice(-len(after), None), slice(first, -len(after)))

        def in_parts(call: AttentionCall) -> Attended:
            """The part's share is exp(factor * LSE(s / T) + log w), and it is divided by softmax(s / T)."""
            scale = call.options.get("scaling") or call.query.shape[-1] ** -0.5
            scores = scale * call.query @ call.repeated().key.mT
            tempered = scores[at] / reading.temperature
            total = tempered.logsumexp(-1, keepdim=True)
            added = torch.zeros_like(scores)
            added.masked_fill_(~last.mask.to(added.device), -torch.inf)
            added[at] = tempered - scores[at] + (reading.factor - 1) * total + reading.log_weight
            return replace(call, mask=added).whole()

        with attention_by(in_parts):
            return self._run(last, row)

    def _run(self, layout: Layout, prompt: Sequence[int], memory: Any = None) -> Tensor:
        """Run the row of a layout, and return the logits of its tokens, [tokens, vocabulary].

        Args:
            prompt: the ids of the prompt, which has every part once (`Layout.source`).
            memory: the cache at the beginning of the layout, to which the keys and values of the row are added.
        """
        first = layout.entries
        row = [prompt[i] for i in layout.source[first:]]
        ids = torch.tensor([row], device=device_of(self.model))
        arguments: dict[str, Any] = {"use_cache": False}
        positions = layout.positions[first:]
        if not torch.equal(positions, torch.arange(first, len(layout))):
            arguments["position_ids"] = positions.to(ids.device)[None]
            # Without a cache, transformers would take a repeated position for the start of another text.
            memory = DynamicCache() if memory is None else memory
        mask = layout.mask[first:]
        if not torch.equal(mask, torch.ones_like(mask).tril(first)):  # not the model's own mask
            arguments["attention_mask"] = additive(mask, self.model.dtype).to(ids.device)[
                None, None
            ]
        if memory is not None:
            arguments |= cache_arguments(self.model, memory)
        logits: Tensor = self.model(ids, **arguments).logits
        return logits[0]

    def _refined(
        self, method: DeepThink, prompt: Sequence[int], first: Layout, again: Layout
    ) -> DynamicCache:
        """Deep-Thinking: the memory of the context after T passes, with the entries that queries attend to."""
        memory = DynamicCache()
        self._run(first, prompt, memory)
        layers: list[Any] = memory.layers
        # Keys and values are updated alike. A layer that the model leaves out has none.
        entries = [
            *product([layer for layer in layers if layer.keys is not None], ("keys", "values"))
        ]
        wide = torch.promote_types(self.model.dtype, torch.float32)
        exact = [getattr(*entry).to(wide) for entry in entries]
        velocity: list[Any] = [0.0] * len(entries)
        for _ in range(1, method.T):
            self._run(again, prompt, memory)
            for i, entry in enumerate(entries):
                present = getattr(*entry)[:, :, len(first) :]
                velocity[i] = present - exact[i] + method.momentum * velocity[i]
                exact[i] = exact[i] + method.eta * velocity[i]
                setattr(*entry, exact[i].to(present.dtype))
        for entry in entries:
            setattr(*entry, getattr(*entry)[:, :, first.kept_tokens])
        return memory
