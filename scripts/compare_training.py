"""Train one base model under each method, on the same episodes, and compare what comes out.

    python scripts/compare_training.py --base CHECKPOINT --output DIR [--seeds N] [--steps N] [--methods M,...]

This is the comparison of InvICL's section 5.2 (Table 2, Figure 4, and the sensitivity of Table 7) at a size for one CPU
core. The tasks are made from the words of `make_demo_model.py`, whose models have a vocabulary of these words only. A
task has two to four topics, each with a label word. Training has 200 tasks. Of the tasks to test, half have *seen*
topics, with label words that no training task has together with any of them; half have *unseen* topics, which no
training task has.

Each method is trained with several seeds. With one seed, all methods get the same episodes in the same order. Measured
are the accuracy with 1 to 64 demonstrations, and with 8, as in training, the order sensitivity: how often the predicted
label differs between two random orders of the same demonstrations.

The folder gets `results.json` (all numbers), `table.md`, `accuracy.svg`, and each run's checkpoint, log and numbers in
`runs`. What is there already is not done again, so a run that was stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from make_demo_model import SHORT, TEMPLATES, TOPICS, UNSEEN_TOPICS, DemoTask, Episodes, Shape, allowed, make_text
from matplotlib.figure import Figure
from scipy.stats import t as student_t
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.checkpoints import load_model
from lm_eval_icl.methods.predictor import Predictor
from lm_eval_icl.results.statistics import order_sensitivity
from lm_eval_icl.smoke import demo
from lm_eval_icl.training.episodes import FileTask, read_file
from lm_eval_icl.training.train import Settings, train
from lm_eval_icl.training.trainer import quiet, read_log

METHODS = ("icl", "nope", "prefixicl", "pcw", "saicl", "invicl")
DOMAINS = ("seen", "unseen")
TRAINED_WITH = 8
SHOTS = (1, 2, 4, 8, 16, 32, 64)
ORDERS = 4  # of the same demonstrations, for the order sensitivity
TRAINING_TASKS, TRAINING_ROWS = 200, 40
TEST_TASKS, QUERIES = 16, 8  # of seen topics, and as many of unseen ones; queries of each task
FOREIGN_WORDS = 2  # of a task's other topics, among which a text's words are drawn: they make the tasks harder

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------
# Tasks.


def share_a_pairing(one: DemoTask, other: DemoTask) -> bool:
    """Whether the tasks have a topic in common, and a word of their labels too, paired with the topic or not."""
    return bool(set(one.labels) & set(other.labels) and _label_words(one) & _label_words(other))


def _label_words(task: DemoTask) -> set[str]:
    return {word for label in task.labels.values() for word in label.split()}


def draw_task(episodes: Episodes, name: str, topics: Iterable[str]) -> DemoTask:
    """A task of two to four of these topics, with labels and a template drawn as when the base model was made.

    No topic is with a label word of the demonstration tasks that have it: those tasks stay as unseen as they were.
    """
    rng, pool = episodes.rng, list(topics)
    chosen = rng.sample(pool, rng.randint(2, 4))
    shape = Shape(len(chosen), TRAINED_WITH, SHORT)
    labels = episodes.draw_labels(shape)
    while not all(allowed(topic, label) for topic in chosen for label in labels):
        labels = episodes.draw_labels(shape)
    return DemoTask(name, rng.choice(TEMPLATES), dict(zip(chosen, labels, strict=True)), SHORT)


def draw_tasks(seed: int) -> tuple[list[DemoTask], dict[str, list[DemoTask]]]:
    """The tasks to train on; and those to test on, by domain."""
    episodes = Episodes(seed, set())
    topics = {"seen": TOPICS, "unseen": UNSEEN_TOPICS}
    tests = {
        domain: [draw_task(episodes, f"{domain}-{i:02}", topics[domain]) for i in range(TEST_TASKS)]
        for domain in DOMAINS
    }
    training: list[DemoTask] = []
    while len(training) < TRAINING_TASKS:
        task = draw_task(episodes, f"train-{len(training):03}", TOPICS)
        if not any(share_a_pairing(task, test) for test in tests["seen"]):
            training.append(task)
    return training, tests


def draw_rows(task: DemoTask, rng: random.Random, count: int, withheld: set[str]) -> list[Row]:
    """Rows as `read_file` takes them, their labels drawn at random. Their texts are added to those withheld."""
    words = TOPICS | UNSEEN_TOPICS
    rows: list[Row] = []
    while len(rows) < count:
        topic = rng.choice(list(task.labels))
        others = [word for other in task.labels if other != topic for word in words[other]]
        text = make_text(rng, words[topic] + rng.sample(others, FOREIGN_WORDS), task.length)
        if text not in withheld:
            withheld.add(text)
            before, after = task.template
            labels = list(task.labels.values())
            prompt = f"{before}: {text}\n{after}:"
            rows.append({"task": task.name, "input": prompt, "output": task.labels[topic], "options": labels})
    return rows


@dataclass(frozen=True)
class Test:
    """Demonstrations of a test task, in the order drawn, and the queries that they are shown to.

    The first n demonstrations are those of prompts with n.
    """

    domain: str
    demonstrations: tuple[Row, ...]
    queries: tuple[Row, ...]


def draw_tests(tasks: Mapping[str, Sequence[DemoTask]], seed: int, withheld: set[str]) -> list[Test]:
    """What every checkpoint is tested on."""
    found = []
    for domain, some in tasks.items():
        for task in some:
            rng = random.Random(f"{seed} {task.name}")
            rows = draw_rows(task, rng, max(SHOTS) + QUERIES, withheld)
            found.append(Test(domain, tuple(rows[QUERIES:]), tuple(rows[:QUERIES])))
    return found


def write_rows(path: Path, tasks: Sequence[DemoTask], seed: int, withheld: set[str]) -> list[FileTask]:
    """Write the rows to train on, without a text that is withheld, and read them as `lm-eval-icl train` does."""
    with path.open("w", encoding="utf-8") as file:
        for task in tasks:
            rng = random.Random(f"{seed} {task.name}")
            for row in draw_rows(task, rng, TRAINING_ROWS, set(withheld)):
                file.write(json.dumps(row) + "\n")
    return read_file(path)


# ---------------------------------------------------------------------------------------------------------------
# Measuring.


def predict(predictor: Predictor, demonstrations: Sequence[Row], queries: Sequence[Row]) -> list[str]:
    """The likeliest option of each query."""
    shown = [f"{row['input']} {row['output']}\n\n" for row in demonstrations]
    options: list[str] = queries[0]["options"]
    scores = predictor.score(shown, [row["input"] for row in queries], [f" {option}" for option in options])
    return [max(zip(found, options, strict=True))[1] for found in scores]


def measure(predictor: Predictor, tests: Sequence[Test]) -> dict[str, Any]:
    """{"accuracy": {domain: {shots: share}}, "flip_rate": {domain: share}}."""
    right: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    flips: dict[str, list[float]] = defaultdict(list)
    for number, test in enumerate(tests):
        answers = [row["output"] for row in test.queries]
        predicted = {n: predict(predictor, test.demonstrations[:n], test.queries) for n in SHOTS}
        for n, found in predicted.items():
            right[test.domain][n] += [one == other for one, other in zip(found, answers, strict=True)]
        rng, shown = random.Random(f"orders {number}"), test.demonstrations[:TRAINED_WITH]
        orders = [rng.sample(shown, len(shown)) for _ in range(ORDERS - 1)]
        others = [predict(predictor, order, test.queries) for order in orders]
        of_test = order_sensitivity([np.array([predicted[TRAINED_WITH], *others]).T])
        assert of_test is not None
        flips[test.domain].append(of_test.mean)
        predictor.forget()
    return {
        "accuracy": {domain: {str(n): statistics.mean(of) for n, of in each.items()} for domain, each in right.items()},
        "flip_rate": {domain: statistics.mean(each) for domain, each in flips.items()},
    }


def load(checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, without a progress bar of their own."""
    with quiet():
        return load_model({"pretrained": str(checkpoint)})


def run(
    base: Path, name: str, tasks: Sequence[FileTask], tests: Sequence[Test], folder: Path, settings: Settings | None
) -> dict[str, Any]:
    """Train and measure, and write the measurements to the folder; or read them there.

    Args:
        settings: None to measure the base model as it is.
    """
    done = folder / "measured.json"
    if not done.is_file():
        method, checkpoint = methods.make(name), base
        if settings is not None:
            checkpoint = folder / "checkpoint"
            if not (checkpoint / "loss.png").is_file():  # what training writes last
                model, tokenizer = load(base)
                # No `fits`: prompts of eight such rows have some hundreds of tokens and fit under every method.
                train(model, tokenizer, method, tasks, checkpoint, settings, source=str(base), resume=True, cpu=True)
                shutil.rmtree(checkpoint / "checkpoints", ignore_errors=True)
        measured = measure(Predictor(*load(checkpoint), method), tests)
        if settings is not None:
            losses = [entry["loss"] for entry in read_log(checkpoint / "log.jsonl") if "loss" in entry]
            # Of the last fifth of the steps. Episodes are drawn anew, so it is close to the loss on rows held out.
            measured["final_loss"] = statistics.mean(losses[-max(1, len(losses) // 5) :])
        folder.mkdir(parents=True, exist_ok=True)
        part = done.with_suffix(".part")
        part.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        part.replace(done)  # so that a file of this name is whole
    found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------------------------------------------------------
# What is shown.


Measured = Mapping[str, Any]
Runs = Mapping[str, Sequence[Measured]]  # by method, in the order of the seeds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and how far the 95% interval of the mean reaches on both sides (Student's t); NaN of one value."""
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return mean, float("nan")
    return mean, float(student_t.ppf(0.975, n - 1)) * statistics.stdev(values) / n**0.5


def cell(values: Sequence[float], sign: str = "") -> str:
    """A mean with its interval, in percent."""
    mean, reach = interval([100 * value for value in values])
    return f"{mean:{sign}.1f} ± {reach:.1f}" if len(values) > 1 else f"{mean:{sign}.1f}"


def accuracies(runs: Sequence[Measured], domain: str, shots: int = TRAINED_WITH) -> list[float]:
    return [each["accuracy"][domain][str(shots)] for each in runs]


def differences(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(some, others, strict=True)]


def table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table in Markdown, a method a row."""
    lines = [heads, ["---"] * len(heads), *([f"`{name}`", *row] for name, row in rows.items())]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def tables(untrained: Mapping[str, Measured], runs: Runs) -> str:
    """The tables in Markdown: accuracy and order sensitivity as trained, other lengths, InvICL against each method."""
    heads = ["method"]
    for domain in DOMAINS:
        heads += [f"{domain} topics, untrained", "trained", "order sensitivity"]
    rows: dict[str, list[str]] = {name: [] for name in runs}
    for name, domain in itertools.product(runs, DOMAINS):
        rows[name].append(cell(accuracies([untrained[name]], domain)))
        rows[name].append(cell(accuracies(runs[name], domain)))
        rows[name].append(cell([run["flip_rate"][domain] for run in runs[name]]))
    parts = [table(heads, rows)]
    for domain in DOMAINS:
        rows = {name: [cell(accuracies(of, domain, n)) for n in SHOTS] for name, of in runs.items()}
        parts.append(table([f"{domain} topics", *map(str, SHOTS)], rows))
    if "invicl" in runs:
        cells = [(domain, n) for domain in DOMAINS for n in SHOTS if n in (TRAINED_WITH, max(SHOTS))]
        rows = {
            name: [cell(differences(accuracies(runs["invicl"], *of), accuracies(runs[name], *of)), "+") for of in cells]
            for name in runs
            if name != "invicl"
        }
        parts.append(table(["`invicl` less", *(f"{domain}, {n}" for domain, n in cells)], rows))
    return "\n".join(parts)


def draw_figure(runs: Runs, chance: Mapping[str, float], path: Path) -> None:
    """Accuracy against the number of demonstrations, with 95% intervals over seeds."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, len(DOMAINS), sharey=True)
    for panel, domain in zip(panels, DOMAINS, strict=True):
        for i, (name, of) in enumerate(runs.items()):
            means, reaches = zip(*(interval(accuracies(of, domain, n)) for n in SHOTS), strict=True)
            low, high = (differences(means, [sign * reach for reach in reaches]) for sign in (1, -1))
            panel.plot(SHOTS, means, "o-", color=f"C{i}", markersize=3.5, label=name, zorder=3)
            panel.fill_between(SHOTS, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
        panel.axhline(chance[domain], color="0.5", linewidth=0.8, linestyle="--", label="chance")
        panel.axvline(TRAINED_WITH, color="0.5", linewidth=0.8, linestyle=":", label="as in training")
        panel.set_xscale("log", base=2)
        panel.set_xticks(SHOTS, [str(n) for n in SHOTS])
        panel.set(title=f"{domain} topics", xlabel="demonstrations", ylim=(0, 1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, metadata={"Date": None})


# ---------------------------------------------------------------------------------------------------------------
# The command.


def compare(base: Path, output: Path, names: Sequence[str], seeds: Sequence[int], settings: Settings) -> dict[str, Any]:
    """All runs, and the files that show them.

    Args:
        settings: of the training; each run has a seed of its own.

    Raises:
        InputError: training fails, or the folder has runs with other settings.
    """
    output.mkdir(parents=True, exist_ok=True)
    _claim(output / "settings.json", base, settings)
    training, testing = draw_tasks(seed=0)
    withheld: set[str] = set()
    tests = draw_tests(testing, 0, withheld)
    tasks = write_rows(output / "training.jsonl", training, 0, withheld)
    base_runs: dict[str, Measured] = {}
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    with tqdm(total=len(names) * (1 + len(seeds)), unit="run", smoothing=0) as bar:
        for name in names:
            bar.set_postfix_str(f"{name}, untrained")
            base_runs[name] = run(base, name, tasks, tests, output / "runs" / f"{name}-untrained", None)
            bar.update()
        for seed in seeds:  # the outer loop: a run that is stopped has whole seeds
            for name in names:
                bar.set_postfix_str(f"{name}, seed {seed}")
                folder = output / "runs" / f"{name}-{seed}"
                runs[name].append(run(base, name, tasks, tests, folder, replace(settings, seed=seed)))
                bar.update()
    results = {"seeds": list(seeds), "untrained": base_runs, "trained": runs}
    chance = {domain: statistics.mean(1 / len(task.labels) for task in testing[domain]) for domain in DOMAINS}
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (output / "table.md").write_text(tables(base_runs, runs), encoding="utf-8")
    draw_figure(runs, chance, output / "accuracy.svg")
    return results


def _claim(path: Path, base: Path, settings: Settings) -> None:
    """Write what all runs of a folder have in common, or refuse the folder if its runs have something else."""
    weights = base / "model.safetensors"
    if not weights.is_file():
        raise InputError(f"--base {base}: there is no {weights.name} in it: give the folder of a checkpoint.")
    common = {"weights": sha256(weights.read_bytes()).hexdigest(), **settings.identity}
    del common["seed"]
    there = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else common
    if differing := [name for name in common if there.get(name) != common[name]]:
        raise InputError(f"--output {path.parent}: holds runs with other {', '.join(differing)}: give another folder.")
    path.write_text(json.dumps(common, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=demo.model_path(), help="checkpoint (default: the shipped one)")
    parser.add_argument("--output", type=Path, default=Path("results/compare-training"), help="(default: %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="(default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=5e-4, help="(default: %(default)s)")
    parser.add_argument("--loss", default="query", choices=("query", "all"), help="(default: %(default)s)")
    options = parser.parse_args()
    try:
        settings = Settings(
            num_fewshot=TRAINED_WITH,
            steps=options.steps,
            learning_rate=options.learning_rate,
            loss=options.loss,
            eval_steps=0,
            eval_documents=0,
        )
        seeds = [int(seed) for seed in options.seeds.split(",")]
        compare(options.base, options.output, options.methods.split(","), seeds, settings)
    except InputError as error:
        sys.exit(f"compare_training.py: {error}")
    print((options.output / "table.md").read_text(encoding="utf-8"))
    print(f"All numbers: {options.output / 'results.json'}; as a picture: {options.output / 'accuracy.svg'}")


if __name__ == "__main__":
    main()
