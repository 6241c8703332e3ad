"""Plain mode: every request computed alone, by the definition of its method.

A request is a context, a query and an answer. Each of its forward passes is one row of the model,
under the dense mask and at the positions of the layout that the method gives. The model's own
attention computes it. No keys and values are kept for another request, nothing is packed or
batched, and a text is generated without a cache. It is slow, and the optimized code is compared
with it, so the two share only the methods' layouts and formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from lm_eval_icl.inference.attention import Attended, AttentionCall, Reading, additive, attention_by
from lm_eval_icl.inference.caches import cache_arguments, without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.schedule import ContextQueryAnswer
from lm_eval_icl.inference.scoring import Scores, States
from lm_eval_icl.methods.mode import ModelMode
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


class Plain:
    """Scores and texts of single requests. A method says in `Method.by_definition` what runs.

    Args:
        mode: the model, and how it runs.
        softmax_dtype: of the softmax over the vocabulary. None: at least float32.
    """

    def __init__(self, mode: ModelMode, softmax_dtype: torch.dtype | None) -> None:
        self.mode = mode
        self.model = mode.model
        self.softmax_dtype = softmax_dtype

    def score(
        self, method: Any, work: Mapping[Context, Queries], states: States = None
    ) -> Iterator[tuple[list[ContextQueryAnswer], Scores]]:
        """Yields as `MethodRunner.score` does, one request after another."""
        for context, queries in work.items():
            for query, answers in queries.items():
                prompt = TokenizedPrompt(context, query)
                for answer in answers:
                    with self.mode.counting():
                        scores = self._score(method, prompt, answer, states)
                    yield [(context, query, answer)], scores

    def _score(self, method: Any, prompt: TokenizedPrompt, answer: Ids, states: States) -> Scores:
        """The score of one answer, and the vector that `states` names."""
        hidden: list[Tensor] = []
        projection: Any = self.model.get_output_embeddings()
        with projection.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0])):
            all_logits = method.by_definition(self, prompt, answer[:-1])
        by_memory, predicted = self._predicted(method, all_logits, answer[:-1])
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
        """The ids that `generate` (as for `MethodRunner.generate`) puts after a prompt.

        In each step, the model's forward pass is replaced by the prediction of the next token after
        the text so far. A pass of a logits processor (`guidance_scale`) is the model's own.
        """
        inner: Any = without_adapter(self.model)
        forward = inner.forward

        def predict(input_ids: Tensor, next_step: bool = False, **inputs: Any) -> Any:
            if not next_step:
                return forward(input_ids, **inputs)
            inner.forward = forward
            texts = [tuple(ids[len(prompt) :]) for ids in input_ids.tolist()]
            logits = []
            for text in texts:
                by_memory = method.by_definition(self, prompt, text)
                # Some processors (`repetition_penalty`) read logits otherwise than probabilities.
                if len(by_memory) > 1:
                    by_memory = [self._predicted(method, by_memory, text)[1]]
                logits.append(by_memory[0][-1:])
            inner.forward = predict
            return CausalLMOutputWithPast(logits=torch.stack(logits))

        inner.forward = predict
        inner.prepare_inputs_for_generation = lambda input_ids, **_: {
            "input_ids": input_ids,
            "next_step": True,
        }
        try:
            row = [*prompt.context.tokens, *prompt.query]
            ids = generate(torch.tensor([row], device=device_of(self.model)))
        finally:
            inner.forward = forward
            del inner.prepare_inputs_for_generation
        return list(ids[0, len(prompt) :].tolist())

    def _predicted(
        self, method: Any, all_logits: Sequence[Tensor], answer: Ids
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities after the query and after each token of the answer.

        Args:
            all_logits: those of a request's last tokens on each memory (`Method.by_definition`).

        Returns:
            On each memory, [memories, 1 + answer, vocabulary], and combined, [1 + answer,
            vocabulary].
        """
        by_memory = []
        for logits in all_logits:
            last = logits[-len(answer) - 1 :]
            dtype = self.softmax_dtype or torch.promote_types(last.dtype, torch.float32)
            by_memory.append(last.log_softmax(-1, dtype=dtype))
        stacked = torch.stack(by_memory)
        return stacked, method.combined(stacked) if len(by_memory) > 1 else by_memory[0]

    # One forward pass.

    def run(self, layout: Layout, prompt: Sequence[int], memory: Any = None) -> Tensor:
        """Run the row of a layout, and return the logits of its tokens, [tokens, vocabulary].

        Args:
            prompt: the ids of the prompt, which has every part once (`Layout.source`).
            memory: the cache at the beginning of the layout, to which the keys and values of the
                row are added.
        """
        first = layout.entries
        row = [prompt[i] for i in layout.source[first:]]
        ids = torch.tensor([row], device=device_of(self.model))
        arguments: dict[str, Any] = {"use_cache": False}
        positions = layout.positions[first:]
        mask = layout.mask[first:]
        is_own_mask = torch.equal(mask, torch.ones_like(mask).tril(first))  # the model's own
        if not is_own_mask:
            hidden = additive(mask, self.model.dtype).to(ids.device)
            arguments["attention_mask"] = hidden[None, None]
        # Without positions, some models (OPT) count them by the mask.
        if not (is_own_mask and torch.equal(positions, torch.arange(first, len(layout)))):
            arguments["position_ids"] = positions.to(ids.device)[None]
            # Without a cache, transformers would take a repeated position for the start of another
            # text.
            memory = DynamicCache() if memory is None else memory
        if memory is not None:
            arguments |= cache_arguments(self.model, memory)
        logits: Tensor = self.model(ids, **arguments).logits
        return logits[0]

    def run_in_parts(
        self, layout: Layout, prompt: Sequence[int], first: int, reading: Reading, after: int
    ) -> Tensor:
        """`run`, where the last `after` tokens read those from `first` on as `reading` says."""
        at = (..., slice(-after, None), slice(first, -after))

        def in_parts(call: AttentionCall) -> Attended:
            """The part's share is exp(factor * LSE(s / T) + log w), divided by softmax(s / T)."""
            scale = call.options.get("scaling") or call.query.shape[-1] ** -0.5
            scores = scale * call.query @ call.repeated().key.mT
            tempered = scores[at] / reading.temperature
            total = tempered.logsumexp(-1, keepdim=True)
            added = torch.zeros_like(scores)
            added.masked_fill_(~layout.mask.to(added.device), -torch.inf)
            added[at] = tempered - scores[at] + (reading.factor - 1) * total + reading.log_weight
            return replace(call, mask=added).whole()

        with attention_by(in_parts):
            return self.run(layout, prompt)
