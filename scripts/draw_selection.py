"""Draw docs/reports/selection.svg: which documents of a pool each method of `lm-eval-icl select` picks.

    python scripts/draw_selection.py MODEL DATA [--task icl_trec] [--pool 1000] [--seed 0] [--output FILE.svg]

The documents lie where two principal components of the model's features put them. DATA is a folder in which the task's
dataset lies under its name on the Hub (docs/tasks.md), or any folder if the Hub can be reached. The same model, data
and matplotlib give the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from random import Random

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_icl.demonstrations.draw import stratified
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.select import SELECTORS, select
from lm_eval_icl.harness.pools import PoolOfTask
from lm_eval_icl.harness.training import tasks_of
from lm_eval_icl.inference.scoring import query_states
from lm_eval_icl.methods import ICL, Predictor

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"svg.hashsalt": "lm-eval-icl", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#882255", "#999933", "#117733", "#332288")
COLUMNS, SHOTS = 4, 8


def read(model: str, pool: PoolOfTask, rows: list[int]) -> Pool:
    """What a selector sees of the documents: one pass over them, without demonstrations."""
    predictor = Predictor(AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model), ICL())
    prompts, options, labels = zip(*map(pool.query, rows), strict=True)
    with query_states(predictor.runner.model) as states:
        scores = predictor.score((), [prompt.query for prompt in prompts], options, prefix=prompts[0].prefix)
    queries = [
        tuple(predictor.tokenizer.pair(prompt, each[0])[0].query) for prompt, each in zip(prompts, options, strict=True)
    ]
    logs = np.array([[value for value, _ in of_query] for of_query in scores])
    probabilities = np.exp(logs - logs.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    return Pool(np.array(labels), np.stack([states[query].numpy() for query in queries]), probabilities)


def components(features: np.ndarray) -> tuple[np.ndarray, float]:
    """(N, 2) where the documents lie, and which share of the variance that shows."""
    centred = features.astype(np.float64) - features.mean(0, dtype=np.float64)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    # Of a direction and its opposite, the one whose largest number is positive.
    first = directions[:2] * np.sign(directions[:2][[0, 1], np.abs(directions[:2]).argmax(1), None])
    return np.round(centred @ first.T, 3), float((sizes[:2] ** 2).sum() / (sizes**2).sum())


def panel(axes: Axes, places: np.ndarray, labels: np.ndarray, picked: list[int], title: str) -> None:
    axes.plot(places[:, 0], places[:, 1], ".", color="#d9d9d9", markersize=3, rasterized=True)
    colours = [COLOURS[label % len(COLOURS)] for label in labels[picked]]
    axes.scatter(places[picked, 0], places[picked, 1], s=38, c=colours, edgecolors="black", linewidths=0.7, zorder=3)
    axes.set_title(title, fontsize=10)
    axes.set(xticks=[], yticks=[])


def draw(pool: Pool, names: list[str], seed: int, about: str) -> Figure:
    """A panel for each method, and the labels' colours."""
    places, share = components(pool.vectors())
    drawn = stratified(range(len(places)), SHOTS, lambda row: pool.labels[row], Random(seed))
    picks = {"stratified": drawn, **{how: list(select(how, pool, SHOTS, seed)) for how in SELECTORS}}
    lines = -(-(len(picks) + 1) // COLUMNS)
    figure = Figure(figsize=(2.4 * COLUMNS, 2.2 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, COLUMNS).ravel()
    for axes, (how, picked) in zip(panels, picks.items(), strict=False):
        panel(axes, places, pool.labels, picked, how)
    for axes in panels[len(picks) :]:
        axes.axis("off")
    for label, name in enumerate(names):
        panels[len(picks)].scatter([], [], s=38, c=COLOURS[label % len(COLOURS)], edgecolors="black", label=name)
    panels[len(picks)].legend(loc="center", frameon=False, fontsize=9)
    figure.suptitle(f"{about}; two principal components ({share:.0%} of the variance)", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or name of a checkpoint")
    parser.add_argument("data", type=Path, help="folder with the dataset")
    parser.add_argument("--task", default="icl_trec", help="(default: %(default)s)")
    parser.add_argument("--pool", type=int, default=1000, help="documents to choose from (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/reports/selection.svg", help="a picture")
    options = parser.parse_args()
    output, name = options.output.resolve(), Path(options.model).name
    model = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
    os.chdir(options.data)
    of_task = PoolOfTask(tasks_of([options.task], None, {})[0])
    # The documents that the command draws with this seed, without those that are there twice.
    everything = range(len(of_task.docs))
    drawn = sorted(Random(f"pool {options.seed}").sample(everything, min(options.pool, len(everything))))
    first: dict[str, int] = {}
    for row in drawn:
        first.setdefault(str(of_task.query(row)[0]), row)
    rows = list(first.values())
    pool = read(model, of_task, rows)
    labels = [option.strip() for option in of_task.query(rows[0])[1]]
    with style.context(["default", SETTINGS]):
        figure = draw(pool, labels, options.seed, f"{len(rows)} documents of {options.task}, features of {name}")
        metadata = {"Title": output.stem, "Date": None, "Creator": None}
        figure.savefig(output, format="svg", dpi=100, metadata=metadata)
    print(output)


if __name__ == "__main__":
    main()
