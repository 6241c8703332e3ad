"""For development: milliseconds and peak memory of one inference under each method, as in InvICL's Table 3 and section 5.2.

    python scripts/time_an_inference.py [--model openai-community/gpt2-large]

An inference is one forward pass over a whole prompt of 8 demonstrations and a query, with 512 tokens in all, in a batch
of one, as the paper's models run it. (`lm_eval` encodes demonstrations once for all queries, and needs less.) InvICL
doubles the demonstrations, so its row has nearly 1,024 tokens. A time is the median of 20 passes. The paper reports 14%
more memory for it (4.8 instead of 4.2 GB). Each line is measured in another process, on a GPU if there is one. On a
CPU, memory is the process's peak minus the memory that the process had before the model was loaded.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from benchmarks.measuring import now, peak
from transformers import AutoModelForCausalLM

from lm_eval_icl import methods
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from lm_eval_icl.training.rows import collate, make_row, target_losses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Table 3, in milliseconds.
PAPER = {"icl": 21.9, "pcw": 21.7, "prefixicl": 22.0, "invicl": 22.0}


def measure(model: str, method: str) -> tuple[int, float, float]:
    """How many tokens a row has, the median seconds of a pass, and the peak memory in bytes."""
    before = peak()
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = loaded.to(DEVICE).eval()
    demonstrations = tuple(tuple(range(100 + 56 * i, 156 + 56 * i)) for i in range(8))
    prompt = TokenizedPrompt(Context((), demonstrations), tuple(range(600, 664)))
    row = make_row(methods.make(method), prompt, (664,))
    batch = collate([row], loaded.dtype)
    for name, value in batch.items():
        if torch.is_tensor(value):
            batch[name] = value.to(DEVICE)
    seconds = []
    with torch.no_grad():
        for _ in range(23):  # the first three are not measured
            begun = now()
            target_losses(loaded, batch)
            seconds.append(now() - begun)
    return len(row.ids), median(seconds[3:]), peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="openai-community/gpt2-large", help="the name or folder of a checkpoint"
    )
    model = parser.parse_args().model
    print(f"{model}, float32, on {DEVICE}\n")
    print("| method | tokens of the row | ms | ms, the paper | peak GB |")
    print("| --- | --- | --- | --- | --- |")
    for method, paper in PAPER.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            measured = process.submit(measure, model, method).result()
        tokens, seconds, memory = measured
        numbers = f"{tokens:,} | {1000 * seconds:.1f} | {paper} | {memory / 1e9:.2f}"
        print(f"| {method} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
