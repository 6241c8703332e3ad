"""Results files as pandas tables, with a row for each run, each score, or each document."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_icl.results.board import grouped
from lm_eval_icl.results.collect import document_rows
from lm_eval_icl.results.costs import cost_of
from lm_eval_icl.results.metrics import AGGREGATIONS, CALIBRATION, probabilities
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import Run, number
from lm_eval_icl.results.tasks import options

_WHICH = "run model pretrained seed order task".split()
_RUN = "run path date model pretrained revision dtype arguments split chat seed order".split()
_RUN += "labels format limit tasks".split()
_SCORE = [*_WHICH, *"metric filter value stderr shots documents".split()]
_DOCUMENT = [*_WHICH, *"filter shots arguments options doc_id document prompt".split()]
_DOCUMENT += "demonstrations target gold prediction loglikelihoods probabilities".split()

Paths = str | Path | Sequence[str | Path | Run]  # runs are read already


def runs(paths: Paths, dev: bool = False) -> pd.DataFrame:
    """One row for each run in results files of lm-eval or of `lm-eval-icl collect`, or in folders
    with such files.

    Returns:
        A table with the columns
        run: a digest of the results, the same for copies of one run.
        path: the path of the results file; date: when the run began, UTC.
        model: the method, or lm-eval's name of the model: "hf", "icl", "vllm", ...
        pretrained, revision, dtype: the checkpoint's.
        arguments: the other model arguments as given, as JSON.
        split: "test", or "dev" for a run on the dev set of a study, if `dev` is True.
        chat: whether prompts have a chat template.
        seed: the seed of the demonstrations (`fewshot_seed`).
        order: the number of the demonstrations' order in a study, or 0.
        labels, format: those of `--metadata labels=...,format=...`; "" and 0 are the task's own.
        limit: lm-eval's `--limit`; tasks: a tuple of their names.
        tokens_run, tokens_saved, passes, seconds, peak_bytes, shared_by, documents_run: what the
            run cost over all of its tasks (`results.costs.Cost`); missing if the file does not say.

    Warns:
        UserWarning: a file, or a task of a file, is left out; the warning says why.
    """
    rows = []
    for run in _read(paths, dev):
        row = _which(run)
        for name in ("revision", "dtype", "format", "limit"):
            row[name] = getattr(run, name)
        row["path"] = str(run.path)
        row["date"] = pd.to_datetime(run.date, unit="s", utc=True) if run.date else None
        row["arguments"] = json.dumps(dict(run.arguments), sort_keys=True, default=str)
        row["split"] = run.study.split or "test"
        row["chat"] = "chat" in run.fields.setting
        row["labels"] = run.fields.setting.get("labels", "")
        row["tasks"] = tuple(run.tasks)
        rows.append(row | vars(cost_of([run], run.tasks)))
    return _table(rows, _RUN)


def scores(paths: Paths, dev: bool = False) -> pd.DataFrame:
    """One row for each run, task, metric and filter: the numbers of lm-eval's table.

    The arguments and warnings are those of `runs`. The columns are run, model, pretrained, seed,
    order (see `runs`), task, metric, filter, value, stderr (missing if lm-eval has none), shots
    (how many demonstrations a prompt has), documents (how many were scored).
    """
    rows = []
    for run in _read(paths, dev):
        for result in run.tasks.values():
            values = run.results["results"][result.task]
            for name, value in values.items():
                metric, comma, filter_name = name.partition(",")
                if not comma or metric.endswith("_stderr") or type(value) not in (int, float):
                    continue
                row = {"task": result.task, "metric": metric, "filter": filter_name, "value": value}
                row["stderr"] = number(values.get(f"{metric}_stderr,{filter_name}"))
                row["shots"] = result.shots
                row["documents"] = result.documents
                rows.append(_which(run) | row)
    return _table(rows, _SCORE)


def documents(paths: Paths) -> pd.DataFrame:
    """One row for each run, task, document and filter, of all runs with samples (`--log_samples`)
    that agree with their results. A decision rule is a filter: group by `filter` if a run has some.
    The argument and the warnings are those of `runs`.

    Returns:
        A table with the columns run, model, pretrained, seed, order (see `runs`), task, filter,
        shots, and
        arguments: all arguments of the method, with defaults, as JSON.
        options: a tuple of the names of the options; empty if they differ between documents.
        doc_id: the number of the document in its task.
        document, prompt, demonstrations: digests of the document with its right answer, of the
            prompt, and of the demonstrations whatever their order ("" without any). They are equal
            for equal prompts of different runs.
        target: the right answer, as lm-eval writes it.
        gold: the number of the right option, missing if it is not known.
        prediction: the number of the predicted option, or the text that the filter returns.
        loglikelihoods: the options' log-likelihoods, or values under a decision rule, as a tuple;
            () without options.
        probabilities: the same values, normalised over the options.
        and one column for each metric, by lm-eval's name (acc, exact_match, ...), missing for tasks
        without it.
    """
    rows = []
    for run in _read(paths):
        method = {name: x for name, x in run.fields.method.items() if name != "method"}
        arguments = json.dumps(method, sort_keys=True)
        for task, task_results in grouped(run.all_results, lambda result: result.task).items():
            for result in task_results:
                for mark in result.marks:
                    warnings.warn(
                        f"{run.path}: task {task!r}, {result.reported_filter}: {mark}", stacklevel=2
                    )
            unused = {result.reported_filter for result in task_results if result.answers is None}
            which = _which(run)
            which["task"] = task
            which["shots"] = task_results[0].shots
            which["arguments"] = arguments
            which["options"] = tuple(options(run.results, task))
            for row in document_rows(run, task) if len(unused) < len(task_results) else ():
                if row.filter in unused:
                    continue
                values = row._asdict()
                for name in ("options", "logprobs", "metrics"):
                    del values[name]
                values["loglikelihoods"] = row.logprobs
                values["probabilities"] = ()
                if row.logprobs:
                    values["probabilities"] = tuple(probabilities(row.logprobs).tolist())
                values["target"] = row.target or (None if row.gold is None else str(row.gold))
                for name, x in row.metrics.items():
                    values[name] = tuple(x) if isinstance(x, list) else x
                rows.append({**which, **values})
    return _table(rows, _DOCUMENT)


def _metric(documents: pd.DataFrame, name: str) -> float:
    """The metric `name` of `CALIBRATION`, from rows of `documents`."""
    pairs = zip(documents.loglikelihoods, documents.gold, strict=True)
    rows = [(logprobs, int(gold)) for logprobs, gold in pairs if logprobs and not pd.isna(gold)]
    if not rows:
        raise ValueError(
            "no document has the log-likelihoods of its options and a right answer that is known."
        )
    logprobs, golds = zip(*rows, strict=True)
    aggregation = AGGREGATIONS[CALIBRATION[name].aggregation]
    features = aggregation.features(CALIBRATION[name].items(logprobs, golds))
    return float(aggregation.value(features.sum(axis=0)))


def ece(documents: pd.DataFrame) -> float:
    """The expected calibration error of rows of `results.documents`, with 15 bins of equal width
    (Guo et al. 2017)."""
    return _metric(documents, "ece")


def brier(documents: pd.DataFrame) -> float:
    """The mean Brier score: the sum over options of (probability - whether it is right)^2. 0 is
    best, and 2 is worst."""
    return _metric(documents, "brier")


def log_probability(documents: pd.DataFrame) -> float:
    """The mean logarithm of the right option's probability (natural logarithm; 0 is best)."""
    return _metric(documents, "log_probability")


def _which(run: Run) -> dict[str, Any]:
    which = {name: getattr(run, name) for name in ("model", "pretrained", "seed", "order")}
    which["run"] = run.digest
    return which


def _read(paths: Paths, dev: bool = False) -> list[Run]:
    several = [paths] if isinstance(paths, str | Path) else paths
    runs_read = [run for run in several if isinstance(run, Run)]
    if not runs_read:
        runs_read, left_out = read([Path(str(path)) for path in several], quiet=True, dev=dev)
        for file in left_out:
            warnings.warn(f"{file.path}: {file.why}", stacklevel=3)
    return sorted(runs_read, key=lambda run: (run.date, run.digest))


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A table that has these columns even if there are no rows."""
    table = pd.DataFrame(rows)
    table = table.reindex(columns=list(dict.fromkeys([*columns, *table])))
    whole = {"seed", "order", "gold"} & {*table}
    return table.astype(dict.fromkeys(whole, "Int64"))
