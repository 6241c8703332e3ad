"""`loglikelihood` and `loglikelihood_rolling` of this package's models.

Answers are scored behind shared memories; whole texts as in `HFLM`, in batches that fit the device's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import PreTrainedModel

from lm_eval_icl.errors import log
from lm_eval_icl.harness.overflow import some
from lm_eval_icl.harness.requests import named
from lm_eval_icl.harness.run import PreparedRun
from lm_eval_icl.inference.scoring import Score, not_finite
from lm_eval_icl.methods.runner import MethodRunner


def check_finite(instance: Instance, logprob: float, model: PreTrainedModel) -> None:
    """Refuse a log-probability that is NaN or infinite."""
    if not isfinite(logprob):
        raise not_finite(f"{named(instance)}, option {instance.idx}", logprob, model)


def score(lm: HFLM, run: PreparedRun, runner: MethodRunner, instances: list[Instance], quiet: bool) -> list[Score]:
    """The summed log-probability of every continuation, and whether greedy decoding would produce it."""
    requests, hook = run.take(instances), lm.cache_hook
    if runner.capabilities.no_memory:
        rows = [[*request.prompt.context.tokens, *request.prompt.query] for request in requests]
        whole = [(request.key, ids, [*request.answer]) for request, ids in zip(requests, rows, strict=True)]
        with runner.counting():
            of_whole: list[Score] = lm._loglikelihood_tokens(whole, quiet)
        for instance, (logprob, _) in zip(instances, of_whole, strict=True):
            check_finite(instance, logprob, runner.model)
        return of_whole
    scores: dict[int, Score] = {}
    with (
        tqdm(total=len(instances), desc="Running loglikelihood requests", disable=quiet) as bar,
        runner.inference_mode(),
    ):
        prompts = [(request.prompt, request.answer) for request in requests]
        for of_pass in runner.score_prompts(prompts, run.once):
            for i, value in of_pass:
                check_finite(instances[i], value[0], runner.model)
                scores[i] = value
                hook.add_partial("loglikelihood", requests[i].key, value)
                bar.update(1)
    return [scores[i] for i in range(len(instances))]


def score_texts(
    lm: HFLM,
    run: PreparedRun,
    runner: MethodRunner,
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
    # `HFLM.loglikelihood_rolling` returns nothing before its last text is done, so it is called with one batch of texts
    # at a time, whose results can be stored. With batch_size=auto, which it measures in every call, it gets all texts.
    batch_size = lm.batch_size
    whole = batch_size == "auto"
    size = len(instances) if whole else int(batch_size)
    results: list[float] = []

    def halve() -> str:
        if lm.batch_size == "auto" or lm.batch_size == 1:
            return ""
        lm.batch_size_per_gpu = int(lm.batch_size) // 2
        return f"{lm.batch_size} windows of rolling log-likelihoods run side by side from here on"

    try:
        for i in range(0, len(instances), size):
            texts = instances[i : i + size]
            scores = runner.fit(partial(score, texts, quiet or not whole), halve)
            for instance, logprob in zip(texts, scores, strict=True):
                check_finite(instance, logprob, runner.model)
            results += scores
    finally:
        lm.batch_size_per_gpu = batch_size
    return results
