"""`loglikelihood` of this package's models: answers are scored behind shared memories."""

from __future__ import annotations

import math
from functools import partial

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from tqdm import tqdm

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.response_cache import finished
from lm_eval_icl.harness.run import PreparedRun
from lm_eval_icl.inference.schedule import grouped
from lm_eval_icl.inference.scoring import Score
from lm_eval_icl.methods.runner import MethodRunner


def loglikelihood(
    run: PreparedRun, runner: MethodRunner, hook: CacheHook, instances: list[Instance], quiet: bool
) -> list[Score]:
    """The summed log-probability of every continuation, and whether greedy decoding would produce it."""
    requests = run.requests(instances)
    run.tokens_alone += sum({id(request): request.length for request in requests}.values())
    scores: dict[int, Score] = {}
    dtype = runner.model.dtype  # transformers looks for it among the parameters
    with (
        tqdm(total=len(instances), desc="Running loglikelihood requests", disable=quiet) as bar,
        runner.inference_mode(),
    ):
        asked_by = grouped((request.prompt, request.answer) for request in requests)
        done = partial(run.contexts.release, store=runner.store)
        for asked, found in runner.score(asked_by, done, run.contexts.own):
            for (context, query, answer), score in zip(asked, found, strict=True):
                for i in asked_by[context][query][answer]:
                    check_finite(instances[i], score[0], dtype)
                    scores[i] = score
                    hook.add_partial("loglikelihood", requests[i].key, score)
                    bar.update(1)
            finished(hook)
    run.release(instances)
    return [scores[i] for i in range(len(instances))]


def check_finite(instance: Instance, logprob: float, dtype: torch.dtype) -> None:
    """Stop at a log-probability that is NaN or infinite, which metrics would count as an ordinary wrong answer.

    Raises:
        InputError: the log-probability is NaN or infinite.
    """
    if not math.isfinite(logprob):
        raise InputError(
            f"task {instance.task_name!r}, document {instance.doc_id}, option {instance.idx}: the log-probability is "
            f"{logprob} ({dtype}): the checkpoint is broken, or its numbers overflow. Try --model_args "
            "dtype=float32."
        )
