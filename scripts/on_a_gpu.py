"""For development: all checks that need a GPU, in one command that writes one file.

    python scripts/on_a_gpu.py [--output FILE.md] [--model llama-2-7b] [--documents 100]

The file is in Markdown: the machine with its versions and the commit; the tests that are marked `gpu`; `icl` beside
lm-eval's `hf` in float32 and bfloat16; whether order-invariant methods give the same bits in any order; and how a run
goes on after it was out of memory. Models have random weights. A part whose requirements are missing (on a CPU) is
skipped, and the file says why. The exit code is 1 if a part fails. `--parts 0 1` runs the first two parts alone.

Times on a GPU are those of scripts/benchmark.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

# Before anything imports tqdm: no bars between this script's own lines.
os.environ["TQDM_DISABLE"] = "1"

import torch
import transformers
from benchmarks.measuring import machine, run
from benchmarks.workloads import CONFIGS, METHODS, random_model, synthetic, train_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lm_eval_icl import version
from lm_eval_icl.prompts.prompt import FewShotPrompt

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Skipped(Exception):
    """A part cannot be run here; the message says why."""


class Bench:
    """The model, its tokenizer and requests: documents with four options after the same eight demonstrations."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.requests = synthetic(documents=options.documents)
        self.tokenizer = train_tokenizer(self.requests, CONFIGS[options.model].vocab_size)

    def model(self, dtype: torch.dtype) -> Any:
        return random_model(self.options.model, DEVICE, dtype)

    def lm(self, name: str, model: Any, **arguments: Any) -> Any:
        """A method, or `hf`, on a model that is loaded."""
        make: Any = HFLM if name == "hf" else METHODS[name]
        shared = {"tokenizer": self.tokenizer, "device": DEVICE, "batch_size": 8}
        return make(model, **shared | arguments)


def scores(lm: Any, requests: list[Instance]) -> torch.Tensor:
    """The log-probability of every option, [documents, options]."""
    [found] = run(lm, requests)
    return torch.tensor([logprob for logprob, _ in found], dtype=torch.float64).view(-1, 4)


def difference(found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """The largest difference of a log-probability, and the share of documents with the same best option."""
    same = (found.argmax(1) == expected.argmax(1)).double().mean()
    return [f"{float((found - expected).abs().max()):.2g}", f"{float(same):.1%}"]


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def gpu_tests(bench: Bench) -> list[str]:
    """The tests that are marked `gpu`."""
    if not ON_GPU:
        raise Skipped("there is no GPU here (torch.cuda.is_available() is False)")
    command = [sys.executable, *"-m pytest -q -rfEs -m gpu -p no:cacheprovider tests".split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = ["`pytest -m gpu`: " + done.stdout.strip().rpartition("\n")[2].strip("= "), ""]
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR", "SKIPPED")):
            lines.append(f"- {line}")
    if done.returncode:
        raise RuntimeError("\n".join([*lines, *done.stdout.splitlines()[-40:]]))
    return lines


def beside_hf(bench: Bench) -> list[str]:
    """`icl` compared with `hf`, and each of them compared with `hf` in float32."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = bench.model(dtype)
        for name in ("hf", "icl"):
            found.append(scores(bench.lm(name, model), bench.requests))
        del model
    exact, icl_exact, hf, icl = found
    rows = [
        ["float32", "icl and hf", *difference(icl_exact, exact)],
        ["bfloat16", "icl and hf", *difference(icl, hf)],
        ["bfloat16", "icl and hf in float32", *difference(icl, exact)],
        ["bfloat16", "hf and hf in float32", *difference(hf, exact)],
    ]
    return markdown(["dtype", "of", "largest difference", "same best option"], rows)


def orders(bench: Bench) -> list[str]:
    """Order-invariant methods with the demonstrations in four orders. By default they sort the demonstrations, and all
    bits should be the same. The first order is run twice: if that already differs, the device and not the order is the
    reason. Without sorting (`canonical_order=False`), only rounding may differ."""
    requests = bench.requests[: 4 * (16 if ON_GPU else 2)]
    rows = []
    invariant = [name for name in METHODS if METHODS[name].method_class().invariant]
    for dtype in (torch.float32, torch.bfloat16):
        model = bench.model(dtype)
        for name in invariant:
            found = []
            for canonical in (True, False):
                lm = bench.lm(name, model, canonical_order=canonical)
                in_orders = []
                for seed in (0, 0, 1, 2, 3):
                    in_order = [shuffled(request, seed) for request in requests]
                    in_orders.append(scores(lm, in_order))
                found.append(torch.stack(in_orders))
            is_other = (found[0] != found[0][0]).flatten(1).any(1)
            answers = ["**no**" if some.any() else "yes" for some in (is_other[:2], is_other)]
            apart = float((found[1] - found[1][0]).abs().max())
            rows.append([name, str(dtype).removeprefix("torch."), *answers, f"{apart:.2g}"])
        del model, lm
    header = [
        "method",
        "dtype",
        "the same bits: one order twice",
        "all orders",
        "largest difference, unsorted",
    ]
    table = markdown(header, rows)
    if any("no" in row[3] for row in rows):
        raise RuntimeError("\n".join(["not the same bits in every order", "", *table]))
    return table


def shuffled(instance: Instance, seed: int) -> Instance:
    """The request with its demonstrations in another order."""
    prompt, answer = instance.args
    shown = list(prompt.demonstrations)
    Random(seed).shuffle(shown)
    arguments = (FewShotPrompt(prompt.prefix, shown, prompt.query), answer)
    return Instance(instance.request_type, {}, arguments, instance.idx, metadata=instance.metadata)


def out_of_memory(bench: Bench) -> list[str]:
    """A run whose first passes do not fit the device's memory: it goes on with smaller passes, and the scores are the
    same."""
    if not ON_GPU:
        raise Skipped("there is no GPU here whose memory could be limited")
    model = bench.model(torch.float32)
    expected = scores(bench.lm("icl", model), bench.requests)
    lm = bench.lm("icl", model, pack_tokens=2**16, batch_size=4096)
    lines = io.StringIO()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + bench.options.room * 2**20
    handler = logging.StreamHandler(lines)
    logging.getLogger("lm_eval.icl").addHandler(handler)
    # The room is for a pack of some hundred tokens, but not for a pack of all documents.
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / whole))
    try:
        found = scores(lm, bench.requests)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        logging.getLogger("lm_eval.icl").removeHandler(handler)
    said = [line for line in lines.getvalue().splitlines() if "out of memory" in line]
    if not said:
        raise RuntimeError(
            f"{bench.options.room} MiB were enough for everything: lower --room, or raise --documents"
        )
    apart, same = difference(found, expected)
    items = [f"- {line}" for line in said]
    return [*items, "", f"Largest difference {apart}, same best option {same}."]


PARTS: dict[str, Callable[[Bench], list[str]]] = {
    "Tests": gpu_tests,
    "`icl` beside `hf`": beside_hf,
    "Any order": orders,
    "Out of memory": out_of_memory,
}


def about() -> str:
    """The machine, the versions and the commit."""
    packages = ("torch", "transformers", "accelerate", "lm-eval")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    cuda = f", CUDA {torch.version.cuda}" if ON_GPU else ""
    commit = f"{version.VERSION}, commit {version.commit() or 'unknown'}"
    return f"{machine()}{cuda}; {versions}; lm-eval-icl {commit}; {datetime.date.today()}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu.md"), help="default: gpu.md")
    parser.add_argument("--model", choices=CONFIGS, default="llama-2-7b" if ON_GPU else "toy")
    parser.add_argument(
        "--documents", type=int, default=100 if ON_GPU else 4, help="(default: %(default)s)"
    )
    numbers = range(len(PARTS))
    parser.add_argument(
        "--parts", nargs="+", type=int, choices=numbers, default=numbers, help="(default: all)"
    )
    parser.add_argument(
        "--room", type=int, default=4096, help="MiB besides the weights, for the part Out of memory"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    logging.getLogger("lm_eval.icl").setLevel(logging.WARNING)
    bench = Bench(options)
    failed = False
    lines = ["# On a GPU", "", f"`scripts/on_a_gpu.py --model {options.model}`: {about()}"]
    for title, part in [list(PARTS.items())[n] for n in options.parts]:
        print(f"{title} ...", flush=True)
        try:
            found = part(bench)
        except Skipped as why:
            found = [f"Skipped: {why}."]
        except Exception as error:
            traceback.print_exc()
            failed = True
            found = [f"**Failed**: {error}"]
        with contextlib.suppress(RuntimeError):  # a GPU whose context is lost
            torch.cuda.empty_cache()
        print("\n".join(found), flush=True)
        lines += ["", f"## {title}", "", " ".join((part.__doc__ or "").split()), "", *found]
        # Also if a later part ends the process.
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
