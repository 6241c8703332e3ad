"""Make the numbers and figures of docs/findings.md from the folders of its studies.

    python scripts/findings.py which-method which-method-slow thinking [--output docs/findings]
    python scripts/findings.py    # from the answers that are kept in docs/findings

Written: answers.csv, the option that every entry predicted for every document, a digit each, a line for each set of
demonstrations and order, and a line with the right ones for each task; findings.csv, a line for each task, method and
decision rule; and figures, of what there is.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm_eval_icl import results
from lm_eval_icl.drawing.style import GREY, INK, METADATA, styled
from lm_eval_icl.results.statistics import Estimate, difference, estimate, order_sensitivity

ROOT = Path(__file__).resolve().parent.parent
ENTRY = ["task", "shots", "method", "arguments", "rule"]
SET, RIGHT = [*ENTRY, "seed", "order"], "(right answers)"
RULES = {"none": ("#6e7781", "o", "as the model says"), "contextual": ("#d55e00", "D", "contextual")}
RULES["batch"] = ("#0072b2", "s", "batch")
TITLES = {"icl_sst2": "SST-2", "icl_trec": "TREC", "icl_agnews": "AG News"}
ACCURACY = (0.0, 1.0)


def packed(folders: list[Path]) -> pd.DataFrame:
    """A row for each entry, set of demonstrations and order, each once whichever folders have it."""
    with warnings.catch_warnings():  # the reader says that it shows rules as filters alone, which is what is read here
        warnings.simplefilter("ignore")
        documents, runs, scores = results.documents(folders), results.runs(folders), results.scores(folders)
    table = documents.merge(runs[["run", "arguments"]], on="run")
    table = table.merge(scores.drop_duplicates(["run", "task"])[["run", "task", "shots"]], on=["run", "task"])
    table = table.rename(columns={"model": "method", "filter": "rule"}).sort_values("doc_id")
    table["arguments"] = table.arguments.map(lambda text: ",".join(f"{k}={v}" for k, v in json.loads(text).items()))
    table = table.drop_duplicates([*SET, "doc_id"])
    digits = table.astype({"prediction": int}).astype({"prediction": str}).groupby(SET).prediction.agg("".join)
    right = table.drop_duplicates(["task", "doc_id"]).groupby("task").target.agg("".join)
    rows = [{"task": task, "method": RIGHT, "prediction": text} for task, text in right.items()]
    table = pd.concat([pd.DataFrame(rows), digits.reset_index()], ignore_index=True)
    return table[[*SET, "prediction"]].astype({"shots": "Int64"})


def unpacked(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each document, with the right answer and whether the prediction is right."""
    right = rows[rows.method == RIGHT].set_index("task").prediction
    table = rows[rows.method != RIGHT].fillna({"arguments": ""}).astype({"shots": int, "seed": int, "order": int})
    table["target"] = table.task.map(right).map(list)
    table["doc_id"], table["prediction"] = (
        table.prediction.map(lambda text: range(len(text))),
        table.prediction.map(list),
    )
    table = table.explode(["doc_id", "prediction", "target"]).astype(dict.fromkeys(("prediction", "target"), int))
    return table.assign(acc=(table.prediction == table.target).astype(float))


def scores_of(entry: pd.DataFrame) -> pd.DataFrame:
    """Accuracy by document and set of demonstrations, the mean over orders."""
    return entry.pivot_table(index="doc_id", columns="seed", values="acc", aggfunc="mean")


def interval(name: str, of: Estimate | None) -> dict[str, float]:
    return {} if of is None else {name: of.mean, f"{name}_low": of.low, f"{name}_high": of.high}


def than(entry: pd.DataFrame, other: pd.DataFrame | None, name: str) -> dict[str, float]:
    """How much better an entry is than another, on the sets of demonstrations and orders that both have."""
    if other is None:
        return {}
    keys = ["seed", "order"]
    both = entry[keys].drop_duplicates().merge(other[keys].drop_duplicates())
    pair = [scores_of(each.merge(both, on=keys)).to_numpy() for each in (entry, other)]
    return interval(name, difference(*pair, bounds=ACCURACY)) if len(both) else {}


def line(entry: pd.DataFrame, icl: pd.DataFrame | None, raw: pd.DataFrame | None) -> dict[str, Any]:
    """What is said of an entry: accuracy, differences, how often an order changes a prediction, predicted labels."""
    by_set = [
        each.pivot(index="doc_id", columns="order", values="prediction").to_numpy() for _, each in entry.groupby("seed")
    ]
    options = range(max(entry.prediction.max(), entry.target.max()) + 1)
    shares = entry.prediction.value_counts(normalize=True).reindex(options, fill_value=0)
    right = entry.target.value_counts(normalize=True)
    return {
        **{"documents": entry.doc_id.nunique(), "sets": entry.seed.nunique(), "orders": entry.order.nunique()},
        **interval("accuracy", estimate(scores_of(entry).to_numpy(), bounds=ACCURACY)),
        **than(entry, icl, "than_icl"),
        **than(entry, raw, "than_raw"),
        **interval("flips", order_sensitivity(by_set)),
        **{"one_label": right.max(), "predicted": " ".join(f"{share:.2f}" for share in shares)},
    }


def lines_of(table: pd.DataFrame) -> pd.DataFrame:
    entries = dict(list(table.groupby(ENTRY)))
    found = []
    for (task, shots, method, arguments, rule), entry in entries.items():
        icl = entries.get((task, shots, "icl", "", rule)) if method != "icl" else None
        raw = entries.get((task, shots, method, arguments, "none")) if rule != "none" else None
        which = dict(zip(ENTRY, (task, shots, method, arguments, rule), strict=True))
        found.append({**which, **line(entry, icl, raw)})
    return pd.DataFrame(found)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata=METADATA["svg"])  # on white, since text is dark


def panels(lines: pd.DataFrame, height: float) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each task, side by side."""
    tasks = [task for task in TITLES if task in set(lines.task)]
    figure = Figure(figsize=(7.6, height), layout="constrained")
    row = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(row, tasks, strict=True):
        axes.set_title(TITLES[task], loc="left", fontweight="bold")
    return figure, dict(zip(tasks, row, strict=True))


def draw_dots(lines: pd.DataFrame, value: str, label: str, path: Path) -> None:
    """A row for each method, a mark with its 95% interval for each decision rule."""
    lines = lines.dropna(subset=[value])
    names = lines[lines.rule == "none"].groupby("method")[value].mean().sort_values().index
    figure, by_task = panels(lines, 0.34 * len(names) + 1.0)
    for task, axes in by_task.items():
        for rule, (colour, marker, _) in RULES.items():
            some = lines[(lines.task == task) & (lines.rule == rule)].set_index("method")
            y = np.array([names.get_loc(name) for name in some.index]) + 0.22 * (1 - list(RULES).index(rule))
            axes.hlines(y, 100 * some[f"{value}_low"], 100 * some[f"{value}_high"], color=colour, linewidth=1.4)
            axes.plot(100 * some[value], y, marker, color=colour, markersize=4)
        if value == "accuracy":
            axes.axvline(
                100 * lines[lines.task == task].one_label.iloc[0], color=GREY, linestyle=(0, (4, 2)), linewidth=1
            )
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(label)
    marks = [axes.plot([], [], marker, color=colour, label=name)[0] for colour, marker, name in RULES.values()]
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks))
    save(figure, path)


def draw_thinking(lines: pd.DataFrame, path: Path) -> None:
    """Accuracy against T, a line for each eta and decision rule."""
    figure, by_task = panels(lines, 2.8)
    for task, axes in by_task.items():
        for (eta, rule), some in lines[lines.task == task].groupby(["eta", "rule"]):
            colour, marker, name = RULES[rule]
            some = some.sort_values("T")
            dashes: dict[str, Any] = {"linestyle": "-" if eta <= 0.01 else "--", "label": f"eta={eta:g}, {name}"}
            axes.plot(some["T"], 100 * some.accuracy, marker=marker, color=colour, markersize=3.5, **dashes)
            axes.fill_between(
                some["T"], 100 * some.accuracy_low, 100 * some.accuracy_high, color=colour, alpha=0.08, linewidth=0
            )
        axes.set_xticks(sorted(set(lines["T"])))
        axes.grid()
        axes.set_xlabel("T, passes over the demonstrations")
    next(iter(by_task.values())).set_ylabel("accuracy, %")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", type=Path, help="the studies' folders")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "findings")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    kept = given.output / "answers.csv"
    if given.studies:
        packed([folder / "cells" for folder in given.studies]).to_csv(kept, index=False)
    table = unpacked(pd.read_csv(kept, dtype={"prediction": str}))
    lines = lines_of(table)
    lines.to_csv(given.output / "findings.csv", index=False, float_format="%.4f")
    lines = lines[lines.shots > 0]
    # A curve has the sets of demonstrations and orders that all of its points have.
    several = table[(table.method == "deepthink") & (table.shots > 0)]
    numbers = several.groupby("task").arguments.transform("nunique")
    of_all = several.groupby(["task", "seed", "order"]).arguments.transform("nunique") == numbers
    thinking = lines_of(several[of_all & (numbers > 1)])
    for name in ("T", "eta") if len(thinking) else ():
        thinking[name] = thinking.arguments.str.extract(rf"\b{name}=([\d.]+)").astype(float)
    of_methods = lines[(lines.method != "deepthink") | (lines.arguments == "T=5,eta=0.01")]
    settings = {"text.color": INK, "grid.color": INK, "grid.alpha": 0.13, "grid.linewidth": 0.6}
    with styled(**settings):
        draw_dots(of_methods, "accuracy", "accuracy, %", given.output / "methods.svg")
        if "flips" in lines:
            draw_dots(of_methods, "flips", "predictions changed, %", given.output / "orders.svg")
        if len(thinking):
            draw_thinking(thinking, given.output / "thinking.svg")
    columns = [
        *ENTRY,
        "sets",
        "orders",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "than_icl",
        "than_raw",
        "predicted",
    ]
    print(lines.reindex(columns=columns).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
