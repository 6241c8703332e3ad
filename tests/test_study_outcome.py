"""What comes out of a study: order sensitivity, the table, the CSV file and the figures."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import statistics
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import bootstrap

from lm_eval_icl.errors import InputError
from lm_eval_icl.studies import figures
from lm_eval_icl.studies.outcome import Cell, Line, Summary, flip_rate, order_sensitivity, summarize, table, write_csv
from lm_eval_icl.studies.row import Row

GROUP = ("group",)


def row(score: float = 0.5, **changes: Any) -> Row:
    """A row of the test split."""
    plain = Row("model", "icl", {}, "a", GROUP, 4, "stratified", 0, 0, "test", True, 10, score, (), 1.0)
    return replace(plain, **changes)


def study(
    T: range = range(1, 4), tasks: str = "ab", seeds: int = 2, orders: int = 2, shots: tuple[int, ...] = (4,)
) -> list[Row]:
    """A study of icl and deepthink, for which T is chosen: 1 for task a, 2 for b, and so on."""
    rng, rows = random.Random(0), []
    for number, task in enumerate(tasks, 1):
        methods: list[tuple[str, dict[str, Any]]] = [("icl", {}), *(("deepthink", {"T": t, "eta": 0.1}) for t in T)]
        for (method, arguments), n, seed, order, split in itertools.product(
            methods, shots, range(seeds), range(orders), ("test", "dev")
        ):
            some = {"method": method, "arguments": arguments, "num_fewshot": n, "seed": seed, "order": order}
            chosen = arguments.get("T", number) == number
            predictions = tuple(rng.choices(range(3), k=10))
            rows.append(row(rng.random(), **some, task=task, split=split, chosen=chosen, predictions=predictions))
    return rows


def lines(summary: Summary) -> dict[str, Line]:
    return {line.variant.label: line for line in summary.lines}


# ---------------------------------------------------------------------------------------------------------------
# Order sensitivity.


def test_flip_rate_is_the_share_of_pairs_that_differ() -> None:
    rng = random.Random(0)
    for orders, documents in ((2, 1), (2, 7), (3, 5), (5, 9)):
        predictions = [[rng.choice("abc") for _ in range(documents)] for _ in range(orders)]
        pairs = itertools.combinations(range(orders), 2)
        differ = [predictions[i][d] != predictions[j][d] for i, j in pairs for d in range(documents)]
        assert flip_rate(predictions) == pytest.approx(statistics.mean(differ))
    assert flip_rate(["ab", "ab", "ab"]) == 0
    assert flip_rate(["ab", "ba"]) == 1


def test_order_sensitivity_is_the_mean_over_sets_of_demonstrations() -> None:
    """Seed 0: one of four documents flips. Seed 1: for two documents, two of three pairs of orders differ."""
    predictions = {0: [(0, 1, 1, 1), (1, 1, 1, 1), None], 1: [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    rows = [
        row(seed=seed, order=order, predictions=found)
        for seed, orders in predictions.items()
        for order, found in enumerate(orders)
        if found
    ]
    found = order_sensitivity(rows)
    assert found is not None
    assert found[0] == pytest.approx((1 / 4 + 2 / 4 * 2 / 3) / 2)
    # What differs in anything but the order is no other order of the same demonstrations.
    for changes in ({"seed": 2}, {"num_fewshot": 8}, {"task": "b"}, {"method": "nope"}, {"arguments": {"T": 1}}):
        assert order_sensitivity([rows[0], replace(rows[1], **changes)]) is None
    assert order_sensitivity([row(order=0), row(order=1)]) is None, "tasks without options have no predictions"
    assert order_sensitivity([]) is None


def test_order_sensitivity_has_the_interval_of_scipy() -> None:
    """Two tasks, three seeds each: documents are drawn within each task, together for all seeds."""
    rng, rows, by_task = random.Random(1), [], []
    for task, documents in (("a", 60), ("b", 25)):
        differs = np.zeros(documents)
        for seed in range(3):
            one, other = (tuple(rng.choices(range(2), (3, 1), k=documents)) for _ in range(2))
            rows += [row(task=task, seed=seed, order=i, predictions=found) for i, found in enumerate((one, other))]
            differs += np.array(one) != np.array(other)
        by_task.append(differs / 3)
    found = order_sensitivity(rows)
    expected = bootstrap(
        by_task,
        lambda a, b, axis: (a.mean(axis) + b.mean(axis)) / 2,
        method="percentile",
        n_resamples=10_000,
        random_state=np.random.default_rng(3),
    ).confidence_interval
    assert found == pytest.approx((np.mean([each.mean() for each in by_task]), *expected), abs=0.005)
    assert found[1] < found[0] - 0.02 < found[0] + 0.02 < found[2]
    assert order_sensitivity(rows) == found, "the seed is fixed"


def test_one_document_has_no_interval() -> None:
    mean, low, high = order_sensitivity([row(order=i, predictions=(i,)) for i in range(2)]) or (0, 0, 0)
    assert mean == 1 and np.isnan([low, high]).all()


# ---------------------------------------------------------------------------------------------------------------
# The table's numbers.


def test_trainings_with_columns_of_their_own_share_a_line() -> None:
    """A task that is a target of both counts in each column with the training that the column is of."""
    rows = [
        row(score, training=name, task=task, groups=(f"of {name}",), documents=n)
        for name, of in (("one", (0.1, 0.2)), ("two", (0.5, 0.8)))
        for task, score, n in zip("ab", of, (10, 30), strict=True)
    ]
    columns = {"first": ["of one", "of two"]}
    expected = [{"training": "one", "values": {"of one": 0.7}}, {"values": {"average, first": 0.9, "of two": 0.6}}]
    summary = summarize(rows, expected, columns, alike={"of two"})
    assert summary.columns == ("of one", "of two", "average, first")
    (line,) = summary.lines
    found = {name: (round(cell.mean, 6), cell.paper) for name, cell in line.cells.items() if cell}
    assert found == {"of one": (0.175, 0.7), "of two": (0.65, 0.6), "average, first": (0.4125, 0.9)}


def test_trainings_of_one_column_have_lines_of_their_own() -> None:
    rows = [row(score, training=name) for name, score in (("one", 0.1), ("two", 0.5))]
    found = {line.variant.label: line.cells["a"] for line in summarize(rows, [], {"": ["a"]}).lines}
    assert {label: cell.mean for label, cell in found.items() if cell} == {
        "icl trained: one": 0.1,
        "icl trained: two": 0.5,
    }
    predictions = [row(training=name, order=i, predictions=(i,)) for i, name in enumerate(("one", "two"))]
    assert order_sensitivity(predictions) is None, "another model is no other order"


def test_means_and_spreads() -> None:
    """Task a: seeds 0.3 (orders 0.2 and 0.4) and 0.7; task b, with thrice the documents: 0.6 and 0.6."""
    rows = [row(0.2), row(0.4, order=1), row(0.6, seed=1), row(0.8, seed=1, order=1)]
    rows += [row(0.6, task="b", seed=seed, documents=30) for seed in range(2)]
    rows += [row(0.9, split="dev"), row(0.9, chosen=False, arguments={"T": 1}, method="deepthink")]
    summary = summarize(rows, [], {"": ["a", "b", "group"]})
    assert summary.columns == ("a", "b", "group", "average")
    (line,) = summary.lines
    found = {name: (cell.mean, cell.spread) for name, cell in line.cells.items() if cell}
    assert found["a"] == pytest.approx((0.5, 0.4 / 2**0.5))
    assert found["b"] == pytest.approx((0.6, 0))
    group = (0.3 + 3 * 0.6) / 4, (0.7 + 3 * 0.6) / 4
    assert found["group"] == pytest.approx((statistics.mean(group), statistics.stdev(group)))
    averages = (0.3 + 0.6 + group[0]) / 3, (0.7 + 0.6 + group[1]) / 3
    assert found["average"] == pytest.approx((statistics.mean(averages), statistics.stdev(averages)))
    assert line.num_fewshot == 4 and line.demonstrations == "stratified"


def test_one_column_has_no_average_and_one_seed_no_spread() -> None:
    summary = summarize([row(0.25)], [], {"": ["a"]})
    assert summary.columns == ("a",)
    assert summary.lines[0].cells == {"a": Cell(0.25, None, None)}


def test_a_group_without_all_its_tasks_has_no_number() -> None:
    rows = [row(0.2), row(0.4, task="b"), row(0.6, method="nope")]
    summary = lines(summarize(rows, [], {"": ["a", "b", "group", "unknown"]}))
    assert {name for name, cell in summary["icl"].cells.items() if cell} == {"a", "b", "group"}
    assert {name for name, cell in summary["nope"].cells.items() if cell} == {"a"}


def test_arguments_that_were_chosen_are_one_line() -> None:
    rows = study()
    summary = lines(summarize(rows, [], {"": ["a", "b"]}))
    assert list(summary) == ["icl", "deepthink eta=0.1 (T chosen on dev)"]
    for T, task in ((1, "a"), (2, "b")):
        own = [r.score for r in rows if r.task == task and r.arguments.get("T") == T and r.split == "test"]
        cell = summary["deepthink eta=0.1 (T chosen on dev)"].cells[task]
        assert cell is not None and cell.mean == pytest.approx(statistics.mean(own)) and len(own) == 4
    # The same from the rows that were chosen and dev alone: a study may leave out the test rows of the others.
    assert lines(summarize([r for r in rows if r.chosen or r.split == "dev"], [], {"": ["a", "b"]})) == summary


def test_arguments_of_which_nothing_is_chosen_are_lines_of_their_own() -> None:
    rows = [replace(r, chosen=True) for r in study()]
    found = lines(summarize(rows, [], {"": ["a", "b"]}))
    assert list(found) == ["icl", *(f"deepthink T={T}, eta=0.1" for T in (1, 2, 3))]


def test_what_is_not_chosen_stays_apart() -> None:
    """T is chosen for each momentum, and the seed for icl; the other entry of deepthink has nothing to be chosen."""
    rows = [row(method="deepthink", arguments={"eta": 1.0}), row(method="deepthink", arguments={"eta": 1.0}, task="b")]
    for task, momentum, T in itertools.product("ab", (0.0, 0.9), (1, 2, 3)):
        chosen = T == {("a", 0.0): 1, ("b", 0.0): 2, ("a", 0.9): 3, ("b", 0.9): 1}[task, momentum]
        rows.append(row(method="deepthink", arguments={"T": T, "momentum": momentum}, task=task, chosen=chosen))
    rows += [row(seed=s, task=t, chosen=s == {"a": 0, "b": 2}[t], score=s / 10) for t in "ab" for s in range(3)]
    found = lines(summarize(rows, [], {"": ["a", "b"]}))
    expected = {"deepthink eta=1.0", "icl (seed chosen on dev)"}
    assert set(found) == expected | {f"deepthink momentum={m} (T chosen on dev)" for m in (0.0, 0.9)}
    # Tasks have different seeds, so there is no mean of one seed.
    assert found["icl (seed chosen on dev)"].cells["average"] == Cell(pytest.approx(0.1), None, None)


def test_two_values_of_one_argument_are_never_averaged() -> None:
    """One entry of the study gives T=3, and for another T is chosen."""
    rows = [row(T / 10, method="deepthink", arguments={"T": T}, chosen=T > 1) for T in (1, 2, 3)]
    found = lines(summarize(rows, [], {"": ["a"]}))
    assert {name: line.cells["a"] for name, line in found.items()} == {
        f"deepthink T={T}": Cell(T / 10, None, None) for T in (2, 3)
    }


def test_shots_are_lines_unless_each_task_has_its_own() -> None:
    rows = [row(num_fewshot=4), row(num_fewshot=8, task="b")]
    (line,) = summarize(rows, [], {"": ["a", "b"]}).lines
    assert line.num_fewshot is None and all(line.cells.values())
    found = summarize([*rows, row(num_fewshot=16)], [], {"": ["a", "b"]}).lines
    assert [line.num_fewshot for line in found] == [4, 8, 16]
    found = summarize([row(), row(demonstrations="random")], [], {"": ["a"]}).lines
    assert [line.demonstrations for line in found] == ["stratified", "random"]


def test_the_papers_numbers() -> None:
    values = {"a": 0.1, "average": 0.3}

    def paper(entry: dict[str, Any], label: str = "icl") -> dict[str, float | None]:
        line = lines(summarize(study(), [{"values": values, **entry}], {"": ["a", "b"]}))[label]
        return {name: cell.paper for name, cell in line.cells.items() if cell}

    there, none = {"a": 0.1, "b": None, "average": 0.3}, {"a": None, "b": None, "average": None}
    deepthink = "deepthink eta=0.1 (T chosen on dev)"
    for entry in ({}, {"model": "model"}, {"method": "icl"}, {"num_fewshot": 4}, {"chosen": False}):
        assert paper(entry) == there, entry
    others: list[dict[str, Any]] = [{"model": "x"}, {"method": "hf"}, {"num_fewshot": 8}, {"chosen": True}]
    for entry in (*others, {"arguments": {"T": 1}}, {"demonstrations": "random"}):
        assert paper(entry) == none, entry
    assert paper({"method": "deepthink", "chosen": True, "arguments": {"eta": 0.1}}, deepthink) == there
    assert paper({"arguments": {"T": 1}}, deepthink) == {"a": 0.1, "b": None, "average": None}, "of b, T is 2"
    assert paper({"chosen": False}, deepthink) == none


def test_of_two_entries_the_first_counts() -> None:
    entries = [{"method": "hf", "values": {"a": 0.1}}, {"values": {"b": 0.2}}, {"values": {"a": 0.3, "b": 0.4}}]
    (line,) = summarize([row(), row(task="b")], entries, {"": ["a", "b"]}).lines
    assert [cell.paper for cell in line.cells.values() if cell] == [0.3, 0.2, None]


# ---------------------------------------------------------------------------------------------------------------
# The table as it is printed.


def printed(summary: Summary, title: str = "Title") -> str:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table(summary, title))
    return captured.get()


def test_five_tasks_fit_eighty_columns() -> None:
    columns = ["icl_sst2", "icl_sst5", "icl_trec", "icl_mr", "icl_agnews"]
    rows = [replace(r, task=columns["abcde".index(r.task)]) for r in study(T=range(1, 6), tasks="abcde", seeds=3)]
    summary = summarize(rows, [{"method": "icl", "values": {"icl_sst2": 0.596}}], {"": columns})
    text = printed(summary)
    assert max(map(len, text.splitlines())) <= 80
    for line in summary.lines:
        for cell in line.cells.values():  # no number is broken
            assert cell is not None and cell.spread is not None
            spread = f"{100 * cell.spread:.1f}" if cell.spread < 0.0995 else f"{100 * cell.spread:.0f}"
            assert f"{100 * cell.mean:.1f}±{spread}" in text.split()
        assert line.sensitivity is not None
        assert "-".join(f"{100 * value:.1f}" for value in line.sensitivity[1:]) in text.split()
    assert text.count("(59.6)") == 1 and text.count("icl_sst2") == 1 and "flips" in text
    assert "(T chosen on" in text


def test_many_columns_are_printed_in_parts() -> None:
    rows = [row(0.123 + i / 100, task=f"task_number_{i}") for i in range(12)]
    text = printed(summarize(rows, [], {"": [f"task_number_{i}" for i in range(12)]}))
    assert max(map(len, text.splitlines())) <= 80
    numbers = [f"{12.3 + i:.1f}" for i in range(12)]
    assert [word for word in text.split() if word in numbers] == numbers
    assert text.count("icl") == 2, "a line in each of two parts"


def test_names_are_no_markup_and_cannot_command_a_terminal() -> None:
    rows = [row(model="[red]m[/red]", task="[b]", method="[i]", arguments={"x": "[/]\x1b[31m"})]
    text = printed(summarize(rows, [], {"": ["[b]"]}), title="[bold]title[/bold]\x1b]0;x\x07")
    for name in ("[red]m[/red]", "[b]", "[i]", "x=[/]", "[bold]title[/bold]"):
        assert name in text
    assert "\x1b" not in text and "\x07" not in text


def test_a_metric_that_is_no_share_is_not_in_percent() -> None:
    rows = [row(12.345), row(0.5, method="nope"), row(15.3, seed=1)]
    text = printed(summarize(rows, [], {"": ["a"]}))
    assert {"13.8", "±2.09", "0.5"} <= set(text.split()) and "percent" not in text


def test_a_summary_without_lines_can_be_printed() -> None:
    assert "Title" in printed(summarize([], [], {"": ["a", "b"]}))


# ---------------------------------------------------------------------------------------------------------------
# The CSV file.


def test_csv_has_every_row(tmp_path: Path) -> None:
    rows = [*study(), row(1 / 3, task='a "b", c\nd', arguments={"x": "é,"}, groups=("g", "h"))]
    path = tmp_path / "rows.csv"
    path.write_text("old")
    write_csv(rows, path)
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert list(tmp_path.iterdir()) == [path]
    assert set(found[0]) == {field.name for field in fields(Row)} - {"predictions"}
    assert len(found) == len(rows)
    for line, one in zip(found, rows, strict=True):
        assert json.loads(line["arguments"]) == one.arguments
        assert json.loads(line["groups"]) == list(one.groups)
        assert float(line["score"]) == one.score
        assert (line["task"], line["seed"], line["chosen"]) == (one.task, str(one.seed), str(one.chosen))


def test_several_processes_write_the_csv_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before, others = tmp_path / "rows.csv", Path.replace, iter([lambda: write_csv([row()], path)])

    def replace(part: Path, to: Path) -> Path:
        for other in others:  # at this moment another process does the same
            other()
        return before(part, to)

    monkeypatch.setattr(Path, "replace", replace)
    write_csv([row()], path)
    assert len(path.read_text().splitlines()) == 2 and list(tmp_path.iterdir()) == [path]


def test_csv_leaves_the_old_file_if_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("old")

    def rows() -> Any:
        yield row()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_csv(rows(), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match=r"missing/rows\.csv: cannot be written"):
        write_csv([row()], tmp_path / "missing" / "rows.csv")


# ---------------------------------------------------------------------------------------------------------------
# Figures.

ALL = ["accuracy-by-T", "accuracy-by-shots", "seeds", "orders", "order-sensitivity"]


def texts(path: Path) -> list[str]:
    """The texts of an SVG file."""
    return [part.text or "" for part in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_figures_are_files_that_stay_the_same(tmp_path: Path) -> None:
    rows = study(shots=(4, 8))
    (tmp_path / "again").mkdir()
    paths = figures.draw(rows, tmp_path, "acc")
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in ALL for kind in ("svg", "png")]
    for path, other in zip(paths, figures.draw(rows, tmp_path / "again", "acc"), strict=True):
        assert path.read_bytes() == other.read_bytes()
    assert {"test", "dev", "chosen on dev", "T", "accuracy"} <= set(texts(tmp_path / "accuracy-by-T.svg"))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"T": range(1, 2), "tasks": "a"}, "accuracy-by-T"),
        ({}, "accuracy-by-shots"),
        ({"seeds": 1}, "seeds"),
        ({"orders": 1}, "orders"),
        ({"orders": 1}, "order-sensitivity"),
    ],
)
def test_a_figure_of_one_value_is_not_drawn(changes: dict[str, Any], missing: str, tmp_path: Path) -> None:
    drawn = {path.stem for path in figures.draw(study(**{"shots": (4,), **changes}), tmp_path, "acc")}
    assert missing not in drawn and drawn


def test_only_the_named_figures_are_drawn(tmp_path: Path) -> None:
    paths = figures.draw(study(), tmp_path, "f1", ["sensitivity", "T", "shots"])
    assert {path.stem for path in paths} == {"order-sensitivity", "f1-by-T"}
    assert figures.draw(study(), tmp_path, "acc", []) == []
    with pytest.raises(InputError, match="no figure 'shot'"):
        figures.draw(study(), tmp_path, "acc", ["shot"])
    with pytest.raises(InputError, match="cannot be written"):
        figures.draw(study(), tmp_path / "missing", "acc", ["T"])


def test_the_curve_is_of_the_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn for T is the mean over seeds and orders; what is drawn for seeds, the mean over orders."""
    seen: list[Any] = []
    monkeypatch.setattr(figures, "_figure", lambda drawing: seen.append(drawing))
    monkeypatch.setattr(figures, "_save", lambda *_: [])
    rows = study()
    figures.draw(rows, tmp_path, "acc", ["T", "seeds", "orders"])
    by_T, seeds, orders = (drawing.panels["model", "b"] for drawing in seen)

    def mean(**wanted: Any) -> float:
        found = [r for r in rows if r.task == "b" and all(getattr(r, name) == v for name, v in wanted.items())]
        return statistics.mean(r.score for r in found)

    for split in ("test", "dev"):
        expected = [(T, mean(split=split, arguments={"T": T, "eta": 0.1}), T == 2) for T in (1, 2, 3)]
        for found, one in zip(by_T["deepthink eta=0.1"][split], expected, strict=True):
            assert found == pytest.approx(one)
    assert seeds["icl"] == pytest.approx([mean(split="test", method="icl", seed=seed) for seed in (0, 1)])
    expected = [
        mean(split="test", method="icl", seed=s, order=o) - mean(split="test", method="icl", seed=s)
        for s in (0, 1)
        for o in (0, 1)
    ]
    assert orders["icl"] == pytest.approx(expected)


def test_what_is_too_much_for_a_figure_is_counted(tmp_path: Path) -> None:
    rows = [replace(r, chosen=True) for r in study(T=range(1, 15), tasks="abcdefghijklmn", orders=1)]
    figures.draw(rows, tmp_path, "acc", ["seeds"])
    found = texts(tmp_path / "seeds.svg")
    assert "2 of 14 panels and 5 of 15 methods and arguments are left out" in found
    assert found.count("model") == 12


def test_names_in_figures_are_no_mathematics(tmp_path: Path) -> None:
    rows = [replace(r, model="m$a_b$", task=f"<{r.task}> &") for r in study()]
    figures.draw(rows, tmp_path, "acc", ["seeds"])
    assert {"m$a_b$", "<a> &", "<b> &"} <= set(texts(tmp_path / "seeds.svg"))
