"""The responses of this package's models. Options are scored and texts are generated after memories
that queries share; whole texts (rolling log-likelihood) are scored as in `HFLM`."""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from math import isfinite
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm
from transformers import PreTrainedModel, StoppingCriteriaList

from lm_eval_icl.errors import log, refusing
from lm_eval_icl.harness.loading import CheckedHFLM
from lm_eval_icl.harness.prepared_run import PreparedRun
from lm_eval_icl.harness.requests import named, some
from lm_eval_icl.inference.generation import ending_rows, settings_in_force
from lm_eval_icl.inference.schedule import in_order
from lm_eval_icl.inference.scoring import Score, not_finite
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt


def check_finite(instance: Instance, logprob: float, model: PreTrainedModel) -> None:
    """Refuse a log-probability that is NaN or infinite."""
    if not isfinite(logprob):
        raise not_finite(f"{named(instance)}, option {instance.idx}", logprob, model)


class RespondingLM(CheckedHFLM):
    """A model that answers lm-eval's three kinds of requests by a method.

    Attributes:
        runner: runs the method.
        run: the requests of the run that goes on.
    """

    runner: MethodRunner
    run: PreparedRun

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """The summed log-probability of every continuation, and whether greedy decoding would
        produce it."""
        if self.enable_thinking:
            return super().loglikelihood(requests, disable_tqdm)  # raises an error about thinking
        prepared = self.run.take(requests)
        prompts = [(request.prompt, request.answer) for request in prepared]
        scores: dict[int, Score] = {}
        bar = self._bar("Running loglikelihood requests", requests, disable_tqdm)
        with bar, self.runner.inference_mode():
            for pass_scores in self.runner.score_prompts(prompts, self.run.once):
                for i, value in pass_scores:
                    check_finite(requests[i], value[0], self.runner.model)
                    scores[i] = value
                    self.cache_hook.add_partial("loglikelihood", prepared[i].key, value)
                    bar.update(1)
        return [scores[i] for i in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of whole texts, in rolling windows, as `HFLM` has it. There are no
        demonstrations."""
        self.run.check()
        if without := self.run.limits.method.without_demonstrations:
            tasks = some(dict.fromkeys(instance.task_name for instance in requests))
            log.warning("%s: rolling log-likelihood has no demonstrations: %s.", tasks, without)
        for instance in requests:
            self.run.tokenize.check_text(instance)
        with self.runner.inference_mode():
            scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        for instance, logprob in zip(requests, scores, strict=True):
            check_finite(instance, logprob, self.model)
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each prompt, up to a stop sequence or `max_gen_toks`."""
        prepared = self.run.take(requests)
        by_arguments: dict[str, list[int]] = defaultdict(list)
        for i in in_order([request.prompt for request in prepared]):
            arguments = json.dumps(requests[i].args[1], sort_keys=True, default=str)
            by_arguments[arguments].append(i)
        once = self.run.once
        uses = Counter(request.prompt.context for request in prepared)
        single = {context for context, number in uses.items() if once and number == 1}

        texts: dict[int, str] = {}
        bar = self._bar("Running generate_until requests", requests, disable_tqdm)
        with bar, self.runner.inference_mode():
            for waiting in by_arguments.values():
                while waiting:
                    prompts = [prepared[i].prompt for i in waiting]
                    alike = [requests[i] for i in waiting]
                    generated = self._generate_first(prompts, alike, single)
                    done = waiting[: len(generated)]
                    waiting = waiting[len(generated) :]
                    for i, text in zip(done, generated, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", prepared[i].key, text)
                        bar.update(1)
                        context = prepared[i].prompt.context
                        uses[context] -= 1
                        if once and not uses[context]:
                            self.runner.forget(context)
        return [texts[i] for i in range(len(requests))]

    def _generate_first(
        self,
        prompts: Sequence[TokenizedPrompt],
        instances: Sequence[Instance],
        single: Collection[Context],
    ) -> list[str]:
        """The texts of the first requests, as many as fit into one batch.

        Args:
            prompts: the prompts of the requests (`in_order`).
            instances: the requests, all with the same generation arguments.
            single: as for `MethodRunner.generate`.

        Raises:
            InputError: transformers refuses the arguments.
        """
        arguments = instances[0].args[1]
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        eos = None
        if self.eot_token_id is not None:
            eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        most = kwargs.pop("max_gen_toks")
        kwargs.pop("cache_implementation", None)

        def generate(context: torch.Tensor, **cache: Any) -> torch.Tensor:
            what = (
                f"task {instances[0].task_name!r}: generation arguments {arguments}: refused by "
                "transformers"
            )
            refused = refusing(what, kinds=(TypeError, ValueError))
            with refused, ending_rows(self.runner.model, _stopped):
                return self.continued(context, most, until, **cache, **kwargs)

        names = [named(instance) for instance in instances[: self.runner.budget.sizes.texts]]
        settings = settings_in_force(self.runner.model, kwargs)
        rows = self.runner.generate(prompts, names, most, generate, settings, single)
        return [self.text_of(row, until) for row in rows]

    def continued(
        self, ids: torch.Tensor, most: int, until: list[str], **kwargs: Any
    ) -> torch.Tensor:
        """Rows of ids with at most `most` tokens that the model generates after them."""
        return self._model_generate(ids, ids.shape[1] + most, until, **kwargs)

    def text_of(self, tokens: list[int], until: list[str]) -> str:
        """Decode generated ids as `HFLM` does, without the stop sequence and the text after it."""
        end = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tok_decode(tokens)
        if isinstance(end, int):
            text = text.lstrip()
        return postprocess_generated_text(text, until, end if isinstance(end, str) else None)

    def _bar(self, what: str, requests: Sequence[Instance], hidden: bool) -> tqdm:
        return tqdm(total=len(requests), desc=what, disable=hidden or self.rank != 0)


def _stopped(criteria: StoppingCriteriaList) -> list[bool]:
    """For each row, whether it has reached a stop sequence."""
    trackers = [
        criterion.done_tracker for criterion in criteria if hasattr(criterion, "done_tracker")
    ]
    return [any(row_flags) for row_flags in zip(*trackers, strict=True)]
