"""Make the numbers and figures of docs/findings.md from the folders of its studies.

    python scripts/findings.py which-method which-method-slow thinking shots
    python scripts/findings.py    # from the answers that are kept in docs/findings

New answers are added to those in docs/findings. The files are:

    answers.csv    the option that every entry predicts for every document of the test set, as a digit: a line for each
                   set of demonstrations and order, and for each task a line with the right options
    dev.csv        the accuracy of each T and eta on the dev set
    findings.csv   the results: a line for each task, method and decision rule
    selection.csv  how much choosing T and eta gains
    *.svg          figures; those of curves with their points as CSV. All points of a curve have the same documents, sets
                   of demonstrations and orders
    trained.svg    from trained.csv: the rows of `lm-eval-icl leaderboard --csv` for the study `trained`, the average of
                   MetaICL's tasks and TREC
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t

from lm_eval_icl import results
from lm_eval_icl.drawing.style import GREY, INK, METADATA, styled
from lm_eval_icl.results.read import read
from lm_eval_icl.results.statistics import Estimate, difference, estimate, order_sensitivity

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "findings"
ENTRY = ["task", "limit", "shots", "chat", "method", "arguments", "rule"]
SET = [*ENTRY, "seed", "order"]
RIGHT = "(right answers)"
TYPES = {"limit": "Int64", "shots": "Int64", "seed": "Int64", "order": "Int64", "chat": "boolean"}
EMPTY = {"arguments": "", "rule": ""}
ANSWERS = FOLDER / "answers.csv"
DEV = FOLDER / "dev.csv"
RULES = {
    "none": ("#6e7781", "o", "as the model says"),
    "contextual": ("#d55e00", "D", "contextual"),
    "batch": ("#0072b2", "s", "batch"),
}
TITLES = {"icl_sst2": "SST-2", "icl_trec": "TREC", "icl_agnews": "AG News"}
SHOTS = {"icl_sst2": 8, "icl_trec": 12, "icl_agnews": 8}  # the papers' numbers
STANDARD = "T=5,eta=0.01"
FEWER = 100  # documents in the studies of curves; entries of other numbers are apart, since batch is a mean over them
ACCURACY = (0.0, 1.0)
# An entry is compared with the entry that has the same fields except for these.
OTHERS: dict[str, dict[str, Any]] = {
    "than_icl": {"method": "icl", "arguments": ""},
    "than_raw": {"rule": "none"},
    "than_plain": {"chat": False},
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#6e7781")


def in_words(arguments: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in arguments.items())


def packed(folders: list[Path]) -> pd.DataFrame:
    """A row for each entry, set of demonstrations and order. A row that several folders have is there once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* of the dev set of a study")
        documents = results.documents(folders)
        runs = results.runs(folders)
    documents = documents.drop(columns="arguments")  # with defaults
    table = documents.merge(runs[["run", "arguments", "chat", "limit"]], on="run")
    table = table.rename(columns={"model": "method", "filter": "rule"}).sort_values("doc_id")
    table["arguments"] = table.arguments.map(json.loads).map(in_words)
    table = table.drop_duplicates([*SET, "doc_id"])
    table["digit"] = table.prediction.astype(int).astype(str)
    digits = table.groupby(SET).digit.agg("".join).reset_index(name="prediction")
    targets = table.drop_duplicates(["task", "doc_id"]).groupby("task").target.agg("".join)
    right = targets.reset_index(name="prediction").assign(method=RIGHT)
    table = pd.concat([right, digits], ignore_index=True)[[*SET, "prediction"]]
    return table.fillna(EMPTY).astype(TYPES)


def read_answers() -> pd.DataFrame:
    return pd.read_csv(ANSWERS, dtype={"prediction": str, **TYPES}).fillna(EMPTY)


def on_dev(folders: list[Path]) -> pd.DataFrame:
    """The accuracy of each entry and set of demonstrations on the dev set of a study."""
    rows = []
    for run in read(folders, quiet=True, dev=True)[0]:
        if run.icl.get("study", {}).get("split") != "dev":
            continue
        arguments = in_words(dict(sorted(run.arguments.items())))
        for result in run.all_results:
            rule = "none" if result.rule is None else result.rule.name
            rows.append((result.task, arguments, rule, run.seed, result.value))
    columns = ["task", "arguments", "rule", "seed", "accuracy"]
    return pd.DataFrame(rows, columns=columns).drop_duplicates()


def unpacked(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each document, with the right answer and whether the prediction is right."""
    right = rows[rows.method == RIGHT].set_index("task").prediction
    table = rows[rows.method != RIGHT].astype(
        {"shots": int, "limit": int, "seed": int, "order": int, "chat": bool}
    )
    table["prediction"] = table.prediction.map(list)
    table = table.explode("prediction")
    table["doc_id"] = table.groupby(level=0).cumcount()
    table["target"] = [right[task][i] for task, i in zip(table.task, table.doc_id, strict=True)]
    table = table.reset_index(drop=True).astype({"prediction": int, "target": int})
    return table.assign(acc=(table.prediction == table.target).astype(float))


def scores_of(entry: pd.DataFrame) -> np.ndarray:
    """Accuracy by document and set of demonstrations, the mean over orders."""
    return entry.pivot_table(index="doc_id", columns="seed", values="acc").to_numpy()


def interval(name: str, result: Estimate | None) -> dict[str, float]:
    if result is None:
        return {}
    return {name: result.mean, f"{name}_low": result.low, f"{name}_high": result.high}


def compared(entry: pd.DataFrame, other: pd.DataFrame) -> Estimate | None:
    """One entry minus another, on the documents, sets of demonstrations and orders that both have."""
    keys = ["doc_id", "seed", "order"]
    both = entry[keys].merge(other[keys])
    if both.empty:
        return None
    first = scores_of(entry.merge(both, on=keys))
    second = scores_of(other.merge(both, on=keys))
    return difference(first, second, bounds=ACCURACY)


def lines_of(table: pd.DataFrame) -> pd.DataFrame:
    """A line for each entry: accuracy, differences, how often an order changes a prediction, predicted labels."""
    entries = dict(list(table.groupby(ENTRY)))
    lines = []
    for key, entry in entries.items():
        name = dict(zip(ENTRY, key, strict=True))
        sets = entry.groupby("seed")
        by_set = (
            rows.pivot(index="doc_id", columns="order", values="prediction") for _, rows in sets
        )
        options = range(max(entry.prediction.max(), entry.target.max()) + 1)
        shares = entry.prediction.value_counts(normalize=True).reindex(options, fill_value=0)
        line: dict[str, Any] = {
            **name,
            "documents": entry.doc_id.nunique(),
            "sets": entry.seed.nunique(),
            "orders": entry.order.nunique(),
        }
        line |= interval("accuracy", estimate(scores_of(entry), bounds=ACCURACY))
        for difference_from, changes in OTHERS.items():
            other = tuple({**name, **changes}.values())
            if other != key and other in entries:
                line |= interval(difference_from, compared(entry, entries[other]))
        line |= interval("flips", order_sensitivity(by_set))
        line["one_label"] = entry.target.value_counts(normalize=True).max()
        line["predicted"] = " ".join(f"{share:.2f}" for share in shares)
        lines.append(line)
    return pd.DataFrame(lines)


def of_the_same(table: pd.DataFrame, varied: list[str]) -> pd.DataFrame:
    """Only the documents, sets of demonstrations and orders that all points of a curve have."""
    same = ["task", "rule", "doc_id", "seed", "order"]
    points = table.groupby("task")[varied].apply(lambda of_task: len(of_task.drop_duplicates()))
    there = table.drop_duplicates([*same, *varied]).groupby(same).size()
    table = table.join(there.rename("there"), on=same)
    return table[table.there == table.task.map(points)]


def selections(test: pd.DataFrame, dev: pd.DataFrame) -> pd.DataFrame:
    """How much choosing T and eta gains over T=1, if they are chosen on the dev set, as one must, or on the test set,
    as one must not. They are chosen for each set of demonstrations; the mean has a 95% interval over sets."""
    same = ["task", "rule", "seed", "arguments"]
    scores = test.groupby(same).acc.mean().rename("test").reset_index()
    both = scores.merge(dev.rename(columns={"accuracy": "dev"}), on=same)
    both = both.join(settings(both)).sort_values(["T", "eta"], kind="stable")  # few passes first
    rows = []
    for (task, rule), of_task in both.groupby(["task", "rule"]):
        sets = of_task.groupby("seed")
        plain = of_task[of_task["T"] == 1].groupby("seed").test.first()
        chosen = of_task.loc[sets.dev.idxmax()].set_index("seed").test
        best = sets.test.max()
        row = {
            "task": task,
            "rule": rule,
            "sets": len(sets),
            "settings": of_task.arguments.nunique(),
            "plain": plain.mean(),
            "chosen": chosen.mean(),
            "best": best.mean(),
        }
        gains = {"chosen": chosen - plain, "best": best - plain, "selection": best - chosen}
        for name, gain in gains.items():
            half = t.ppf(0.975, len(sets) - 1) * gain.sem()
            row[f"gain_{name}"] = gain.mean()
            row[f"gain_{name}_low"] = gain.mean() - half
            row[f"gain_{name}_high"] = gain.mean() + half
        rows.append(row)
    return pd.DataFrame(rows)


def settings(entries: pd.DataFrame) -> pd.DataFrame:
    """T and eta of each entry."""
    return entries.arguments.str.extract(r"\bT=(?P<T>\d+).*\beta=(?P<eta>[\d.]+)").astype(float)


def draw_marks(
    axes: Axes, y: Any, values: pd.DataFrame, marker: str, colour: str, label: str = ""
) -> None:
    """Marks of the values in the first column, with intervals from the second to the third."""
    middle, low, high = 100 * values.to_numpy().T
    axes.hlines(y, low, high, color=colour, linewidth=1.4)
    axes.plot(middle, y, marker, color=colour, markersize=4, label=label)


def label_rows(axes: Axes, title: str, names: Sequence[str], label: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)


def draw_dots(lines: pd.DataFrame, value: str, label: str, path: Path) -> None:
    """A panel for each task with a row for each method, a mark with its 95% interval for each decision rule."""
    lines = lines.dropna(subset=[value])
    names = lines[lines.rule == "none"].groupby("method")[value].mean().sort_values().index
    tasks = [task for task in TITLES if task in set(lines.task)]
    figure = Figure(figsize=(7.6, 0.34 * len(names) + 1.0), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    columns = [value, f"{value}_low", f"{value}_high"]
    for axes, task in zip(panels, tasks, strict=True):
        of_task = lines[lines.task == task]
        for number, (rule, (colour, marker, _)) in enumerate(RULES.items()):
            some = of_task[of_task.rule == rule]
            y = names.get_indexer(some.method) + 0.22 * (1 - number)
            draw_marks(axes, y, some[columns], marker, colour)
        if value == "accuracy":
            one_label = 100 * of_task.one_label.iloc[0]
            axes.axvline(one_label, color=GREY, linestyle=(0, (4, 2)), linewidth=1)
        label_rows(axes, TITLES[task], names, label)
    marks = [
        axes.plot([], [], marker, color=colour, label=name)[0]
        for colour, marker, name in RULES.values()
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks))
    figure.savefig(path, metadata=METADATA["svg"])  # on white, since text is dark


def draw_curves(lines: pd.DataFrame, x: str, by: str, label: str, path: Path) -> None:
    """Accuracy against `x`, whose values stand at equal distances, a line for each value of `by`, a row of panels for
    each of two decision rules. The points are written beside the figure."""
    columns = [*ENTRY, "documents", "sets", "orders", "accuracy", "accuracy_low", "accuracy_high"]
    lines.to_csv(path.with_suffix(".csv"), columns=columns, index=False, float_format="%.4f")
    tasks = [task for task in TITLES if task in set(lines.task)]
    width = 3.8 * len(tasks) if len(tasks) > 1 else 5.2
    figure = Figure(figsize=(width, 4.8), layout="constrained")
    panels = figure.subplots(2, len(tasks), squeeze=False, sharex=True, sharey="col")
    values = sorted(set(lines[x]))
    for row, rule in zip(panels, ("none", "batch"), strict=True):
        for axes, task in zip(row, tasks, strict=True):
            of_panel = lines[(lines.task == task) & (lines.rule == rule)].sort_values(x)
            curves = of_panel.groupby(by, sort=False)
            for (name, curve), colour in zip(curves, COLOURS, strict=False):
                at = curve[x].map(values.index)
                axes.plot(at, 100 * curve.accuracy, "o-", color=colour, markersize=3.5, label=name)
                low = 100 * curve.accuracy_low
                high = 100 * curve.accuracy_high
                axes.fill_between(at, low, high, color=colour, alpha=0.08, linewidth=0)
            axes.grid()
            axes.set_title(f"{TITLES[task]}, {RULES[rule][2]}", loc="left", fontweight="bold")
            axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        row[0].set_ylabel("accuracy, %")
    for axes in panels[-1]:
        axes.set_xlabel(label)
    handles, labels = panels[0][0].get_legend_handles_labels()
    ncols = 5 if max(map(len, labels)) < 12 else 2 * len(tasks)
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols)
    figure.savefig(path, metadata=METADATA["svg"])


def draw_trained(rows: pd.DataFrame, path: Path) -> None:
    """A panel for each column, with a row for each method: accuracy before and after training."""
    titles = {
        "": "26 unseen tasks, raw",
        "8 shots": "TREC, 8, batch",
        "32 shots": "TREC, 32, batch",
    }
    rows = rows.fillna({"conditions": "", "arguments": ""})
    rows = rows[(rows.column == "average") | (rows.decide == "batch")]
    names = (rows.method + " " + rows.arguments.str.removeprefix("positions=")).str.strip()
    trained = rows.checkpoint.str.endswith("(trained)")
    rows = rows.assign(name=names, trained=trained, panel=rows.conditions.map(titles))
    order = ["prefixicl", "invicl sequential", "invicl symmetric", "pcw", "icl"]
    figure = Figure(figsize=(7.6, 0.4 * len(order) + 1.1), layout="constrained")
    panels = figure.subplots(1, len(titles), sharey=True)
    for axes, title in zip(panels, titles.values(), strict=True):
        for trained, some in rows[rows.panel == title].groupby("trained"):
            y = some.name.map(order.index) + (-0.14 if trained else 0.14)
            colour = COLOURS[0] if trained else GREY
            values = some[["value", "low", "high"]]
            label = "trained" if trained else "before"
            draw_marks(axes, y, values, "o" if trained else "D", colour, label)
        label_rows(axes, title, order, "accuracy, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    figure.savefig(path, metadata=METADATA["svg"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", type=Path, help="the studies' folders")
    studies = parser.parse_args().studies
    if studies:
        table = pd.concat([packed(studies), read_answers()])
        # Of an entry that is there twice, the one with more documents is kept.
        table = table.sort_values("prediction", key=lambda digits: -digits.str.len(), kind="stable")
        table = table.drop_duplicates(SET).sort_values(SET, kind="stable")
        table.to_csv(ANSWERS, index=False)
        dev = pd.concat([on_dev(studies), pd.read_csv(DEV)])
        dev.drop_duplicates(dev.columns[:-1]).to_csv(DEV, index=False)
    table = unpacked(read_answers())
    lines = lines_of(table)
    lines.to_csv(FOLDER / "findings.csv", index=False, float_format="%.4f")
    plain = table[~table.chat]
    of_methods = lines[~lines.chat & (lines.shots == lines.task.map(SHOTS))]
    of_methods = of_methods[of_methods.limit == of_methods.groupby("task").limit.transform("max")]
    of_methods = of_methods[(of_methods.method != "deepthink") | (of_methods.arguments == STANDARD)]
    few = plain[plain.limit == FEWER]
    thinking = few[few.method == "deepthink"]
    thinking = thinking[thinking.groupby(["task", "shots"]).arguments.transform("nunique") > 9]
    is_point = few.method.isin(["icl", "pcw", "invicl", "structured"]) | (few.arguments == STANDARD)
    shots = few[is_point & few.task.isin(TITLES)]
    shots = shots[shots.groupby("task").shots.transform("nunique") > 2]
    gains = selections(thinking, pd.read_csv(DEV))
    gains.to_csv(FOLDER / "selection.csv", index=False, float_format="%.4f")
    thoughts = lines_of(of_the_same(thinking, ["arguments"]))
    thoughts = thoughts.join(settings(thoughts))
    has_momentum = thoughts.arguments.str.contains("momentum")
    thoughts["curve"] = "eta=" + thoughts.eta.map("{:g}".format)
    thoughts["curve"] += has_momentum.map({True: ", momentum=0.9", False: ""})
    points = lines_of(of_the_same(shots, ["shots", "method"]))
    grid = {"grid.color": INK, "grid.alpha": 0.13, "grid.linewidth": 0.6}
    with styled(**{"text.color": INK, **grid}):
        draw_dots(of_methods, "accuracy", "accuracy, %", FOLDER / "methods.svg")
        draw_dots(of_methods, "flips", "predictions changed, %", FOLDER / "orders.svg")
        passes = "T, passes over the demonstrations"
        draw_curves(thoughts, "T", "curve", passes, FOLDER / "thinking.svg")
        draw_trained(pd.read_csv(FOLDER / "trained.csv"), FOLDER / "trained.svg")
        draw_curves(points, "shots", "method", "demonstrations", FOLDER / "shots.svg")
    print(lines.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
