"""Results files as pandas tables: a row a run, a row a score, a row a document.

    from lm_eval_icl import results

    results.documents("results").groupby(["task", "model"]).acc.mean()

Every table has the column `run`, by which tables are merged.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_icl.results.form import Unusable, number
from lm_eval_icl.results.read import asked, read, samples_file
from lm_eval_icl.results.records import Answers, Run, TaskResult
from lm_eval_icl.results.samples import document_rows, lines

_WHICH = ["run", "model", "pretrained", "seed", "order", "task"]
_RUN = "run path date model pretrained revision dtype arguments chat seed order limit tasks tokens seconds cost".split()
_SCORE = [*_WHICH, "metric", "filter", "value", "stderr", "shots", "documents"]
_DOCUMENT = [*_WHICH, "filter", "doc_id", "document", "demonstrations", "target", "prediction"]

Paths = str | Path | Sequence[str | Path]


def runs(paths: Paths) -> pd.DataFrame:
    """One row a run of lm-eval.

    Args:
        paths: results files of lm-eval or of `lm-eval-icl collect`, and folders with such files.

    Returns:
        A table with the columns
        run: a digest of the results, the same for copies of one run.
        path: of the results file.
        date: when the run began, UTC.
        model: lm-eval's name of the model: "hf", "icl", "vllm", ...
        pretrained, revision, dtype: of the checkpoint; revision and dtype are "" where the file does not say.
        arguments: the other model arguments, as JSON.
        chat: whether the prompts have the model's chat template.
        seed: of the demonstrations (`fewshot_seed`); missing where the file does not say.
        order: which order of these demonstrations, in a study; 0 elsewhere.
        limit: lm-eval's `--limit`; missing without one.
        tasks: the names of the tasks, a tuple.
        tokens: run through the model; missing where the file does not say, as that of `hf`.
        seconds: that the run took; missing where the file does not say.
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

    Args, Raises, Warns:
        as of `runs`.

    Returns:
        A table with the columns run, model, pretrained, seed, order (see `runs`), task, metric, filter,
        value: of the metric.
        stderr: its standard error; missing where lm-eval gives none.
        shots: demonstrations a prompt.
        documents: how many were scored.
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

    A decision rule is a filter: group by `filter` where a run has some.

    Args, Raises, Warns:
        as of `runs`. Tasks without samples have no rows here, and those whose samples contradict their results neither.

    Returns:
        A table with the columns run, model, pretrained, seed, order (see `runs`), task, filter,
        doc_id: the number of the document in its task.
        document: lm-eval's hash of the document: the same in runs that asked the same.
        demonstrations: a digest of the prompt's demonstrations, whatever their order; missing without any.
        target: the right answer, as lm-eval writes it.
        prediction: the number of the option with the highest log-likelihood, or the text that the filter left.
        and one column for each metric, by lm-eval's name (acc, acc_norm, exact_match, ...), missing for tasks that do
        not have it.
    """
    rows = []
    for run in _read(paths):
        for result in run.all_results:
            of_task = f"{run.path}: task {result.task!r}"
            of_task += "" if result.rule is None else f" under the decision rule {result.rule.name!r}"
            for mark in result.marks:
                warnings.warn(f"{of_task}: {mark}", stacklevel=2)
            if result.answers is None:
                continue
            try:
                rows += [{**_which(run, result), **row} for row in _of_documents(run, result, result.answers)]
            except Unusable as error:
                warnings.warn(f"{of_task}: its samples are not used: {error}", stacklevel=2)
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


def _of_documents(run: Run, result: TaskResult, answers: Answers) -> Iterator[dict[str, Any]]:
    """The rows of a result's documents: from the samples beside the results, or else from what `collect` has kept,
    which is one metric and no texts."""
    path = samples_file(run.path, result.task)
    if path.is_file():
        if result.rule is not None:  # the rows of all filters are those of the task itself
            return
        for row in document_rows(lines(path), asked(run.results, result)):
            yield {**row, "demonstrations": answers.demonstrations}
        return
    for i, doc_id in enumerate(answers.doc_ids):
        yield {
            "filter": result.reported_filter,
            "doc_id": int(doc_id),
            "prediction": None if answers.predictions is None else int(answers.predictions[i]),
            "demonstrations": answers.demonstrations,
            result.metric: answers.items[i] if answers.items.ndim == 1 else tuple(answers.items[i]),
        }


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A table whose columns are there without rows, too."""
    table = pd.DataFrame(rows)
    table = table.reindex(columns=[*columns, *(name for name in table if name not in columns)])
    whole = [name for name in ("seed", "order") if name in table]
    return table.astype(dict.fromkeys(whole, "Int64"))
