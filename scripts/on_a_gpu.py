"""All checks that need a GPU, in one command that writes one file.

    python scripts/on_a_gpu.py [--output FILE.md] [--model llama-2-7b] [--documents 100] [--workloads NAME ...]

The file is in Markdown: the machine with its versions and the commit; the tests that are marked `gpu`; `icl` beside
lm-eval's `hf` in float32 and bfloat16; whether order-invariant methods give the same bits in any order; how a run goes
on after it was out of memory; and the benchmark's tables beside `hf`. Models have random weights. A part whose
requirements are missing (nearly all parts on a CPU) is skipped, and the file says why. The exit code is 1 if a part
fails. `--parts 0 1` runs the first two parts alone.

    python scripts/on_a_gpu.py --parts regression --minutes 480 --runs runs/linear

InvICL's synthetic regression at the paper's size needs a GPU for hours. This part runs for `--minutes`, and goes on
where the last such run was stopped. It is left out unless it is named.

The tables need the datasets, from the Hub or as folders of the same names below the working directory. `hf` runs with
flash attention if that is installed, at several batch sizes, and ours with packs of several sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
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
from benchmarks import growth, retrieval, tasks
from benchmarks.measuring import machine, run
from benchmarks.workloads import (
    CONFIGS,
    METHODS,
    WORKLOADS,
    random_model,
    synthetic,
    train_tokenizer,
)
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from regression.configuration import CONFIGURATIONS, configured
from rich.console import Console

from lm_eval_icl import version
from lm_eval_icl.errors import one_line
from lm_eval_icl.prompts.prompt import FewShotPrompt

ROOT = Path(__file__).resolve().parents[1]
_REGRESSION = ("icl", "invicl")  # the methods of the part Regression
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Skipped(Exception):
    """A part cannot be run here; the message says why."""


class Bench:
    """The model, its tokenizer and requests: documents with four options after the same eight demonstrations."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.requests = options, synthetic(documents=options.documents)
        self.tokenizer = train_tokenizer(self.requests, CONFIGS[options.model].vocab_size)

    def model(self, dtype: torch.dtype) -> Any:
        return random_model(self.options.model, DEVICE, dtype)

    def lm(self, name: str, model: Any, **arguments: Any) -> Any:
        """A method, or `hf`, on a model that is loaded."""
        make: Any = HFLM if name == "hf" else METHODS[name]
        return make(
            model, tokenizer=self.tokenizer, device=DEVICE, **{"batch_size": 8, **arguments}
        )


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
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfEs",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "tests",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "SKIPPED"))
    ]
    lines = [
        "`pytest -m gpu`: " + done.stdout.strip().rpartition("\n")[2].strip("= "),
        "",
        *(f"- {x}" for x in lines),
    ]
    if done.returncode:
        raise RuntimeError("\n".join([*lines, *done.stdout.splitlines()[-40:]]))
    return lines


def beside_hf(bench: Bench) -> list[str]:
    """`icl` compared with `hf`, and each of them compared with `hf` in float32."""
    by_name: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = bench.model(dtype)
        by_name |= {
            f"{name}, {dtype}": scores(bench.lm(name, model), bench.requests)
            for name in ("hf", "icl")
        }
        del model
    exact, icl_exact, hf, icl = by_name.values()
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
    requests, rows = bench.requests[: 4 * (16 if ON_GPU else 2)], []
    invariant = [name for name in METHODS if METHODS[name].method_class().invariant]
    for dtype in (torch.float32, torch.bfloat16):
        model = bench.model(dtype)
        for name in invariant:
            found = []
            for canonical in (True, False):
                lm = bench.lm(name, model, canonical_order=canonical)
                in_order = [[shuffled(each, n) for each in requests] for n in (0, 0, 1, 2, 3)]
                found.append(torch.stack([scores(lm, each) for each in in_order]))
            same = [torch.equal(found[0][:n], found[0][:1].expand_as(found[0][:n])) for n in (2, 5)]
            apart = float((found[1] - found[1][:1]).abs().max())
            answers = ["yes" if equal else "**no**" for equal in same]
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
    lm, lines = bench.lm("icl", model, pack_tokens=2**16, batch_size=4096), io.StringIO()
    torch.cuda.empty_cache()
    taken, whole = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    handler = logging.StreamHandler(lines)
    logging.getLogger("lm_eval.icl").addHandler(handler)
    # The room is for a pack of some hundred tokens, but not for a pack of all documents.
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (taken + bench.options.room * 2**20) / whole)
    )
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
    return [
        *(f"- {line}" for line in said),
        "",
        f"Largest difference {apart}, same best option {same}.",
    ]


def benchmark(bench: Bench) -> list[str]:
    """The time, compared with that of `hf`."""
    if not (ON_GPU or bench.options.workloads):
        raise Skipped(
            "on a CPU `python scripts/benchmark.py tasks` prints the table, or --workloads says of what"
        )
    workloads = bench.options.workloads or ["mmlu", "leaderboard_bbh", "icl_classification", "bbh"]
    return table_of(
        tasks.compare,
        bench,
        workloads=workloads,
        methods=["icl", "deepthink"],
        batch_sizes=[8, 16] if ON_GPU else [8],  # hf's logits of 32 long rows do not fit 80 GB
        pack_tokens=[1024, 8192] if ON_GPU else [1024],
        tasks=2,
        repetitions=2 if ON_GPU else 1,
        max_gen_toks=32,
    )


def texts(bench: Bench) -> list[str]:
    """Texts of 48 tokens after 1,000 tokens of demonstrations, compared with `hf`."""
    if not ON_GPU:
        raise Skipped("on a CPU `python scripts/benchmark.py generation` prints the table")
    return table_of(
        growth.generation, bench, methods=["icl"], texts=[16, 64], repetitions=1, max_gen_toks=48
    )


def retrieved(bench: Bench) -> list[str]:
    """Demonstrations that are retrieved for each of 1,000 documents (100 where documents share nothing), with a GPT-2
    of 124 million parameters in float32."""
    if not ON_GPU:
        raise Skipped("on a CPU `python scripts/benchmark.py retrieval` prints the tables")
    return table_of(
        retrieval.compare, bench, model="gpt2", documents=1000, batch_sizes=[8], store_bytes=2**31
    )


def regression(bench: Bench) -> list[str]:
    """InvICL's synthetic regression (Figure 3): how far the trainings are. Each method has an equal share of the
    minutes, and goes on from its last checkpoint. The error is that of the last 50 steps, on functions of the
    curriculum's present dimensions; predicting 0 has as many as there are dimensions."""
    options = bench.options
    configuration = configured(options.regression)
    if not ON_GPU and options.regression == "linear":
        raise Skipped("there is no GPU here, and a CPU would need weeks (--regression tiny runs)")
    for name in _REGRESSION:
        command = [sys.executable, "-m", "scripts.regression", "train", "--seeds", "0"]
        command += ["--config", options.regression, "--methods", name, "--device", DEVICE]
        seconds = 60 * options.minutes / len(_REGRESSION)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the next run goes on
            subprocess.run(
                [*command, "--output", str(options.runs.resolve())],
                cwd=ROOT,
                check=True,
                timeout=seconds,
            )
    rows = []
    for name in _REGRESSION:
        log = options.runs / f"{name}-0/log.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        last = json.loads(lines[-1]) if lines else {"step": 0}
        dimensions, points = configuration.stage(max(0, last["step"] - 1))
        done = f"{last['step']:,} of {configuration.steps:,}"
        error = f"{last['loss']:.3f}" if lines else "none yet"
        rows.append([f"`{name}`", done, str(dimensions), str(points), error])
    header = ["method", "steps", "dimensions", "points", "squared error"]
    evaluate = f"python -m scripts.regression evaluate --output {options.runs}"
    return [*markdown(header, rows), "", f"When all steps are done: `{evaluate}`."]


def table_of(compare: Callable[..., Any], bench: Bench, **options: Any) -> list[str]:
    """What a command of the benchmark prints."""
    console = Console(width=150, file=io.StringIO(), record=True)
    compare(argparse.Namespace(**{**vars(bench.options), "device": DEVICE, **options}), console)
    return ["```", *(line.rstrip() for line in console.export_text().splitlines()), "```"]


PARTS: dict[str, Callable[[Bench], list[str]]] = {
    "Tests": gpu_tests,
    "`icl` beside `hf`": beside_hf,
    "Any order": orders,
    "Out of memory": out_of_memory,
    "Retrieved demonstrations": retrieved,
    "Texts": texts,
    "Time": benchmark,
    "Regression": regression,
}


def about() -> str:
    """The machine, the versions and the commit."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [machine()]
    packages = ("torch", "transformers", "accelerate", "lm-eval")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    cuda = f", CUDA {torch.version.cuda}" if ON_GPU else ""
    commit = f"{version.VERSION}, commit {version.commit() or 'unknown'}"
    return f"{', '.join(names)}{cuda}; {versions}; lm-eval-icl {commit}; {datetime.date.today()}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report = ROOT / "docs/reports/gpu.md"
    parser.add_argument(
        "--output", type=Path, default=report, help="the file (default: docs/reports/gpu.md)"
    )
    parser.add_argument("--model", choices=CONFIGS, default="llama-2-7b" if ON_GPU else "toy")
    parser.add_argument(
        "--documents", type=int, default=100 if ON_GPU else 4, help="default: %(default)s"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        metavar="NAME",
        help="for the benchmark's table",
    )
    titles = [title.lower() for title in PARTS]
    parser.add_argument(
        "--parts",
        nargs="+",
        type=lambda text: int(text) if text.isdecimal() else titles.index(text.lower()),
        choices=range(len(PARTS)),
        default=range(len(PARTS) - 1),
        metavar="N",
        help="numbers or titles of parts (default: all but Regression)",
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="for the part Regression (default: %(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs/linear",
        help="the folder of its trainings (default: %(default)s)",
    )
    parser.add_argument(
        "--regression",
        choices=CONFIGURATIONS,
        default="linear",
        help="its configuration (default: %(default)s, the paper's)",
    )
    parser.add_argument(
        "--room", type=int, default=4096, help="MiB besides the weights, for the part Out of memory"
    )
    options = parser.parse_args()
    if options.documents < 1 or options.room < 1:
        parser.error("--documents and --room must be 1 or more")
    if not options.output.resolve().parent.is_dir():
        parser.error(f"--output {options.output}: there is no such folder")
    transformers.logging.set_verbosity_error()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    logging.getLogger("lm_eval.icl").setLevel(logging.WARNING)
    bench, failed = Bench(options), False
    lines = [
        "# On a GPU",
        "",
        f"Written by `scripts/on_a_gpu.py --model {options.model}`.",
        "",
        about(),
    ]
    for title, part in [list(PARTS.items())[n] for n in options.parts]:
        print(f"{title} ...", flush=True)
        try:
            found = part(bench)
        except Skipped as why:
            found = [f"Skipped: {why}."]
        except Exception as error:
            traceback.print_exc()
            failed, found = (
                True,
                [f"**Failed**: {one_line(error) if '|' not in str(error) else error}"],
            )
        with contextlib.suppress(RuntimeError):  # a GPU whose context is lost
            torch.cuda.empty_cache()
        print("\n".join(found), flush=True)
        lines += ["", f"## {title}", "", " ".join((part.__doc__ or "").split()), "", *found]
        options.output.write_text(
            "\n".join(lines) + "\n", encoding="utf-8"
        )  # also if a later part ends the process
    sys.exit(failed)


if __name__ == "__main__":
    main()
