"""Plain mode: every request computed alone, by the definition of its method.

A request is a context, a query and an answer. Each of its forward passes is one row of the model,
under the dense mask and at the positions of the layout that the method gives
(`Method.by_definition`). The model's own attention computes it. No keys and values are kept for
another request, nothing is packed or batched, and texts are generated without a cache. It is slow,
and it is what the optimized code is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lm_eval_icl.inference.caches import without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.generation import GenerationSettings, stop_on_nonfinite
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.scoring import Score, Scores, States
from lm_eval_icl.methods import needs
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.plain_model import PlainModel
from lm_eval_icl.methods.runner import MethodRunner, PromptAnswer, Scored
from lm_eval_icl.methods.stepwise import Stepwise
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


class PlainRunner(MethodRunner):
    """Runs a method on a model as `MethodRunner` does, one request at a time."""

    fuses_gelu = False

    def score_prompts(
        self, prompts: Sequence[PromptAnswer], once: bool = False
    ) -> Iterator[list[tuple[int, Score]]]:
        for i, (prompt, answer) in enumerate(prompts):
            [(_, scores)] = self.score({prompt.context: {prompt.query: [answer]}})
            yield [(i, scores[0])]

    def score(
        self, work: Mapping[Context, Queries], once: bool = False, states: States = None
    ) -> Iterator[Scored]:
        yield from self._score_under(self.method, work, states)

    def score_memories(
        self, method: Stepwise, context: Context, queries: Queries, numbers: Collection[int]
    ) -> Iterator[tuple[int, Scored]]:
        for number in sorted(numbers):
            steps: dict[str, Any] = {method.counts_memories: number}
            for scored in self._score_under(replace(method, **steps), {context: queries}):
                yield number, scored

    def generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        names: Sequence[str],
        max_new_tokens: int,
        generate: Callable[..., Tensor],
        settings: GenerationSettings,
        single: Collection[Context] = (),
    ) -> list[list[int]]:
        """Generate a continuation for the first prompt.

        In each step, the scores of the next token are those of a request whose answer is the text
        so far.
        """
        prompt = prompts[0]
        needs.check_generates(self.method, self.model, self.capabilities, prompt.context, settings)
        row = [*prompt.context.tokens, *prompt.query]

        def next_token(ids: list[int]) -> Tensor:
            answer = tuple(ids[len(row) :])
            logprobs = self._logprobs(self.method, prompt.context, prompt.query, answer)
            return self.method.predicted(logprobs)[-1]

        ids = torch.tensor([row], device=device_of(self.model))
        with (
            self.inference_mode(),
            stop_on_nonfinite(self.model, names[:1]),
            _predicting(self.model, next_token),
        ):
            output = generate(ids, attention_mask=torch.ones_like(ids))
        generated: list[int] = output[0, len(row) :].tolist()
        return [generated]

    def _score_under(
        self, method: Method, work: Mapping[Context, Queries], states: States = None
    ) -> Iterator[Scored]:
        """Yields as `score` does, one request after another."""
        for context, queries in work.items():
            for query, answers in queries.items():
                for answer in answers:
                    with self.counting():
                        scores = self._score_alone(method, context, query, answer, states)
                    yield [(context, query, answer)], scores

    def _score_alone(
        self, method: Method, context: Context, query: Ids, answer: Ids, states: States
    ) -> Scores:
        """The score of one request."""
        with self._projected(states) as projected:
            by_memory = self._logprobs(method, context, query, answer[:-1]).cpu()
        vector = None
        if states == "log_probs":
            vector = by_memory[:, 0].log_softmax(-1)
        elif states == "hidden":
            at_query = projected[-1][:, -len(answer)]
            vector = at_query.to(torch.promote_types(at_query.dtype, torch.float32))
        ids = torch.tensor(answer)
        predicted = method.predicted(by_memory)
        logprob = method.score(predicted, by_memory, ids)
        greedy = (predicted.argmax(-1) == ids).all()
        return Scores(torch.stack((logprob, greedy.to(logprob)))[:, None], [1], vector)

    def _logprobs(self, method: Method, context: Context, query: Ids, answer: Ids) -> Tensor:
        """The log-probabilities after query and answer: [memories, tokens, vocabulary]."""
        plain = PlainModel(self.model, method.needs_mask, method.encode)
        logits = torch.stack(method.by_definition(plain, context, query, answer))
        dtype = self.softmax_dtype or torch.promote_types(logits.dtype, torch.float32)
        logprobs = logits.log_softmax(-1, dtype=dtype)
        return logprobs.to(torch.promote_types(dtype, torch.float32))

    @contextmanager
    def _projected(self, states: States) -> Iterator[list[Tensor]]:
        """Inside this context, keep the last input of the vocabulary projection, if `states` is
        "hidden": [1, tokens, width].
        """
        inputs: list[Tensor] = []
        if states != "hidden":
            yield inputs
            return

        def keep(module: Any, arguments: tuple[Tensor, ...]) -> None:
            inputs[:] = arguments[:1]

        with self.model.get_output_embeddings().register_forward_pre_hook(keep):
            yield inputs


@contextmanager
def _predicting(
    model: PreTrainedModel, next_token: Callable[[list[int]], Tensor]
) -> Iterator[None]:
    """Inside this context, the model's `generate` gets its scores from `next_token`.

    Args:
        next_token: takes the ids of a whole row and returns [vocabulary].
    """
    inner: Any = without_adapter(model)
    forward = vars(inner).get("forward")

    def restore() -> None:
        del inner.forward
        if forward is not None:
            inner.forward = forward

    def predict(input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        restore()
        try:
            logits = torch.stack([next_token(row) for row in input_ids.tolist()])
        finally:
            inner.forward = predict
        return CausalLMOutputWithPast(logits=logits[:, None])

    inner.forward = predict
    inner.prepare_inputs_for_generation = lambda input_ids, **_: {"input_ids": input_ids}
    try:
        yield
    finally:
        restore()
        del inner.prepare_inputs_for_generation
