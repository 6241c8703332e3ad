"""The wrapper of `lm_eval.evaluate`, which `lm_eval_icl.harness.patches` installs."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from lm_eval.api.model import LM, CacheHook, CachingLM
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import get_sample_size

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.files import as_json, digest
from lm_eval_icl.harness import deciding, plugin
from lm_eval_icl.harness.metaicl_task import MetaICLTask, tell_model
from lm_eval_icl.harness.model_choices import give_chosen, give_rankings, retrieving
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.requests import some
from lm_eval_icl.harness.response_cache import resumable
from lm_eval_icl.harness.task_state import state_of
from lm_eval_icl.inference.identity import weights_digest

FEW_DOCUMENTS = 30


def announced(
    original: Callable[..., Any], lm: LM, task_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrapper of `lm_eval.evaluate`: tell the tasks which model is evaluated, and tell a model of
    this package when a run over some tasks begins and ends. Before requests are built, the model
    chooses demonstrations for the tasks that ask for it, and retrieved demonstrations are ranked.
    Tasks whose metadata name decision rules have the rules as filters during the run.

    Raises:
        InputError: a run with these tasks, decision rules or arguments is not possible.
    """
    model = lm.lm if isinstance(lm, CachingLM) else lm
    call = inspect.signature(original).bind(lm, task_dict, *args, **kwargs).arguments
    tasks: Mapping[str, Task] = task_dict.get("tasks", {}) if isinstance(task_dict, dict) else {}
    limit = call.get("limit")
    is_ours = isinstance(model, ICLModel)
    warn_of_documents(tasks, limit)
    weights = weights_of(model)
    if is_ours and isinstance(lm, CachingLM):
        lm = resumable(lm)
    try:
        for task in tasks.values():
            tell_model(task, model)
            deciding.give_rules(task, model)
        ruled = {
            name: rules
            for name, task in tasks.items()
            if (rules := state_of(task).rules) is not None
        }
        samplers = retrieving(tasks)
        if call.get("cache_requests"):
            may_be_of_another_method = is_ours and not call.get("rewrite_requests_cache")
            if ruled or samplers or may_be_of_another_method:
                raise InputError(
                    "--cache_requests: lm-eval finds stored prompts by task and number of "
                    "demonstrations, not by seed, choice of demonstrations or decision rule, so "
                    "that a run could get another's prompts: leave it out."
                )
        give_rankings(model, tasks, limit)
        if is_ours:
            model.chosen = give_chosen(model, tasks.values())
            model.fitted = {}
            model.begin(list(tasks.values()))
            if lm is model:
                model.set_cache_hook(CacheHook(None))  # an earlier run's may be for other weights
        with recording() if is_ours else nullcontext():
            results = original(lm, task_dict, *args, **kwargs)
    finally:
        for task in tasks.values():
            deciding.take_rules(task)
    if is_ours:
        model.finish()
    if results is None:  # only one of several processes has the results
        return None
    deciding.record(ruled, results)
    read: int | None = 0  # responses that were not computed; None if that is not known
    if isinstance(lm, CachingLM):
        read = model.counts["responses_read"] if is_ours else None
    results["provenance"] = {
        "weights": weights,
        "responses": {"read": read},
        "demonstrations": {
            name: task.demonstration_rows
            for name, task in tasks.items()
            if isinstance(task, MetaICLTask) and task.demonstration_rows
        },
    }
    if is_ours:
        results["plugins"] = plugin.provenance(type(model).__name__)
    for name, sampler in samplers.items():
        deciding.add_metadata(results, name, {"retrieved": sampler.facts})
    return results


def warn_of_documents(tasks: Mapping[str, Task], limit: float | None) -> None:
    """Warn of tasks of which `--limit` takes documents that can show little: one line for all of
    them."""
    few = []
    one_answer = []
    for name, task in tasks.items() if limit else ():
        size = get_sample_size(task, limit)
        documents = [document for _, document in task.doc_iterator(limit=size)]
        answers = {str(task.doc_to_target(document)) for document in documents}
        if len(answers) == 1 < len(documents):
            one_answer.append(f"{name} ({answers.pop()})")
        elif len(documents) < FEW_DOCUMENTS:
            few.append(f"{name} {len(documents)}")
    if one_answer:
        log.warning(
            "All documents have one right answer in %s: --limit takes the first rows, which are "
            "sorted by it. Add --metadata shuffle=0.",
            some(one_answer),
        )
    if few:
        log.warning("Intervals will be wide, since the documents are few: %s.", some(few))


def weights_of(model: Any) -> str | None:
    """A digest of the model's weights and tokenizer; None for a model that has no files or no
    tokenizer here."""
    if getattr(model, "rank", 0):
        return None
    adapters = (getattr(model, "peft", None), getattr(model, "delta", None))
    revision = getattr(model, "revision", None)
    weights = weights_digest(getattr(model, "pretrained", None), revision, adapters)
    # Some models load a tokenizer when they are asked for it.
    if not weights or not hasattr(model, "tokenizer"):
        return None
    return digest(f"{weights} {_tokenizer_digest(model.tokenizer)}")[:32]


@functools.lru_cache(maxsize=4)
def _tokenizer_digest(tokenizer: Any) -> str:
    """A digest of the vocabulary, and of what becomes of a text."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    ids = tokenizer.encode("Review: It's 100% naïve,\n\n  and 你好! Label: good")
    return digest(as_json([vocabulary, ids]))
