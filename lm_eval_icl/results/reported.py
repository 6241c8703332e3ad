"""What a results file reports of a task besides its compared fields: the metric that stands for it, and its value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval_icl.results.metrics import AGGREGATIONS, CALIBRATION
from lm_eval_icl.results.records import Unusable, at, count, number

# lm-eval's metrics that are not means over documents (lm_eval/api/metrics.py) -> the aggregation; "" if it is unknown.
_NO_MEANS = {
    **{
        "f1": "f1",
        "mcc": "matthews_corrcoef",
        "perplexity": "perplexity",
        "bits_per_byte": "bits_per_byte",
    },
    **dict.fromkeys(("word_perplexity", "byte_perplexity"), "weighted_perplexity"),
    **dict.fromkeys(("brier_score", "bleu", "chrf", "chrf++", "ter", "bypass"), ""),
}


def reported_value(values: Mapping[str, Any], metric: str, filter_name: str) -> float:
    """The value in the results; NaN for a metric that is computed from log-likelihoods."""
    key = f"{metric},{filter_name}"
    value = number(values.get(key))
    if value is None and metric not in CALIBRATION:
        raise Unusable(f"its {key} is {str(values.get(key))[:40]!r}, which is not a number")
    return math.nan if value is None else value


def higher_is_better(
    results: Mapping[str, Any], task: str, metric: str, entry: Mapping[str, Any]
) -> bool:
    if metric in CALIBRATION:
        return CALIBRATION[metric].higher_is_better
    higher = at(results, "higher_is_better", task, metric)
    if higher is None:
        higher = entry.get("higher_is_better")
    return higher is not False


def size_of(results: Mapping[str, Any], task: str) -> int:
    """The number of documents."""
    size = count(at(results, "n-samples", task, "effective"))
    return size or count(at(results, "results", task, "sample_len")) or 0


def retrieval_marks(retrieved: Mapping[str, Any]) -> list[str]:
    """A mark that says from how many labeled documents each document's demonstrations were retrieved."""
    rows, number = count(at(retrieved, "pool", "rows")), count(retrieved.get("own_copies"))
    if rows is None or number is None:
        return []
    copies = (
        f"it has copies of {number} documents, which were left out"
        if number
        else "it has no copies of documents"
    )
    return [f"Each document's demonstrations are retrieved from a pool of {rows:,} rows; {copies}."]


def metric_of(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    wanted: str | None,
    rules: Mapping[str, Any],
) -> tuple[str, str, Mapping[str, Any]]:
    """The metric that stands for a task, its first filter that is not a decision rule, and its `metric_list` entry."""
    filters: dict[str, str] = {}
    for key in values:
        metric, comma, filter_name = key.partition(",")
        if (
            comma
            and not metric.endswith("_stderr")
            and metric != "bypass"
            and filter_name not in rules
        ):
            filters.setdefault(metric, filter_name)
    if wanted in CALIBRATION and filters:
        return str(wanted), next(iter(filters.values())), {}
    entries = metric_entries(config, filters)
    for metric in (*filter(None, [wanted]), "acc", "exact_match", *entries, *filters):
        if metric in filters:
            return metric, filters[metric], entries.get(metric, {})
    raise Unusable("it has no metric")


def metric_entries(
    config: Mapping[str, Any], metrics: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Metric -> its entry in a task's `metric_list`, in the order of that list."""
    entries: dict[str, Mapping[str, Any]] = {}
    listed = config.get("metric_list")
    for entry in listed if isinstance(listed, list) else []:
        name = str(at(entry, "metric"))
        for metric in metrics:
            if (
                name == metric or f"def {metric}(" in name
            ):  # a metric that is a function has its source as its name
                entries.setdefault(metric, entry)
    return entries


def aggregation_of(metric: str, entry: Mapping[str, Any]) -> str:
    """A name of `AGGREGATIONS`, or "" if there is none for the metric."""
    if metric in CALIBRATION:
        return CALIBRATION[metric].aggregation
    name = str(entry.get("aggregation", _NO_MEANS.get(metric, "mean")))
    return name if name in AGGREGATIONS else ""
