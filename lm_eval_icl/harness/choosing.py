"""Demonstrations that the model of a run chooses: before requests are built, once, by the first process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lm_eval.api.task import Task

from lm_eval_icl.demonstrations.kept import Wanted, about_model, chosen
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.distributed import of_first
from lm_eval_icl.harness.pools import PoolOfTask
from lm_eval_icl.harness.tasks import FixedSampler
from lm_eval_icl.methods import ICL, Predictor

if TYPE_CHECKING:
    from lm_eval_icl.harness.models import ICLModel


def predictor(model: ICLModel) -> Predictor:
    """The model under plain ICL, whatever its own method, with the limits of its runs.

    Raises:
        InputError: its passes are divided among processes, of which one cannot choose by itself.
    """
    if model._is_tensor_parallel:
        raise InputError(
            "tp_plan: one process chooses demonstrations, and with tp_plan it cannot run the model by itself: make a "
            "file with `lm-eval-icl select`, and give that as demonstrations=FILE.json."
        )
    return Predictor(
        model.model,
        model.tokenizer,
        ICL(),
        max_length=model.max_length,
        add_bos_token=model.add_bos_token,
        batch_size=model.texts,
        pack_tokens=model.common.pack_tokens,
        store_bytes=model.common.store_bytes,
    )


def give_chosen(model: ICLModel, tasks: Iterable[Task]) -> dict[str, Any]:
    """Give all tasks of a run the demonstrations that its model chooses. Every process of a run calls this; the first
    one chooses.

    Returns:
        What was chosen, by task, for the results file; empty if no task asks for it.

    Raises:
        InputError: they cannot be chosen.
    """
    samplers = {task: getattr(task, "sampler", None) for task in tasks if task.config.num_fewshot}
    waiting = [(t, s, s.method) for t, s in samplers.items() if isinstance(s, FixedSampler) and s.method is not None]
    if not waiting:
        return {}

    def choose() -> dict[str, Any]:
        name = str(getattr(model.pretrained, "name_or_path", model.pretrained))
        limits = {"max_length": model.max_length, "add_bos_token": model.add_bos_token}
        under_icl, about = predictor(model), {**about_model(name, model.model_identity()), **limits}
        choices = {}
        for task, sampler, how in waiting:
            seed = 1234 if sampler.seed is None else sampler.seed  # lm-eval's, if a run has set none
            wanted = Wanted(PoolOfTask(task), how, int(task.config.num_fewshot), seed, about)
            choices[str(task.config.task)] = chosen(wanted, under_icl)
        return choices

    by_task = of_first(choose)
    for task, sampler, _ in waiting:
        sampler.give(by_task[str(task.config.task)]["indices"])
    return by_task
