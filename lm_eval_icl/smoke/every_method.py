"""A smoke test of every method on a tiny random model (`lm_eval_icl.smoke.tiny`), or on a
checkpoint."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError, Unsupported, one_line
from lm_eval_icl.smoke import demo

# A log-likelihood in float32 is wrong if it differs by more than this fraction of its size.
TOLERANCE = 1e-4
# The demonstrations, as rows of `icl_demo_short`: three that together fit a tiny model's attention
# window (`tiny.WINDOW`) under every method, and eight that together are longer than the window.
_SHORT = [2, 6, 10]
_LONG = [0, 1, 3, 4, 5, 7, 9, 13]
# Arguments with which methods that learn take no minutes. The tasks have no further labeled rows.
QUICK = dict[str, dict[str, Any]]()
QUICK["ctkv"] = {"steps": 2, "per_document": True}
QUICK["ttt"] = {"permutations": 2, "batch": 1, "per_document": True}
QUICK["moicl"] = {"epochs": 0, "per_document": True}
_TASKS_OF_ALL = ("smoke_loglikelihood", "smoke_generation")
_TASKS_OF_ICL = (*_TASKS_OF_ALL, "smoke_long_loglikelihood", "smoke_long_generation")

# The responses to a task's requests: (log-likelihood, is greedy) or a text.
Responses = list[tuple[float, bool] | str]
# Method -> task -> score, or the message with which the method refuses the model, or to generate
# texts with the model.
Scores = dict[str, dict[str, float | str] | str]


def smoke(
    arch: str = "llama", limit: int = 3, special: Mapping[str, Mapping[str, Any]] | None = None
) -> Scores:
    """Run every method through lm-eval on a tiny random model, and check its results.

    `icl` must give the log-likelihoods and texts of lm-eval's `hf`, also for prompts longer than
    the model's attention window, if it has one. An order-invariant method must give the same
    log-likelihoods for another order of the demonstrations, without being told to sort them. Every
    token of a generated text must be the likeliest in a pass that scores the text as a whole, and
    every log-likelihood must be finite.

    Args:
        arch: a transformers model type with a causal language model, such as "gpt2", or the folder
            of a checkpoint.
        limit: how many documents of each task are run.
        special: further settings of tiny models, by model type (`tiny.build`).

    Returns:
        Method -> task -> score, with messages in place of what a method refuses (`Scores`). The
        scores of a random model mean nothing, except that the method ran.

    Raises:
        NoTinyModel: there is no tiny model of the type, or lm-eval's `hf` does not run it.
        InputError: methods failed or gave wrong numbers; the message says how.
    """
    from lm_eval_icl.smoke import tiny

    scores: Scores = {}
    failures: dict[str, Exception] = {}
    # Progress bars are not shown.
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stderr(io.StringIO()):
        folder = arch if Path(arch).is_dir() else temporary
        if folder == temporary:
            tiny.save(arch, Path(folder), special or tiny.NOTHING_SPECIAL)
        expected: dict[str, Responses] = {}  # by task, from lm-eval's hf
        try:
            # `hf` runs an encoder-decoder model as a whole, which no method does.
            if not tiny.is_encoder_decoder(arch):
                hf = _load("hf", folder)
                expected = {name: _run(hf, name, limit)[1] for name in _TASKS_OF_ICL}
        except Exception as error:
            raise tiny.NoTinyModel(
                arch, f"lm-eval's hf fails on it ({one_line(error)[:200]})"
            ) from error
        for name in methods.NAMES:
            try:
                scores[name] = _check(name, folder, limit, expected)
            except Exception as error:
                failures[name] = error
    if failures:
        messages = []
        for name, failure in failures.items():
            message = getattr(failure, "message", failure)
            messages.append(f"{name}: {message}"[:300])
        first = next(iter(failures.values()))
        raise InputError(f"smoke test on {arch}: {'; '.join(messages)}") from first
    return scores


def refusals(scores: Scores) -> dict[str, str]:
    """Method -> the message with which it refuses the model; "METHOD (texts)" -> why it does not
    generate texts."""
    refused = {}
    for name, by_task in scores.items():
        if isinstance(by_task, str):
            refused[name] = by_task
        else:
            for score in by_task.values():
                if isinstance(score, str):
                    refused[f"{name} (texts)"] = score
    return refused


def _check(
    name: str, folder: str, limit: int, expected: dict[str, Responses]
) -> dict[str, float | str] | str:
    """The scores of a method's tasks, or the message with which it refuses the model. Raises a
    ValueError if a response is wrong, such as a response of `icl` that differs from the response of
    `hf`."""
    try:
        lm = _load(name, folder)
    except InputError as refusal:
        return refusal.message
    scores: dict[str, float | str] = {}
    responses: dict[str, Responses] = {}
    for task in _TASKS_OF_ICL if name == "icl" else _TASKS_OF_ALL:
        try:
            scores[task], responses[task] = _run(lm, task, limit)
        except Unsupported as refusal:
            scores[task] = refusal.message
            continue
        if name == "icl":
            _compare(task, responses[task], expected[task], "hf")
        if _tasks()[task].OUTPUT_TYPE == "generate_until" and not lm.runner.capabilities.no_memory:
            _compare(task, responses[task], _likeliest(lm, task), "one row at a time")
    if lm.runner.invariant:
        lm = _load(name, folder, canonical_order=False)
        _, permuted = _run(lm, "smoke_permuted", limit)
        _compare(
            "smoke_permuted",
            permuted,
            responses["smoke_loglikelihood"],
            "the first order of demonstrations",
        )
    return scores


def _load(name: str, folder: str, **arguments: Any) -> Any:
    """A model of lm-eval by its name, as `--model NAME --model_args pretrained=FOLDER` loads it."""
    from lm_eval.api.registry import get_model

    # `hf` would pad the shorter prompt of a batch, and some models see the padding.
    batch_size = 1 if name == "hf" else 2
    arguments = {**QUICK.get(name, {}), **arguments, "pretrained": folder, "dtype": "float32"}
    return get_model(name).create_from_arg_obj(
        arguments, {"device": "cpu", "batch_size": batch_size}
    )


@functools.cache
def _tasks() -> dict[str, Any]:
    """The tasks of the smoke test, by name."""
    from lm_eval.tasks import TaskManager

    rows = demo.documents("icl_demo_short")["train"]
    task = {
        "custom_dataset": demo.documents,
        "dataset_kwargs": {"name": "icl_demo_short"},
        "test_split": "test",
        "doc_to_text": "Review: {{text}}\nSentiment:",
    }
    choice = {
        **task,
        "output_type": "multiple_choice",
        "doc_to_choice": ["amber", "very square"],
        "doc_to_target": "label",
    }
    generation = {
        **task,
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 5},
        "doc_to_target": "{{['amber', 'very square'][label]}}",
    }
    kinds: dict[str, tuple[dict[str, Any], list[int]]] = {
        "smoke_loglikelihood": (choice, _SHORT),
        "smoke_generation": (generation, _SHORT),
        "smoke_permuted": (choice, [*_SHORT[1:], _SHORT[0]]),
        "smoke_long_loglikelihood": (choice, _LONG),
        "smoke_long_generation": (generation, _LONG),
    }
    configs: list[dict[str, Any]] = []
    for name, (kind, shots) in kinds.items():
        demonstrations = {"sampler": "first_n", "samples": [rows[i] for i in shots]}
        configs.append(
            {**kind, "task": name, "num_fewshot": len(shots), "fewshot_config": demonstrations}
        )
    tasks: dict[str, Any] = TaskManager(include_defaults=False).load(configs)["tasks"]
    return tasks


def _run(lm: Any, name: str, limit: int) -> tuple[float, Responses]:
    """The metric of a task, and its responses; a ValueError if a log-likelihood is not finite."""
    import lm_eval

    task = _tasks()[name]
    results: Any = lm_eval.evaluate(
        lm, {"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0
    )
    responses: Responses = []
    for sample in results["samples"][name]:
        for (response,) in sample["resps"]:
            if isinstance(response, str):
                responses.append(response)
                continue
            logprob = float(response[0])
            if not math.isfinite(logprob):
                raise ValueError(f"{name}, document {sample['doc_id']}: log-likelihood {logprob}")
            responses.append((logprob, str(response[1]) == "True"))
    metric = "acc,none" if task.OUTPUT_TYPE == "multiple_choice" else "exact_match,none"
    return float(results["results"][name][metric]), responses


def _likeliest(lm: Any, name: str) -> Responses:
    """The texts of a generation task that was run, each generated by itself and then scored as an
    answer to its prompt.

    Raises:
        ValueError: a token is not the likeliest one in the pass that scores.
    """
    from lm_eval_icl.inference.generation import GenerationSettings

    def generate(context: Any, **cache: Any) -> Any:
        return lm.continued(context, 5, ["\n\n"], **cache)

    end_of_text = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    texts: Responses = []
    for instance in _tasks()[name].instances:
        prompt = lm.tokenize([instance])[0].prompt
        (ids,) = lm.runner.generate([prompt], [name], 5, generate, GenerationSettings())
        text = lm.text_of(ids, ["\n\n", end_of_text])
        texts.append(text)
        for _, scores in lm.runner.score({prompt.context: {prompt.query: [tuple(ids)]}}):
            if not scores[0][1]:
                raise ValueError(
                    f"{name}: {text!r} is generated, but it is not the most probable text of a "
                    "pass over the whole text"
                )
    return texts


def _compare(task: str, ours: Responses, theirs: Responses, what: str) -> None:
    """Raise a ValueError if the responses of two runs of a task differ. `what` describes the second
    run."""
    worst = (0.0, "")
    for response, other in zip(ours, theirs, strict=True):
        if isinstance(response, str) or isinstance(other, str):
            if response != other:
                raise ValueError(f"{task}: {response!r} is generated, with {what} {other!r}")
            continue
        if response[1] != other[1]:
            raise ValueError(
                f"{task}: whether an answer is the greedy one is not the same with {what}"
            )
        difference = abs(response[0] - other[0]) / abs(other[0])
        text = f"a log-likelihood is {response[0]:.6f}, with {what} {other[0]:.6f}"
        worst = max(worst, (difference, text))
    difference, text = worst
    if difference > TOLERANCE:
        raise ValueError(f"{task}: {text} ({difference:.1e} of its size)")
