"""Results for tests: files as lm-eval writes them, and runs as they are read.

All of them are random, but seeded, and consistent with each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from lm_eval_icl.results.fields import fields_of
from lm_eval_icl.results.records import Answers, Fields, Run, StudyFacts, TaskResult

LABELS = ("good", "bad")
CONFIG = {"model_args": {"pretrained": "org/model"}, "limit": None, "use_cache": None}


def drawn(right, n, seed, name):
    """Of documents whose first option is right, the predicted options."""
    if isinstance(right, float):
        draws = np.random.default_rng([seed, *map(ord, name)]).random(n)
        return [int(draw >= right) for draw in draws]
    return [int(not score) for score in right]


def sample(name, number, before, wanted, predicted):
    """A document's entry in a file of samples, without the name of its filter."""
    prompt = f"{before}Text: document {number}\nLabel:"
    arguments = {}
    scores = []
    for option, label in enumerate(LABELS):
        arguments[f"gen_args_{option}"] = {"arg_0": prompt, "arg_1": f" {label}"}
        scores.append(["-1.0" if option == predicted else "-2.0", "False"])
    return {
        "doc_id": number,
        "doc": {"text": f"{name} document {number}"},
        "target": str(wanted),
        "arguments": arguments,
        "metrics": ["acc"],
        "doc_hash": digest(name, number),
        "target_hash": digest(wanted),
        "prompt_hash": digest(before, number),
        "resps": [[["-1.0", "False"]], [["-2.0", "False"]]],
        "filtered_resps": scores,
        "acc": float(wanted == predicted),
    }


def write(
    folder: Path | str,
    model: str = "icl",
    seed: int = 0,
    *,
    task: str | Sequence[str] = "t",
    n: int = 40,
    says: Sequence[int] | None = None,
    gold: Sequence[int] | None = None,
    right: float | Sequence[float] | None = None,
    first: int = 0,
    order: int = 0,
    shots: int = 4,
    samples: bool = True,
    evil: str = "",
    rules: Mapping[str, Mapping[str, Any]] | None = None,
    put: Mapping[str, Any] | None = None,
    **of_task: Any,
) -> Path:
    """Write the results file of a run and its samples.

    Args:
        task: one, or several.
        says: the number of the option that is predicted for each document; None for the right ones.
        gold: the right option of each document; None for every second one.
        right: instead of both, the score of each document; or the share of right ones, drawn for
            seed, model and task.
        first: the number of the first document.
        evil: text in front of the prompts.
        rules: by the name of a decision rule, what the results say of it; and under "says" the
            number of the option that it predicts for each document.
        put: what is put into the results, as {"config.limit": 3}.
        of_task: of the tasks' configuration.

    Returns:
        The results file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("results_*")))
    path = folder / f"results_2026-11-22T10-{number // 60:02}-{number % 60:02}.5.json"
    shown = [f"Text: demonstration {seed} {which}\nLabel: good\n\n" for which in "ab"]
    before = evil + "".join(shown[::-1] if order else shown)
    numbers = {}
    sizes = {}
    for name in [task] if isinstance(task, str) else task:
        wanted = [i % 2 for i in range(n)] if gold is None else gold
        predicted = wanted if says is None else says
        if right is not None:
            predicted = drawn(right, n, seed, model + name)
            wanted = [0] * len(predicted)
        by_filter = {"none": predicted}
        for rule, facts in (rules or {}).items():
            by_filter[rule] = facts["says"]
        numbers[name] = {}
        lines = []
        for filter_, options in by_filter.items():
            scores = []
            for i, (right_option, option) in enumerate(zip(wanted, options, strict=True)):
                line = sample(name, first + i, before, right_option, option)
                lines.append({**line, "filter": filter_})
                scores.append(line["acc"])
            error = stdev(scores) / len(scores) ** 0.5 if samples and len(scores) > 1 else 0.05
            numbers[name] |= {f"acc,{filter_}": fmean(scores), f"acc_stderr,{filter_}": error}
        numbers[name]["sample_len"] = len(wanted)
        sizes[name] = {"original": len(wanted), "effective": len(wanted)}
        if samples:
            write_samples(path, name, lines)
    config = {
        "output_type": "multiple_choice",
        "num_fewshot": shots,
        "fewshot_delimiter": "\n\n",
        "doc_to_text": "Text: {{text}}\nLabel:",
        "doc_to_choice": LABELS,
        "test_split": "test",
        **of_task,
    }
    if rules:
        decided = {}
        for rule, facts in rules.items():
            decided[rule] = {key: value for key, value in facts.items() if key != "says"}
        config["metadata"] = {**config.get("metadata", {}), "decided": decided}
    results = {
        "results": numbers,
        "configs": dict.fromkeys(numbers, config),
        "n-shot": dict.fromkeys(numbers, config["num_fewshot"]),
        "versions": dict.fromkeys(numbers, 1.0),
        "higher_is_better": {name: {"acc": True} for name in numbers},
        "n-samples": sizes,
        "config": {**CONFIG, "model": model, "fewshot_seed": seed},
        "date": 1790000000.0 + number,
    }
    results = json.loads(json.dumps(results))  # tasks share nothing
    for place, value in (put or {}).items():
        *outer, last = place.split(".")
        inside = results
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = json.loads(json.dumps(value))
    path.write_text(json.dumps(results))
    return path


def samples_of(results: Path, task: str) -> Path:
    """The file of the samples of a task beside a results file."""
    return results.with_name(results.name.replace("results_", f"samples_{task}_") + "l")


def write_samples(results: Path, task: str, samples: Iterable[Any]) -> None:
    samples_of(results, task).write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def make_result(task, model, seed, order, *, scores, shots=4, metric="acc"):
    """What a run gave on a task: 0 or 1 for each document."""
    items = np.asarray(scores, float)
    documents = digest("documents", task, len(items))
    answers = Answers(
        documents=documents,
        prompts=digest(task, documents, shots, seed, order),
        demonstrations=digest(task, shots, seed),
        items=items,
        predictions=items.astype(int),
    )
    return TaskResult(
        task=task,
        metric=metric,
        filter="none",
        value=float(items.mean()),
        stderr=0.05,
        higher_is_better=True,
        aggregation="mean",
        shots=shots,
        documents=len(items),
        answers=answers,
        fields=Fields({}, {}, {}, {"shots": str(shots)}, {}, {}),
    )


def make_run(model, result, seed, order, arguments, study, path, pretrained="M"):
    """A run of a study on one task."""
    icl = {"method": model, **arguments, "study": study}
    config = {"model": model, "model_args": {"pretrained": pretrained, **arguments}, "icl": icl}
    config |= {"fewshot_seed": seed, "use_cache": None}
    results = {
        "config": config,
        "configs": {result.task: {}},
        "results": {result.task: {}},
        "n-shot": {result.task: result.shots},
    }
    study["order"] = order
    result = replace(result, fields=fields_of(results, result.task))
    return Run(
        path=path,
        digest=digest(str(path)),
        arguments=arguments,
        icl=icl,
        date=1000.0 + 10 * seed + order,
        limit=None,
        tasks={result.task: result},
        groups={},
        results=results,
        study=StudyFacts.of(study, study),
    )
