"""`loglikelihood` of this package's models: answers are scored behind shared memories."""

from __future__ import annotations

from functools import partial
from math import isfinite

from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from tqdm import tqdm

from lm_eval_icl.harness.response_cache import finished
from lm_eval_icl.harness.run import PreparedRun
from lm_eval_icl.inference.scoring import Score, not_finite
from lm_eval_icl.methods.runner import MethodRunner


def score(
    run: PreparedRun, runner: MethodRunner, hook: CacheHook, instances: list[Instance], quiet: bool
) -> list[Score]:
    """The summed log-probability of every continuation, and whether greedy decoding would produce it.

    Raises:
        InputError: a log-probability is NaN or infinite.
    """
    requests = run.take(instances)
    scores: dict[int, Score] = {}
    with (
        tqdm(total=len(instances), desc="Running loglikelihood requests", disable=quiet) as bar,
        runner.inference_mode(),
    ):
        prompts = [(request.prompt, request.answer) for request in requests]
        done = partial(run.contexts.release, store=runner.store)
        for of_pass in runner.score_prompts(prompts, done, run.contexts.own):
            for i, value in of_pass:
                if not isfinite(value[0]):
                    name = f"task {instances[i].task_name!r}, document {instances[i].doc_id}, option {instances[i].idx}"
                    raise not_finite(name, value[0], runner.model)
                scores[i] = value
                hook.add_partial("loglikelihood", requests[i].key, value)
                bar.update(1)
            finished(hook)
    return [scores[i] for i in range(len(instances))]
