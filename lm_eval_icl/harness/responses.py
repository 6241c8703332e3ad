"""The responses of this package's models. Options are scored and texts are generated after memories that queries share;
whole texts (rolling log-likelihood) are scored as in `HFLM`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from math import isfinite
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm
from transformers import PreTrainedModel, StoppingCriteriaList

from lm_eval_icl.errors import log, refusing
from lm_eval_icl.harness.requests import named, some
from lm_eval_icl.harness.run import PreparedRun
from lm_eval_icl.inference.generation import ending_rows, settings_in_force
from lm_eval_icl.inference.schedule import in_order
from lm_eval_icl.inference.scoring import Score, not_finite
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt


def check_finite(instance: Instance, logprob: float, model: PreTrainedModel) -> None:
    """Refuse a log-probability that is NaN or infinite."""
    if not isfinite(logprob):
        raise not_finite(f"{named(instance)}, option {instance.idx}", logprob, model)


def score(
    lm: HFLM, run: PreparedRun, runner: MethodRunner, instances: list[Instance], quiet: bool
) -> list[Score]:
    """The summed log-probability of every continuation, and whether greedy decoding would produce it."""
    requests, hook = run.take(instances), lm.cache_hook
    scores: dict[int, Score] = {}
    with (
        tqdm(total=len(instances), desc="Running loglikelihood requests", disable=quiet) as bar,
        runner.inference_mode(),
    ):
        prompts = [(request.prompt, request.answer) for request in requests]
        for pass_scores in runner.score_prompts(prompts, run.once):
            for i, value in pass_scores:
                check_finite(instances[i], value[0], runner.model)
                scores[i] = value
                hook.add_partial("loglikelihood", requests[i].key, value)
                bar.update(1)
    return [scores[i] for i in range(len(instances))]


def score_texts(
    run: PreparedRun,
    model: PreTrainedModel,
    score: Callable[..., list[float]],
    instances: list[Instance],
    quiet: bool,
) -> list[float]:
    """The log-probability of every text as a whole. These requests have no demonstrations.

    Args:
        score: `HFLM.loglikelihood_rolling`.
    """
    run.check()
    if without := run.method.without_demonstrations:
        tasks = some(dict.fromkeys(instance.task_name for instance in instances))
        log.warning("%s: rolling log-likelihood has no demonstrations: %s.", tasks, without)
    for instance in instances:
        run.tokenize.check_text(instance)
    scores = score(instances, quiet)
    for instance, logprob in zip(instances, scores, strict=True):
        check_finite(instance, logprob, model)
    return scores


def generate_until(
    lm: HFLM, run: PreparedRun, runner: MethodRunner, instances: list[Instance], quiet: bool
) -> list[str]:
    """The text that follows each prompt, up to a stop sequence or `max_gen_toks`, in the order of `instances`."""
    requests = run.take(instances)
    by_arguments: dict[str, list[int]] = defaultdict(
        list
    )  # generation arguments -> indices of requests
    for i in in_order([request.prompt for request in requests]):
        by_arguments[json.dumps(instances[i].args[1], sort_keys=True, default=str)].append(i)
    uses = Counter(request.prompt.context for request in requests)
    single = {context for context, number in uses.items() if run.once and number == 1}

    texts: dict[int, str] = {}
    with (
        tqdm(total=len(instances), desc="Running generate_until requests", disable=quiet) as bar,
        runner.inference_mode(),
    ):
        for waiting in by_arguments.values():
            prompts, waiting_instances = (
                [requests[i].prompt for i in waiting],
                [instances[i] for i in waiting],
            )
            while waiting:
                generated = generate_first(lm, runner, prompts, waiting_instances, single)
                n = len(generated)
                for i, text in zip(waiting[:n], generated, strict=True):
                    texts[i] = text
                    lm.cache_hook.add_partial("generate_until", requests[i].key, text)
                    bar.update(1)
                for prompt in prompts[:n]:
                    uses[prompt.context] -= 1
                    if run.once and not uses[prompt.context]:
                        runner.forget(prompt.context)
                waiting, prompts, waiting_instances = (
                    waiting[n:],
                    prompts[n:],
                    waiting_instances[n:],
                )
    return [texts[i] for i in range(len(instances))]


def generate_first(
    lm: HFLM,
    runner: MethodRunner,
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
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(arguments, lm.max_gen_toks))
    eos = (
        None
        if lm.eot_token_id is None
        else lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    )
    until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
    max_gen_toks = kwargs.pop("max_gen_toks")
    kwargs.pop("cache_implementation", None)

    def generate(context: torch.Tensor, **cache: Any) -> torch.Tensor:
        what = f"task {instances[0].task_name!r}: generation arguments {arguments}: refused by transformers"
        with refusing(what, kinds=(TypeError, ValueError)), ending_rows(runner.model, _stopped):
            return lm._model_generate(
                context, context.shape[1] + max_gen_toks, until, **cache, **kwargs
            )

    first = instances[: runner.budget.sizes.texts]
    names = list(map(named, first))
    settings = settings_in_force(runner.model, kwargs)
    rows = runner.generate(prompts, names, max_gen_toks, generate, settings, single)
    return [text_of(lm, row, until) for row in rows]


def _stopped(criteria: StoppingCriteriaList) -> list[bool]:
    """For each row, whether it has reached a stop sequence."""
    trackers = [
        criterion.done_tracker for criterion in criteria if hasattr(criterion, "done_tracker")
    ]
    return [any(row_flags) for row_flags in zip(*trackers, strict=True)]


def text_of(lm: HFLM, tokens: list[int], until: list[str]) -> str:
    """Decode generated ids as `HFLM` does, without the stop sequence and the text after it."""
    end = lm.think_end_token
    if isinstance(end, int) and end in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
    text = lm.tok_decode(tokens)
    if isinstance(end, int):
        text = text.lstrip()
    return postprocess_generated_text(text, until, end if isinstance(end, str) else None)
