"""Draws how far Deep-Thinking's memory moves: the norms of its keys and values after each iteration.

    python scripts/memory_norms.py --model openai-community/gpt2-large --to norms.svg

The authors' released code computes these norms. They are drawn for the demonstrations of SST-2, and for the etas and the momentum of the study `thinking`,
as multiples of the norms at T=1, where the memory is that of plain in-context learning. A norm is that of all keys (or
values) of a layer, and the line is the mean over layers. The numbers are printed as CSV.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.tasks import TaskManager
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lm_eval_icl.drawing.style import METADATA, styled
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.methods.deepthink import DeepThink
from lm_eval_icl.prompts.tokens import Context

SETTINGS = ((0.001, 0.0), (0.01, 0.0), (0.1, 0.0), (0.01, 0.9))  # eta, momentum
PARTS = ("keys", "values")


def context_of(tokenizer: Any) -> Context:
    """The demonstrations, as prompts have them with seed 0."""
    manager = TaskManager(include_defaults=False, include_path=str(task_dir()))
    task: Any = manager.load(["icl_sst2"])["tasks"]["icl_sst2"]
    task.set_fewshot_seed(0)
    with recording():
        prompt = task.fewshot_context(task.eval_docs[0], task.config.num_fewshot)
    text = prompt.prefix + "".join(prompt.demonstrations)
    return Context((), (tuple(tokenizer(text)["input_ids"]),))


@torch.no_grad()
def norms(model: Any, context: Context, eta: float, momentum: float) -> torch.Tensor:
    """[15, 2] the mean norm of a layer's keys and of its values, as multiples of those at T=1."""
    method = DeepThink(T=15, eta=eta, momentum=momentum)
    rows = []
    for [memory] in method.memories(model, [context]):
        keys = [layer_keys.float().norm() for layer_keys, _ in memory.layers]
        values = [layer_values.float().norm() for _, layer_values in memory.layers]
        rows.append(torch.stack([torch.stack(keys).mean(), torch.stack(values).mean()]))
    by_iteration = torch.stack(rows).cpu()
    return by_iteration / by_iteration[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="an SVG file")
    options = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model).eval()
    context = context_of(tokenizer)
    print("eta,momentum,T,keys,values")
    with styled():
        figure = Figure(figsize=(7.6, 3), layout="constrained")
        both = figure.subplots(1, 2, sharey=True)
        for eta, momentum in SETTINGS:
            table = norms(model, context, eta, momentum)
            iterations = range(1, len(table) + 1)
            for number, (keys, values) in zip(iterations, table.tolist(), strict=True):
                print(f"{eta},{momentum},{number},{keys:.6f},{values:.6f}")
            label = f"eta={eta}" + (f", momentum={momentum}" if momentum else "")
            for axes, part, line in zip(both, PARTS, table.T.tolist(), strict=True):
                axes.plot(iterations, line, marker="o", markersize=3, label=label)
                axes.set_title(part, loc="left")
                axes.set_xlabel("T")
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        both[0].set_ylabel("norm, as a multiple of T=1")
        both[1].legend(fontsize=8)
        figure.savefig(options.to, format="svg", metadata=METADATA["svg"])


if __name__ == "__main__":
    main()
