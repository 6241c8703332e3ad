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

# ---------------------------------------------------------------------------------------------------------------
# Files.


def write(
    folder: Path | str, model: str = "icl", seed: int = 0, *, task: str | Sequence[str] = "t", n: int = 40,
    says: Sequence[int] | None = None, gold: Sequence[int] | None = None, right: float | Sequence[float] | None = None,
    first: int = 0, order: int = 0, shots: int = 4, samples: bool = True, evil: str = "",
    rules: Mapping[str, Mapping[str, Any]] | None = None, put: Mapping[str, Any] | None = None, **of_task: Any,
) -> Path:  # fmt: skip
    """Write the results file of a run and its samples.

    Args:
        task: one, or several.
        says: the number of the option that is predicted for each document; None for the right ones.
        gold: the right option of each document; None for every second one.
        right: instead of both, the score of each document; or the share of right ones, drawn for seed, model and task.
        first: the number of the first document.
        evil: text in front of the prompts.
        rules: by the name of a decision rule, what the results say of it; and under "says" the number of the option
            that it predicts for each document.
        put: what is put into the results, as {"config.limit": 3}.
        of_task: of the tasks' configuration.

    Returns:
        The results file.
    """
    folder, tasks = Path(folder), [task] if isinstance(task, str) else task
    folder.mkdir(parents=True, exist_ok=True)
    number, shots = len(list(folder.glob("results_*"))), of_task.get("num_fewshot", shots)
    stamp = f"2026-11-22T10-{number // 60:02}-{number % 60:02}.5"
    of_tasks: dict[str, dict[str, Any]] = {}
    for name in tasks:
        wanted = [i % 2 for i in range(n)] if gold is None else gold
        given = wanted if says is None else says
        if right is not None:
            draws = np.random.default_rng([seed, *map(ord, model + name)]).random(n)
            scores = draws < right if isinstance(right, float) else np.asarray(right, bool)
            wanted, given = [0] * len(scores), (~scores).astype(int).tolist()
        demonstrations = [f"Text: demonstration {seed} {which}\nLabel: good\n\n" for which in "ab"]
        before = evil + "".join(demonstrations[::-1] if order else demonstrations)
        of_tasks[name], lines = {}, []
        for filter_, predicted in {
            "none": given,
            **{rule: of["says"] for rule, of in (rules or {}).items()},
        }.items():
            scores = [float(a == b) for a, b in zip(wanted, predicted, strict=True)]
            error = stdev(scores) / len(scores) ** 0.5 if samples and len(scores) > 1 else 0.05
            of_tasks[name] |= {f"acc,{filter_}": fmean(scores), f"acc_stderr,{filter_}": error}
            lines += [
                {
                    "doc_id": first + i,
                    "doc": {"text": f"{name} document {first + i}"},
                    "target": str(wanted[i]),
                    "arguments": {
                        f"gen_args_{j}": {
                            "arg_0": f"{before}Text: document {first + i}\nLabel:",
                            "arg_1": f" {label}",
                        }
                        for j, label in enumerate(("good", "bad"))
                    },
                    "filter": filter_,
                    **{
                        "metrics": ["acc"],
                        "doc_hash": digest(name, first + i),
                        "target_hash": digest(wanted[i]),
                    },
                    "prompt_hash": digest(before, first + i),
                    "resps": [[["-1.0", "False"]], [["-2.0", "False"]]],
                    "filtered_resps": [
                        ["-1.0" if option == predicted[i] else "-2.0", "False"]
                        for option in range(2)
                    ],
                    "acc": score,
                }
                for i, score in enumerate(scores)
            ]
        of_tasks[name]["sample_len"] = len(wanted)
        if samples:
            write_samples(folder / f"results_{stamp}.json", name, lines)
    config = {"output_type": "multiple_choice", "num_fewshot": shots, "fewshot_delimiter": "\n\n",
              "doc_to_text": "Text: {{text}}\nLabel:", "doc_to_choice": ["good", "bad"], "test_split": "test",
              **of_task}  # fmt: skip
    results = {
        "results": of_tasks,
        **{key: dict.fromkeys(tasks, value) for key, value in (
            ("configs", config), ("n-shot", shots), ("versions", 1.0), ("higher_is_better", {"acc": True}))},
        "n-samples": {
            name: {"original": of["sample_len"], "effective": of["sample_len"]} for name, of in of_tasks.items()
        },
        "config": {"model": model, "model_args": {"pretrained": "org/model"}, "fewshot_seed": seed, "limit": None,
                   "use_cache": None},
        "date": 1790000000.0 + number,
    }  # fmt: skip
    if rules:
        of_rules = {
            rule: {key: facts[key] for key in facts if key != "says"}
            for rule, facts in rules.items()
        }
        config["metadata"] = {**config.get("metadata", {}), "decided": of_rules}
    results = json.loads(json.dumps(results))  # tasks share nothing
    for path, value in (put or {}).items():
        *outer, last = path.split(".")
        inside = results
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = json.loads(json.dumps(value))
    (folder / f"results_{stamp}.json").write_text(json.dumps(results))
    return folder / f"results_{stamp}.json"


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
    prompts, demonstrations = digest(task, documents, shots, seed, order), digest(task, shots, seed)
    answers = Answers(documents, prompts, demonstrations, items, predictions=items.astype(int))
    fields = Fields({}, {}, {}, {"shots": str(shots)}, {}, {})
    return TaskResult(
        task=task, metric=metric, filter="none", value=float(items.mean()), stderr=0.05, higher_is_better=True,
        aggregation="mean", shots=shots, documents=len(items), answers=answers, fields=fields,
    )  # fmt: skip


def make_run(model, result, seed, order, arguments, study, path, pretrained="M"):
    """A run of a study on one task."""
    icl = {"method": model, **arguments, "study": study}
    results = {
        "config": {
            "model": model,
            "model_args": {"pretrained": pretrained, **arguments},
            "icl": icl,
        },
        "configs": {result.task: {}},
        "results": {result.task: {}},
    }
    results["config"] |= {"fewshot_seed": seed, "use_cache": None}
    results["n-shot"] = {result.task: result.shots}
    study["order"] = order
    result = replace(result, fields=fields_of(results, result.task))
    return Run(
        path=path, digest=digest(str(path)), arguments=arguments, icl=icl, date=1000.0 + 10 * seed + order, limit=None,
        tasks={result.task: result}, groups={}, results=results, study=StudyFacts.of(study, study),
    )  # fmt: skip
