"""Results files as pandas tables: a row a run, a row a score, a row a document.

    from lm_eval_icl import results

    results.documents("results").groupby(["task", "model", "shots"]).acc.mean()

Every table has the column `run`, by which tables are merged.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_icl.results.board import grouped
from lm_eval_icl.results.calibration import probabilities
from lm_eval_icl.results.read import document_rows, read
from lm_eval_icl.results.records import Run, TaskResult, Unusable, number
from lm_eval_icl.results.tasks import options

_WHICH = ["run", "model", "pretrained", "seed", "order", "task"]
_RUN = "run path date model pretrained revision dtype arguments chat seed order limit tasks tokens seconds cost".split()
_SCORE = [*_WHICH, "metric", "filter", "value", "stderr", "shots", "documents"]
_DOCUMENT = [*_WHICH, "filter", "shots", "arguments", "options", "doc_id", "document", "prompt", "demonstrations"]
_DOCUMENT += ["target", "gold", "prediction", "loglikelihoods", "probabilities"]

Paths = str | Path | Sequence[str | Path]


def runs(paths: Paths) -> pd.DataFrame:
    """One row a run of lm-eval.

    Args:
        paths: results files of lm-eval or of `lm-eval-icl collect`, and folders with such files.

    Returns:
        A table with the columns
        run: a digest of the results, the same for copies of one run.
        path: of the results file; date: when the run began, UTC.
        model: the method, or lm-eval's name of the model: "hf", "icl", "vllm", ...
        pretrained, revision, dtype: of the checkpoint; "" where the file does not say.
        arguments: the other model arguments as they were given, as JSON.
        chat: whether the prompts have the model's chat template.
        seed: of the demonstrations (`fewshot_seed`); order: which order of them, in a study, 0 elsewhere.
        limit: lm-eval's `--limit`; tasks: their names, a tuple.
        tokens, seconds: run through the model, and that the run took. What a file does not say is missing.
        cost: "alone", or "shared" of a study's cell, whose tokens and seconds are its part of those of all cells that
            were scored together, without the loading of the model. The two kinds do not compare: group by `cost`.

    Raises:
        InputError: a path does not exist.

    Warns:
        UserWarning: a file, or a task of a file, is left out; with the reason.
    """
    own = "model pretrained revision dtype seed order limit tokens seconds cost".split()
    rows = [
        {
            **{name: getattr(run, name) for name in own},
            "run": run.digest,
            "path": str(run.path),
            "date": pd.to_datetime(run.date, unit="s", utc=True) if run.date else None,
            "arguments": json.dumps(dict(run.arguments), sort_keys=True, default=str),
            "chat": bool(run.results.get("chat_template") or run.results.get("chat_template_sha")),
            "tasks": tuple(run.tasks),
        }
        for run in _read(paths)
    ]
    return _table(rows, _RUN)


def scores(paths: Paths) -> pd.DataFrame:
    """One row a run, task, metric and filter: the numbers of lm-eval's own table.

    Args, raises and warns as `runs`.

    Returns:
        A table with the columns run, model, pretrained, seed, order (see `runs`), task, metric, filter, value, stderr
        (missing where lm-eval gives none), shots (demonstrations a prompt), documents (how many were scored).
    """
    rows = []
    for run in _read(paths):
        for result in run.tasks.values():
            values = run.results["results"][result.task]
            for name, value in values.items():
                metric, comma, of_filter = name.partition(",")
                if comma and not metric.endswith("_stderr") and type(value) in (int, float):
                    error = values.get(f"{metric}_stderr,{of_filter}")
                    row = {"metric": metric, "filter": of_filter, "value": value, "stderr": number(error)}
                    rows.append({**_which(run, result), **row, "shots": result.shots, "documents": result.documents})
    return _table(rows, _SCORE)


def documents(paths: Paths) -> pd.DataFrame:
    """One row a run, task, document and filter, of all runs that have samples (`--log_samples`).

    A decision rule is a filter: group by `filter` where a run has some. Args, raises and warns as `runs`. Tasks without
    samples have no rows here, and those whose samples contradict their results neither.

    Returns:
        A table with the columns run, model, pretrained, seed, order (see `runs`), task, filter, shots,
        arguments: all of the method, defaults too, as JSON.
        options: the names of the options, a tuple; empty where they differ between documents.
        doc_id: the number of the document in its task.
        document, prompt, demonstrations: digests, of the document with its right answer, and of the demonstrations
            whatever their order; "" without any. They are the same in runs that asked the same.
        target: the right answer, as lm-eval writes it; gold: the number of that option, missing if it is not known.
        prediction: the number of the option that is predicted, or the text that the filter left.
        loglikelihoods: of the options, a tuple, or what a decision rule makes of them; empty without options.
        probabilities: the same, normalised over the options.
        and one column for each metric, by lm-eval's name (acc, acc_norm, exact_match, ...), missing for tasks that do
        not have it.
    """
    rows = []
    for run in _read(paths):
        own = {name: value for name, value in run.rows["method"].items() if name != "method"}
        arguments = json.dumps(own, sort_keys=True)
        for task, results in grouped(run.all_results, lambda result: result.task).items():
            for result in results:
                for mark in result.marks:
                    rule = "" if result.rule is None else f" under the decision rule {result.rule.name!r}"
                    warnings.warn(f"{run.path}: task {task!r}{rule}: {mark}", stacklevel=2)
            if all(result.answers is None for result in results):
                continue
            unused = {result.reported_filter for result in results if result.answers is None}
            which = {**_which(run, results[0]), "shots": results[0].shots, "arguments": arguments}
            which["options"] = tuple(options(run.results, task))
            try:
                for row in document_rows(run, task):
                    if row.filter in unused:
                        continue
                    values = row._asdict() | {"options": which["options"], "loglikelihoods": row.logprobs}
                    values["probabilities"] = tuple(map(float, probabilities(row.logprobs))) if row.logprobs else ()
                    metrics = values.pop("metrics")
                    del values["logprobs"]
                    values["target"] = row.target or (None if row.gold is None else str(row.gold))
                    pairs = {name: tuple(x) if isinstance(x, list) else x for name, x in metrics.items()}
                    rows.append({**which, **values, **pairs})
            except Unusable as error:
                warnings.warn(f"{run.path}: task {task!r}: its samples are not used: {error}", stacklevel=2)
    return _table(rows, _DOCUMENT)


def _read(paths: Paths) -> list[Run]:
    several = [paths] if isinstance(paths, str | Path) else paths
    runs_read, left_out = read([Path(path) for path in several], quiet=True)
    for file in left_out:
        warnings.warn(f"{file.path}: {file.why}", stacklevel=3)
    return sorted(runs_read, key=lambda run: (run.date, run.digest))


def _which(run: Run, result: TaskResult) -> dict[str, Any]:
    own = {name: getattr(run, name) for name in ("model", "pretrained", "seed", "order")}
    return {**own, "run": run.digest, "task": result.task}


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A table whose columns are there without rows, too."""
    table = pd.DataFrame(rows)
    table = table.reindex(columns=[*columns, *(name for name in table if name not in columns)])
    whole = [name for name in ("seed", "order", "gold") if name in table]
    return table.astype(dict.fromkeys(whole, "Int64"))
