"""Results for tests: files as lm-eval writes them, runs as they are read, and boards of made-up numbers.

All of them are random, but seeded, and consistent with each other.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lm_eval_icl.results.board import AVERAGE, Board, BoardCell, Column, Entry, PromptSet, TaskRun
from lm_eval_icl.results.records import Answers, LeftOutFile, Run, TaskResult
from lm_eval_icl.results.statistics import Difference, Estimate

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
        for filter_, predicted in {"none": given, **{rule: of["says"] for rule, of in (rules or {}).items()}}.items():
            scores = [float(a == b) for a, b in zip(wanted, predicted, strict=True)]
            of_tasks[name] |= {f"acc,{filter_}": fmean(scores), f"acc_stderr,{filter_}": 0.05}
            lines += [
                {
                    "doc_id": first + i,
                    "doc": {"text": f"{name} document {first + i}"},
                    "target": str(wanted[i]),
                    "arguments": {
                        f"gen_args_{j}": {"arg_0": f"{before}Text: document {first + i}\nLabel:", "arg_1": f" {label}"}
                        for j, label in enumerate(("good", "bad"))
                    },
                    "filter": filter_,
                    "resps": [[["-1.0", "False"]], [["-2.0", "False"]]],
                    "filtered_resps": [["-1.0" if option == predicted[i] else "-2.0", "False"] for option in range(2)],
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
        "config": {"model": model, "model_args": {"pretrained": "org/model"}, "fewshot_seed": seed, "limit": None},
        "date": 1790000000.0 + number,
    }  # fmt: skip
    if rules:
        of_rules = {rule: {key: facts[key] for key in facts if key != "says"} for rule, facts in rules.items()}
        results["config"]["icl"] = {"decided": dict.fromkeys(tasks, of_rules)}
    results = json.loads(json.dumps(results))  # tasks share nothing
    for path, value in (put or {}).items():
        *outer, last = path.split(".")
        inside = results
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = value
    (folder / f"results_{stamp}.json").write_text(json.dumps(results))
    return folder / f"results_{stamp}.json"


def samples_of(results: Path, task: str) -> Path:
    """The file of the samples of a task beside a results file."""
    return results.with_name(results.name.replace("results_", f"samples_{task}_") + "l")


def write_samples(results: Path, task: str, samples: Iterable[Any]) -> None:
    samples_of(results, task).write_text("".join(json.dumps(sample) + "\n" for sample in samples))


# ---------------------------------------------------------------------------------------------------------------
# Runs.

N = 40
DEFAULTS = {"deepthink": {"T": 5, "eta": 0.01}, "icl": {}, "invicl": {}}
RIGHT = {"icl": 0.55, "deepthink": 0.6, "invicl": 0.65, "hf": 0.55}


def digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def bits(*key, right=0.5, n=N):
    return (np.random.default_rng(zlib.crc32(repr(key).encode())).random(n) < right).astype(float)


def make_result(task, model, seed, order, *, shots=4, scores=None, samples=True, seed_of_prompts=None, **changes):
    """What a run gave on a task, with scores drawn at random unless they are given."""
    items = np.asarray(bits(model, task, seed, order, right=RIGHT.get(model, 0.5)) if scores is None else scores, float)
    given = {"template": digest(task), "version": "1.0", "drawn": None, **changes}
    documents = given.pop("of_documents", digest("documents", task, len(items)))
    asked = seed if seed_of_prompts is None else seed_of_prompts
    answers = Answers(
        doc_ids=np.arange(len(items)),
        documents=documents,
        prompts=digest(task, documents, given["template"], given["drawn"], shots, *((asked, order) if shots else ())),
        demonstrations=digest(task, shots, given["drawn"], asked) if shots else None,
        items=items,
        predictions=np.nan_to_num(items[:, 0] if items.ndim == 2 else items).astype(int),
        chance=0.5,
    )
    defaults = {"metric": "acc", "filter": "none", "higher_is_better": True, "aggregation": "mean"}
    defaults |= {"value": float(items.mean()), "stderr": 0.05}
    return TaskResult(
        task=task, shots=shots, documents=len(items), answers=answers if samples else None, **defaults | given
    )


def make_run(model="icl", tasks=("a",), seed=0, order=0, arguments=None, icl=None, results=None, **changes):
    """A run: `tasks` are names, or results as `make_result` gives them; other arguments are of the run or the tasks."""
    of_run = {key: changes.pop(key) for key in list(changes) if key in {each.name for each in fields(Run)}}
    arguments = dict(arguments or {})
    if icl is None and model in DEFAULTS:
        resolved = {key: arguments.get(key, value) for key, value in DEFAULTS[model].items()}
        icl = {"version": "0.1", "method": model, "positions": "sequential", **resolved, "overflow": "error"}
    made = [
        task if isinstance(task, TaskResult) else make_result(task, model, seed, order, **changes) for task in tasks
    ]
    config = {"model": model, "model_args": {"pretrained": of_run.get("pretrained", "M"), **arguments}}
    name = digest(model, seed, order, arguments, icl, sorted(of_run.items(), key=str), [vars(one) for one in made])
    values = {
        "path": Path(f"/nowhere/results_{name}.json"),
        "digest": name,
        "pretrained": "M",
        "revision": "",
        "dtype": "float32",
        "date": 1000.0 + 10 * seed + order,
        "limit": None,
        "groups": {},
        "results": {"config": config, **(results or {})},
    }
    return Run(
        model=model,
        arguments=arguments,
        icl=icl or {},
        seed=seed,
        order=order,
        tasks={one.task: one for one in made},
        **values | of_run,
    )


# ---------------------------------------------------------------------------------------------------------------
# Boards.

# A method with its arguments and shots.
Kind = tuple[str, Mapping[str, Any] | str, int]
METHODS: tuple[Kind, ...] = (
    ("icl", {}, 8),
    ("hf", {}, 8),
    ("invicl", {}, 4),
    ("deepthink", {"T": 5, "eta": 0.01}, 8),
    ("batchicl", {"layer": 15}, 8),
)
CHECKPOINTS = ("meta-llama/Llama-2-7b-hf", "gpt2-large", "EleutherAI/pythia-1.4b")
TASKS = ("icl_sst2", "icl_sst5", "icl_mr", "icl_agnews", "icl_trec", "icl_perplexity")
NOTE = "the results' own mean is not that of its samples"


def estimate(mean: float, error: float, sets: int = 5, documents: int = 200, how: str = "crossed") -> Estimate:
    parts = (error / 2, error / 2) if sets > 1 else (None, None)
    return Estimate(mean, mean - 2 * error, mean + 2 * error, error, 6.4, documents, sets, *parts, how)


def difference(mean: float, error: float, sets: int = 5) -> Difference:
    p = math.erfc(abs(mean) / error / math.sqrt(2))
    better = sum(math.sin(7 * number) * error + mean > 0 for number in range(sets))
    return Difference(
        **vars(estimate(mean, error, sets)), p=p, detectable=3 * error, better=better, worse=sets - better,
        p_signs=2 / 2**sets if sets > 1 else None,
    )  # fmt: skip


def make(
    kinds: Sequence[Kind] = METHODS[:4],
    checkpoints: Sequence[str] = CHECKPOINTS,
    tasks: Sequence[str] = TASKS,
    seeds: int = 5,
    orders: int = 1,
    *,
    missing: float = 0,
    tokens: bool = True,
    odd: bool = False,
    note: str = NOTE,
) -> Board:
    """Every checkpoint under every method; the baseline is `icl` on the same checkpoint, with the same shots if it can.

    Args:
        missing: which share of the results is not there.
        odd: with all that a page may meet: a group of the first half of the tasks; the last task is a perplexity; the
            last entry has no result on the first task, the last but one no samples; ranks, pairs, marks.
        note: a mark of one cell.
    """
    random = np.random.default_rng(len(kinds) + 100 * len(checkpoints))
    of_tasks = {task: Column(task, "task", "acc", True, True, {task: 1.0}) for task in tasks}
    if odd:
        of_tasks[tasks[-1]] = Column(tasks[-1], "task", "word_perplexity", False, False, {tasks[-1]: 1.0})
    shares = [task for task, column in of_tasks.items() if column.percent]
    means = []
    if len(tasks) > 1:
        means.append(Column(AVERAGE, "average", "acc", True, True, dict.fromkeys(shares, 1 / len(shares))))
    if odd:
        half = tasks[: len(tasks) // 2]
        means.append(Column("first half", "group", "acc", True, True, dict.fromkeys(half, 1 / len(half))))

    def random_cell(mean: float, error: float, sets: tuple[PromptSet, ...] = ()) -> BoardCell:
        flips = estimate(random.uniform(0.02, 0.2), 0.01) if orders > 1 else None
        return BoardCell(estimate(mean, error, seeds), sets=sets, sensitivity=flips, corrected=mean - 0.2)

    entries = []
    for checkpoint in checkpoints:
        level = random.uniform(0.55, 0.75)
        for method, arguments, shots in kinds:
            of_method = arguments if isinstance(arguments, Mapping) else {}
            gain = random.normal(0, 0.03)
            values: dict[str, list[list[float]]] = {}
            for task in tasks:
                if random.uniform() >= missing:
                    of_task = random.normal(level + gain, 0.02, (seeds, orders))
                    values[task] = (of_task if task in shares else 30 - 20 * of_task).tolist()
            runs = [
                [_run(checkpoint, method, of_method, seed, order, shots, values) for order in range(orders)]
                for seed in range(seeds)
            ]
            cells: dict[str, BoardCell] = {}
            for task, of_seeds in values.items():
                sets = tuple(
                    PromptSet(f"seed {seed}", tuple(TaskRun(run, run.tasks[task]) for run in of), fmean(of_seeds[seed]))
                    for seed, of in enumerate(runs)
                )
                error = random.uniform(0.005, 0.02) * (1 if task in shares else 20)
                cells[task] = random_cell(fmean(map(fmean, of_seeds)), error, sets)
            for column in (column for column in means if column.weights.keys() <= values.keys()):
                cells[column.name] = random_cell(fmean(cells[task].estimate.mean for task in column.weights), 0.01)
            text = ", ".join(f"{key}={value}" for key, value in of_method.items()) or str(arguments or "")
            command = f"lm_eval --model {method} --model_args pretrained={checkpoint} --seed 0"
            spent = float(random.uniform(20, 60) * (shots + 1)) if tokens else None
            entries.append(Entry(
                f"{len(entries):04x}", checkpoint, "", method, text, f"{shots} shots",
                tuple(run for of in runs for run in of), cells, 10**8, spent, 1.0 + len(entries), command,
            ))  # fmt: skip
    baseline = {}
    bases = [entry for entry in entries if entry.method == "icl"]
    for at, entry in enumerate(entries):
        on_checkpoint = [base for base in bases if base.checkpoint == entry.checkpoint]
        for base in sorted(on_checkpoint, key=lambda base: base.conditions != entry.conditions)[:1]:
            baseline[entry.name] = base.name
            for name in (name for name in entry.cells if base is not entry and name in base.cells):
                cell, scale = entry.cells[name], 1 if name not in tasks or name in shares else 20
                of = difference(cell.estimate.mean - base.cells[name].estimate.mean, 0.008 * scale, seeds)
                cell = replace(cell, difference=of, p_holm=min(1, 3 * of.p))
                entries[at] = replace(entries[at], cells={**entries[at].cells, name: cell})
    columns = (*means, *of_tasks.values())
    first = columns[0].name
    entries.sort(key=lambda entry: -entry.cells[first].estimate.mean if first in entry.cells else 0)
    board = Board(columns, tuple(entries), baseline, {}, (), (), len(entries))
    return _odd(board, note) if odd else board


def _odd(board: Board, note: str) -> Board:
    names, entries, last = [column.name for column in board.columns], [], len(board.entries) - 1
    first_task = next(column.name for column in board.columns if column.kind == "task")
    baseline = {name: base for name, base in board.baseline.items() if name != base}
    for place, entry in enumerate(board.entries):
        cells = dict(entry.cells)
        for at, name in enumerate(names):
            cell = replace(cells[name], rank=(max(1, place), min(last + 1, place + 3)), tied_with_best=place < 2)
            if place == last - 1:
                reported = replace(cell.estimate, how="reported")
                cell = BoardCell(reported, corrected=cell.corrected, marks=("aggregate only",))
            marks = [*cell.marks, *["confirmed"] * (at == 2 and place == 0), *[note] * (at == 3 and place == 1)]
            cells[name] = replace(cell, marks=tuple(marks), left_out=3 * (place == 1))
        if place == last:
            del cells[first_task]
        entries.append(replace(entry, cells=cells, details="main, float16"))
    pairs = {
        (one.name, other.name): {
            column.name: difference(
                one.cells[column.name].estimate.mean - other.cells[column.name].estimate.mean,
                0.007 if column.percent else 0.2,
            )
            for column in board.columns
            if column.name in one.cells and column.name in other.cells
        }
        for i, one in enumerate(entries)
        for other in entries[i + 1 :]
        if one.cells[AVERAGE].rank and other.cells[AVERAGE].rank
    }
    best = f"{entries[0].label} on {entries[0].checkpoint}"
    summary = (f"{best} has the highest average.", f"It cannot be told apart from {entries[1].label}.")
    left_out = (
        LeftOutFile(Path("results/half/results_2026-11-20.json"), "It ends in the middle: the run was stopped."),
        LeftOutFile(Path("results/other/package.json"), "It is JSON, but no results of lm-eval."),
    )
    return Board(
        board.columns, tuple(entries), baseline, pairs, summary, left_out, sum(len(e.runs) for e in entries) + 2
    )


def _run(
    checkpoint: str, method: str, arguments: Mapping[str, Any], seed: int, order: int, shots: int,
    values: Mapping[str, Sequence[Sequence[float]]],
) -> Run:  # fmt: skip
    """A run; one with a T is of a study that chose it."""
    icl: dict[str, Any] = {"version": "0.1.0", "method": method, **arguments}
    if "T" in arguments:
        curve = [{"arguments": {"T": T}, "seed": s, "score": 0.5 + T / 100 + s / 10} for T in (1, 2, 4) for s in (0, 1)]
        icl["study"] = {"curve": curve, "arguments": {"T": 2 if seed % 2 else 4}, "chosen": ["T"]}
    path = f"/home/somebody/results/{checkpoint.replace('/', '__')}/results_2026-11-{seed + 10}T0{order}-15-36.75.json"
    tasks = {
        task: TaskResult(
            task, "acc", "none", of[seed][order], 0.01, True, "mean", shots, 200, "1.0", "t", "stratified", None
        )
        for task, of in values.items()
    }
    return Run(
        Path(path), f"{checkpoint} {method} {seed} {order}", method, checkpoint, "main", "float16", {}, icl, seed,
        order, 1_794_000_000.0 + 86_400 * seed, None, tasks, {},
        {"lm_eval_version": "0.4.13", "transformers_version": "5.23.0"},
    )  # fmt: skip
