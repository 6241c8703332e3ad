"""Time, tokens and memory of our models beside lm-eval's own `hf`, on the same requests in the same run.

    python scripts/benchmark.py tasks      # workloads: each model against hf
    python scripts/benchmark.py methods    # what a query costs in every method, relative to icl
    python scripts/benchmark.py outside    # processor time a document outside the model, by part
    python scripts/benchmark.py growth     # time against documents, demonstrations, options, tokens an option
    python scripts/benchmark.py generation # texts behind 1,000 tokens of demonstrations, beside hf
    python scripts/benchmark.py training   # a training step in every method, beside transformers' Trainer
    python scripts/benchmark.py shots      # encoding hundreds to thousands of demonstrations of SST-2
    python scripts/benchmark.py gpu        # tasks, for a GPU: a model of 8 billion parameters in bfloat16

Models have random weights, made here (a GPT-2 of 124 million parameters, or a Llama-type of about that size with
grouped-query attention); their tokenizer is trained here on the workload's own text. Contenders take turns within a
repetition, so that whatever else the machine does meets all alike; ratios are of one repetition, their spread is
printed. `tasks`, `outside`, `shots` and `gpu` need the datasets, from the Hub or as folders of the same names below the
working directory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import math
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import nn
from transformers import GPT2Config, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from lm_eval_icl.harness.models import ICLModel, model_class
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.methods import NAMES, Predictor, make
from lm_eval_icl.prompt import FewShotPrompt
from lm_eval_icl.training.episodes import Episode, FileTask, Pool, Row
from lm_eval_icl.training.episodes import draw as draw_episode
from lm_eval_icl.training.rows import RowMaker, collate
from lm_eval_icl.training.trainer import EpisodeRows, LayoutTrainer

POSITIONS = 4096
CONFIGS = {
    "gpt2": GPT2Config(n_positions=POSITIONS),
    "llama": LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
    ),
    "llama-1b": LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
    ),
    "llama-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=POSITIONS,
    ),
    "toy": LlamaConfig(
        vocab_size=1000,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=10**6,
    ),
}
# A model that takes next to no time, with a vocabulary as large as real ones.
TINY = GPT2Config(vocab_size=50_000, n_positions=POSITIONS, n_embd=32, n_layer=1, n_head=2)
# name -> (tasks, shots; None for the tasks' own)
WORKLOADS: dict[str, tuple[list[str], int | None]] = {
    "mmlu": (["mmlu"], 5),
    "leaderboard_bbh": (["leaderboard_bbh"], 3),
    "icl_mmlu": (["icl_mmlu"], 5),
    "icl_bbh": (["icl_bbh"], 3),
    "icl_classification": (["icl_classification"], None),
    "mmlu_continuation": (["mmlu_continuation"], 5),
    "bbh": (["bbh_cot_fewshot"], 3),  # chain of thought, generated
    "adverse": (["sst2"], 8),  # lm-eval's own SST-2: new random demonstrations for every document
}
WORDS = "film plot actor music story scene joke dull warm sharp slow bright long quiet odd river stone cloud".split()
METHODS = {name: model_class(name) for name in NAMES}
# Where a command has other defaults than the first of these.
DEFAULTS: dict[str, dict[str, Any]] = {
    "": {
        "model": "gpt2",
        "methods": ["icl", "deepthink"],
        "workloads": list(WORKLOADS),
        "batch_sizes": [1, 8],
        "pack_tokens": [1024],
    },
    "methods": {"methods": list(METHODS)},
    "training": {"methods": list(METHODS)},
    "shots": {"model": "toy", "methods": ["icl", *(name for name in METHODS if make(name).needs_mask)]},
    "gpu": {
        "model": "llama-8b",
        "methods": ["icl", "deepthink", "invicl"],
        "workloads": ["mmlu", "leaderboard_bbh", "icl_classification", "bbh"],
        "batch_sizes": [8, 32, 128],
        "pack_tokens": [1024, 4096, 16384],
    },
}


class Measurement(NamedTuple):
    seconds: float
    outside: float  # seconds that the model did not run; NaN on a GPU
    tokens: int  # through the model, padding included
    peak: int  # bytes above what was there before


def build_requests(
    names: list[str], shots: int | None, tasks: int, documents: int, max_gen_toks: int
) -> list[Instance]:
    """The requests of some of the tasks, evenly spaced, and of their first documents."""
    loaded = list(TaskManager().load(names)["tasks"].values())
    chosen = loaded[:: max(1, len(loaded) // tasks)][:tasks] if tasks else loaded
    instances: list[Instance] = []
    for task in chosen:
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
        if task.OUTPUT_TYPE == "generate_until":
            task.set_config(key="generation_kwargs", value={"max_gen_toks": max_gen_toks}, update=True)
        task.set_fewshot_seed(1234)
        with recording():
            task.build_all_requests(limit=documents or None, rank=0, world_size=1)
        instances += task.instances
    return instances


def train_tokenizer(instances: Sequence[Instance], vocabulary: int, most: int = 16_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the workload's own text, so that prompts have the lengths they have on a real model."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = {part for i in instances for part in (i.args[0].prefix, *i.args[0].demonstrations, i.args[0].query)}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Options as often as they are asked for: one that is a single token to real tokenizers is one here too.
    options = [i.args[1] for i in instances if i.request_type == "loglikelihood"]
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, most),
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*sorted(texts), *options], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def random_model(kind: str, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def run(lm: Any, instances: list[Instance]) -> list[Any]:
    """All requests, from what lm-eval has built to responses; nothing is kept of an earlier run."""
    if isinstance(lm, ICLModel):
        everything: Any = SimpleNamespace(instances=instances)
        lm.begin([everything])  # as one task: a run that knows what is to come
    by_kind: dict[str, list[Instance]] = defaultdict(list)
    for instance in instances:
        by_kind[instance.request_type].append(instance)
    return [getattr(lm, kind)(of_kind, disable_tqdm=True) for kind, of_kind in by_kind.items()]


def measure(lm: Any, instances: list[Instance]) -> Measurement:
    tokens, inside = 0, 0.0

    # On a GPU a pass is only begun between these two: waiting for it there would take away what runs meanwhile.
    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal tokens, inside
        tokens += (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()
        inside -= math.nan if torch.cuda.is_available() else time.perf_counter()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal inside
        inside += time.perf_counter()

    handles = [lm.model.register_forward_pre_hook(enter, with_kwargs=True), lm.model.register_forward_hook(leave)]
    before = reset_peak()
    start = now()
    run(lm, instances)
    seconds = now() - start
    for handle in handles:
        handle.remove()
    return Measurement(seconds, seconds - inside, tokens, peak() - before)


def now() -> float:
    """Seconds, everything before being done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak() -> int:
    """Forget the largest memory so far; returns the present one, in bytes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def products(model: PreTrainedModel, tokens: int, answers: int, seconds: float = 2.0) -> float:
    """Seconds that the bare matrix products of so many tokens take, their vocabulary projections at `answers` of
    them: every weight matrix of the model times 512 tokens at a time, attention left out."""
    head = model.get_output_embeddings()
    matrices = [
        (m.weight if isinstance(m, Conv1D) else m.weight.t())
        for m in model.modules()
        if isinstance(m, (nn.Linear, Conv1D)) and m is not head
    ]

    def rate(weights: list[torch.Tensor], rows: int) -> float:
        inputs = [torch.randn(rows, w.shape[0], device=w.device, dtype=w.dtype) for w in weights]
        done, start = 0, 0.0
        while done < 2 or time.perf_counter() - start < seconds:
            if done == 1:  # the first is to warm up
                start = time.perf_counter()
            for x, w in zip(inputs, weights, strict=True):
                x @ w
            now()
            done += 1
        return (time.perf_counter() - start) / (done - 1) / rows

    with torch.no_grad():
        return tokens * rate(matrices, 512) + answers * rate([head.weight.t()], 32)


def distinct(lm: ICLModel, instances: list[Instance]) -> tuple[int, int]:
    """How many tokens have to run, and at how many an answer is read: counted by the set of their histories."""
    contexts: set[Any] = set()
    nodes: set[Any] = set()
    answers: set[Any] = set()
    for instance in instances:
        request = lm.tokenize(instance)
        context, query = request.prompt.context, request.prompt.query
        contexts.add(context)
        whole = (*query, *request.answer[:-1])
        nodes |= {(context, whole[:end]) for end in range(1, len(whole) + 1)}
        answers |= {(context, whole[:end]) for end in range(len(query), len(whole) + 1)}
    return len(nodes) + sum(len(context.tokens) for context in contexts), len(answers)


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return f"{cpu.partition(': ')[2] or platform.processor()}, {torch.get_num_threads()} threads"


def compare_tasks(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Each workload: hf at each batch size, on a GPU with flash attention if that is installed, then ours with packs of
    each size, in turns."""
    flash = options.device == "cuda" and transformers.utils.is_flash_attn_2_available()
    found: dict[str, Any] = {}
    for name in options.workloads:
        names, shots = WORKLOADS[name]
        instances = build_requests(names, shots, options.tasks, options.documents, options.max_gen_toks)
        model = random_model(options.model, options.device)
        tokenizer = train_tokenizer(instances, model.config.vocab_size)
        shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
        kind = "hf with flash attention" if flash else "hf"
        theirs = {f"{kind}, batch {b}": HFLM(model, batch_size=b, **shared) for b in options.batch_sizes}
        ours = {
            m if len(options.pack_tokens) == 1 else f"{m}, packs of {n}": METHODS[m](
                model, batch_size=max(options.batch_sizes), pack_tokens=n, **shared
            )
            for m in options.methods
            for n in options.pack_tokens
        }
        runs: dict[str, list[Measurement]] = defaultdict(list)
        limits = []
        tokens, answers = distinct(next(iter(ours.values())), instances)
        for repetition in range(options.repetitions):
            for contender, lm in (theirs | ours).items():
                if flash:
                    model.set_attn_implementation("flash_attention_2" if contender in theirs else "sdpa")
                runs[contender].append(measure(lm, instances))
                console.print(f"{name} {repetition + 1}/{options.repetitions} {contender}: {runs[contender][-1]}")
            limits.append(products(model, tokens, answers))
        best = min(theirs, key=lambda hf: statistics.median(run.seconds for run in runs[hf]))
        documents = len({(i.task_name, i.doc_id) for i in instances})
        limit = statistics.median(limits)
        table = Table(
            title=f"{name}: {documents} documents, {len(instances)} requests, {tokens} distinct tokens, "
            f"{options.model}, {model.dtype}, {machine()}; bare matrix products {limit:.1f} s"
        )
        for column in (
            "model",
            "seconds",
            f"times {best}",
            "limit reached",
            "outside",
            "outside, ms a document",
            "tokens / distinct",
            "peak, MiB",
        ):
            table.add_column(column, justify="left" if column == "model" else "right")
        for contender, measured in runs.items():
            ratios = [hf.seconds / own.seconds for hf, own in zip(runs[best], measured, strict=True)]
            shares = [bare / own.seconds for bare, own in zip(limits, measured, strict=True)]
            table.add_row(
                contender,
                spread([run.seconds for run in measured]),
                spread(ratios),
                f"{statistics.median(shares):.0%}",
                f"{statistics.median(run.outside / run.seconds for run in measured):.1%}",
                f"{1e3 * statistics.median(run.outside for run in measured) / documents:.2f}",
                f"{measured[0].tokens / tokens:.2f}",
                f"{max(run.peak for run in measured) / 2**20:.0f}",
            )
        console.print(table)
        found[name] = {
            "documents": documents,
            "requests": len(instances),
            "distinct_tokens": tokens,
            "limit": limits,
            "runs": {contender: [run._asdict() for run in measured] for contender, measured in runs.items()},
        }
    return found


def compare_outside(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Processor milliseconds a document, with a model of one layer: turning requests into ids and checking them, the
    model, and the rest (grouping, packing, masks, reading scores)."""
    found: dict[str, Any] = {}
    for workload in options.workloads:
        names, shots = WORKLOADS[workload]
        instances = build_requests(names, shots, options.tasks, options.documents, options.max_gen_toks)
        documents = len({(i.task_name, i.doc_id) for i in instances})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(TINY).eval()
        tokenizer = train_tokenizer(instances, TINY.vocab_size, most=TINY.vocab_size)
        lms = {m: METHODS[m](model, tokenizer=tokenizer, device="cpu") for m in options.methods}
        inside = 0.0

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal inside
            inside -= time.process_time()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal inside
            inside += time.process_time()

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave)
        parts: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in lms}
        for _ in range(options.repetitions):
            for name, lm in lms.items():
                gc.collect()
                lm.begin([SimpleNamespace(instances=instances)])
                inside, start = 0.0, time.process_time()
                lm.run.check()
                checked = time.process_time()
                lm.loglikelihood(instances, disable_tqdm=True)
                end = time.process_time()
                times = {"requests": checked - start, "model": inside, "rest": end - checked - inside}
                times["outside"] = times["requests"] + times["rest"]
                for part, seconds in times.items():
                    parts[name][part].append(1e3 * seconds / documents)
        title = f"{workload}: processor milliseconds a document, {documents} documents, {machine()}"
        table = Table("model", "requests as ids", "model", "rest", "outside", title=title)
        for name, times_of in parts.items():
            table.add_row(name, *map(spread, times_of.values()))
        console.print(table)
        found[workload] = {"documents": documents, "milliseconds": parts}
    return found


def synthetic(
    documents: int = 64, demonstrations: int = 8, options: int = 4, length: int = 1, shot: int = 60, query: int = 50
) -> list[Instance]:
    """Requests of chosen sizes, in words of about one token: `length` of an option, `shot` of a demonstration."""
    random = Random(0)

    def words(n: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(n))

    shots = [f"{words(shot)}\n\n" for _ in range(demonstrations)]
    answers = [f" {words(length)}" for _ in range(options)]
    instances = []
    for document in range(documents):
        prompt = FewShotPrompt("", shots, words(query))
        for i, answer in enumerate(answers):
            metadata = ("synthetic", document, 1)
            instances.append(Instance("loglikelihood", {}, (prompt, answer), i, metadata=metadata))
    return instances


def time_encoding(lm: Any, instances: list[Instance]) -> float:
    """Seconds to encode the demonstrations that all requests share; 0 where they are encoded with each query."""
    lm.begin([])
    start = now()
    with lm.runner.inference_mode():
        if not lm.method.memory_depends_on_query:
            lm.runner.store[lm.run.requests(instances[:1])[0].prompt.context]
    return now() - start


def compare_methods(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What it takes to encode eight demonstrations, and a query then, in every method."""
    instances = synthetic(documents=options.documents)
    model = random_model(options.model, options.device)
    tokenizer = train_tokenizer(instances, model.config.vocab_size)
    lms = {m: METHODS[m](model, tokenizer=tokenizer, device=options.device) for m in options.methods}
    encoding: dict[str, list[float]] = defaultdict(list)
    scoring: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, int] = defaultdict(int)
    for _ in range(options.repetitions):
        for name, lm in lms.items():
            everything = measure(lm, instances)
            peaks[name] = max(peaks[name], everything.peak)
            encoding[name].append(time_encoding(lm, instances))
            scoring[name].append((everything.seconds - encoding[name][-1]) / options.documents)
    table = Table(title=f"8 demonstrations of 60 tokens, queries of 50, 4 options; {options.model}, {machine()}")
    for column in ("model", "encode, ms", "a query, ms", "times icl's", "peak memory, MiB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in lms:
        ratios = [own / plain for own, plain in zip(scoring[name], scoring["icl"], strict=True)]
        encode = spread([1e3 * t for t in encoding[name]])
        encode = "with each query" if lms[name].method.memory_depends_on_query else encode
        row = (encode, spread([1e3 * t for t in scoring[name]]), spread(ratios), f"{peaks[name] / 2**20:.0f}")
        table.add_row(name, *row)
    console.print(table)
    return {"encode": encoding, "query": scoring, "peak": peaks}


def compare_growth(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time a document, one size growing at a time."""
    sizes = {
        "documents": (8, 16, 32, 64, 128),
        "demonstrations": (0, 2, 4, 8, 16, 32),
        "options": (1, 2, 4, 8, 16),
        "length": (1, 2, 4, 8, 16),
    }
    model = random_model(options.model, options.device)
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    lms = {m: METHODS[m](model, tokenizer=tokenizer, device=options.device) for m in options.methods}
    found: dict[str, Any] = {}
    for size, values in sizes.items():
        table = Table(title=f"milliseconds a document (without encoding) against {size}; {options.model}, {machine()}")
        table.add_column(size, justify="right")
        for name in lms:
            table.add_column(name, justify="right")
        found[size] = {name: {} for name in lms}
        for value in values:
            instances = synthetic(**{"documents": options.documents, size: value})
            documents = len({i.doc_id for i in instances})
            cells = []
            for name, lm in lms.items():
                whole = [1e3 * measure(lm, instances).seconds / documents for _ in range(options.repetitions)]
                encoding = [1e3 * time_encoding(lm, instances) / documents for _ in range(options.repetitions)]
                queries = [total - shared for total, shared in zip(whole, encoding, strict=True)]
                found[size][name][value] = {"document": whole, "query": queries}
                cells.append(f"{spread(whole)}; {statistics.median(queries):.1f}")
            table.add_row(str(value), *cells)
        console.print(table)
    if options.figure:
        draw(found, options.figure)
    return found


def generated(texts: int, demonstrations: int, tokens: int) -> list[Instance]:
    """Requests for texts of so many tokens, behind demonstrations of about 50 tokens each. Nothing ends them before."""
    asked = {"until": [], "max_gen_toks": tokens, "min_new_tokens": tokens, "do_sample": False}
    found = synthetic(documents=texts, demonstrations=demonstrations, options=1, shot=48)
    return [Instance("generate_until", {}, (i.args[0], asked), 0, metadata=i.metadata) for i in found]


def measure_generation(lm: Any, instances: list[Instance]) -> tuple[float, float]:
    """The seconds of all, and in the median those of a pass over one token of each text. On a CPU they are seconds of
    the processor, which what else runs on the machine does not count in."""
    clock = now if torch.cuda.is_available() else time.process_time
    steps: list[float] = []

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        steps.append(-clock() if kwargs["input_ids"].shape[1] == 1 else math.nan)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        steps[-1] += clock()

    handles = [lm.model.register_forward_pre_hook(enter, with_kwargs=True), lm.model.register_forward_hook(leave)]
    start = clock()
    run(lm, instances)
    seconds = clock() - start
    for handle in handles:
        handle.remove()
    return seconds, statistics.median(step for step in steps if not math.isnan(step))


def compare_generation(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """1, 16 and 64 texts behind 20 demonstrations, and the same texts behind none.

    `hf` continues the first 16 texts at most, and what it takes is multiplied: its batches share nothing.
    """
    model, tokens = random_model(options.model, options.device), options.max_gen_toks
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
    table = Table(title=f"texts of {tokens} tokens behind 20 demonstrations; {options.model}, {machine()}")
    for column in ("texts", "model", "seconds", "times hf", "a step, ms", "of a step without demonstrations"):
        table.add_column(column, justify="left" if column == "model" else "right")
    hf = {n: HFLM(model, batch_size=n, **shared) for n in {min(texts, 16) for texts in options.texts}}
    ours = {m: METHODS[m](model, batch_size=max(options.texts), **shared) for m in options.methods}
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for repetition in range(options.repetitions):
        theirs = {n: measure_generation(lm, generated(n, 20, tokens)) for n, lm in hf.items()}
        for texts in options.texts:
            seconds, step = theirs[min(texts, 16)]
            runs[f"{texts} hf"].append((seconds * texts / min(texts, 16), step))
            for name, lm in ours.items():
                runs[f"{texts} {name}"].append(measure_generation(lm, generated(texts, 20, tokens)))
                runs[f"{texts} {name} alone"].append(measure_generation(lm, generated(texts, 0, tokens)))
            console.print(f"{texts} texts, {repetition + 1}/{options.repetitions}: {dict(runs)}")
    for texts, name in ((texts, name) for texts in options.texts for name in ("hf", *ours)):
        measured, alone = runs[f"{texts} {name}"], runs[f"{texts} {name} alone"]
        table.add_row(
            str(texts),
            name,
            spread([seconds for seconds, _ in measured]),
            spread([a / b for (a, _), (b, _) in zip(runs[f"{texts} hf"], measured, strict=True)]),
            spread([1e3 * step for _, step in measured]),
            spread([a / b for (_, a), (_, b) in zip(measured, alone, strict=True)]) if alone else "",
        )
    console.print(table)
    return runs


class Stopwatch(transformers.TrainerCallback):
    """The seconds of each step, from its batch to the updated weights."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._last = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(now() - self._last)
        self._last += self.seconds[-1]


def compare_training(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Seconds and memory of training steps on the same episodes: eight demonstrations of about 30 tokens each.

    "plain" is transformers' Trainer on the joined strings, with the loss on the answer alone.
    """
    random, steps = Random(0), 3
    rows = tuple(
        Row(" ".join(random.choice(WORDS) for _ in range(random.randint(20, 40))) + "\nLabel:", random.choice("AB"), ())
        for _ in range(200)
    )
    task = FileTask("synthetic", rows)
    tokenizer = train_tokenizer(synthetic(), CONFIGS[options.model].vocab_size)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=steps,
        per_device_train_batch_size=options.documents,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        label_names=[],
    )

    def joined(episodes: Sequence[Episode]) -> list[dict[str, list[int]]]:
        texts = [(str(each.example.prompt), each.example.answer) for each in episodes]
        ids = [(tokenizer(prompt).input_ids, tokenizer(answer).input_ids) for prompt, answer in texts]
        return [{"input_ids": a + b, "labels": [-100] * len(a) + b} for a, b in ids]

    seconds: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, int] = defaultdict(int)
    names = [name for name in options.methods if make(name).is_one_pass]
    for _ in range(options.repetitions):
        for name in ("plain", *names):
            model = random_model(options.model, options.device)
            pools, watch = [Pool(task, 8, 0)], Stopwatch()
            if name == "plain":
                tokenizer.pad_token = tokenizer.eos_token
                collator = transformers.DataCollatorForSeq2Seq(tokenizer)
                data: Any = joined([draw_episode(pools, 0, i) for i in range(steps * options.documents)])
                trainer: Any = transformers.Trainer(
                    model, arguments, train_dataset=data, data_collator=collator, callbacks=[watch]
                )
            else:
                maker = RowMaker(Predictor(model, tokenizer, make(name)))
                data = EpisodeRows(partial(draw_episode, pools, 0), maker, [], steps * options.documents)
                collate_rows = partial(collate, dtype=model.dtype)
                trainer = LayoutTrainer(
                    model, arguments, None, train_dataset=data, data_collator=collate_rows, callbacks=[watch]
                )
            trainer.remove_callback(transformers.PrinterCallback)
            before = reset_peak()
            trainer.train()
            peaks[name] = max(peaks[name], peak() - before)
            seconds[name].append(min(watch.seconds[1:]))  # the first is to warm up
            del trainer, model
    table = Table(title=f"A training step of {options.documents} episodes, {options.model}, {machine()}")
    for column in ("method", "a step, s", "times icl's", "peak memory, MiB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, found in seconds.items():
        ratios = [own / icl for own, icl in zip(found, seconds["icl"], strict=True)]
        table.add_row(name, spread(found), spread(ratios), f"{peaks[name] / 2**20:.0f}")
    console.print(table)
    return {"step": seconds, "peak": peaks}


def compare_shots(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Processor seconds and memory that encoding ever more demonstrations takes in every method, up to a query."""
    found: dict[str, dict[int, Any]] = {name: {} for name in options.methods}
    table = Table(title=f"Encoding demonstrations of SST-2, {options.model}, {machine()}")
    for column in ("demonstrations", "tokens", "model", "seconds", "times icl's", "peak memory, MiB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    model = random_model(options.model, options.device)
    requests = {n: build_requests(["icl_sst2"], n, tasks=1, documents=1, max_gen_toks=0) for n in options.shots}
    tokenizer = train_tokenizer(requests[max(options.shots)], model.config.vocab_size)
    for shots, instances in requests.items():
        seconds: dict[str, list[float]] = defaultdict(list)
        peaks: dict[str, int] = defaultdict(int)
        for _ in range(options.repetitions):
            for name in options.methods:
                lm = METHODS[name](model, tokenizer=tokenizer, device=options.device)
                method, prompt = lm.runner.method, lm.tokenize(instances[0]).prompt
                before, start = reset_peak(), busy()
                with lm.runner.inference_mode():
                    method.encode_query(model, prompt.context, prompt.query, partial(method.encode, model))
                seconds[name].append(busy() - start)
                peaks[name] = max(peaks[name], peak() - before)
        tokens = len(prompt.context.tokens)
        for name, own in seconds.items():
            ratios = [one / icl for one, icl in zip(own, seconds["icl"], strict=True)]
            row = (str(shots), str(tokens), name, spread(own), spread(ratios), f"{peaks[name] / 2**20:.0f}")
            table.add_row(*row)
            found[name][shots] = {"tokens": tokens, "seconds": own, "peak": peaks[name]}
            console.print(*row)
        if options.figure:  # so far: the last sizes take the longest
            draw_shots(found, options.figure)
    console.print(table)
    return found


def busy() -> float:
    """Seconds that the processor has worked for this process; on a GPU, `now`."""
    return now() if torch.cuda.is_available() else time.process_time()


def draw_shots(found: dict[str, Any], path: Path) -> None:
    """Memory and time of every method against the tokens of the demonstrations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "shots", "svg.fonttype": "none"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, curve in found.items():
        tokens = [point["tokens"] for point in curve.values()]
        axes[0].plot(tokens, [point["peak"] / 2**20 for point in curve.values()], marker="o", markersize=3, label=name)
        medians = [statistics.median(point["seconds"]) for point in curve.values()]
        axes[1].plot(tokens, medians, marker="o", markersize=3)
    for axis, label in zip(axes, ("peak memory, MiB", "processor seconds"), strict=True):
        axis.set_xlabel("tokens of demonstrations")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(found), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def draw(found: dict[str, Any], path: Path) -> None:
    """The growth curves, median of the repetitions; dotted what is left without encoding the demonstrations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "growth", "svg.fonttype": "none"}
    labels = {"length": "tokens an option"}
    figure, axes = plt.subplots(1, len(found), figsize=(13, 3.2), sharey=True, layout="constrained")
    for axis, (size, curves) in zip(axes, found.items(), strict=True):
        for color, (name, curve) in enumerate(curves.items()):
            for what, style in (("document", "-"), ("query", ":")):
                times = [statistics.median(point[what]) for point in curve.values()]
                label = name if what == "document" else f"{name}, demonstrations encoded"
                axis.plot(list(curve), times, style, color=f"C{color}", marker="o", markersize=3, label=label)
        axis.set_xlabel(labels.get(size, size))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds a document")
    axes[0].set_ylim(bottom=0)  # after the last curve: it fixes the upper end, which all panels share
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


COMPARE = {
    "tasks": compare_tasks,
    "outside": compare_outside,
    "methods": compare_methods,
    "growth": compare_growth,
    "generation": compare_generation,
    "training": compare_training,
    "shots": compare_shots,
    "gpu": compare_tasks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMPARE)
    parser.add_argument("--model", choices=CONFIGS, help="default: gpt2; toy for shots, llama-8b for gpu")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, metavar="NAME", help="default: all, or those that are of interest"
    )
    parser.add_argument(
        "--shots", nargs="+", type=int, default=[125, 250, 500, 1000, 2000], help="numbers of demonstrations, for shots"
    )
    parser.add_argument("--pack-tokens", nargs="+", type=int, help="of ours (default: 1024; several for gpu)")
    parser.add_argument(
        "--tasks", type=int, default=2, help="how many of a workload's tasks; 0 for all (default: %(default)s)"
    )
    parser.add_argument("--documents", type=int, default=64, help="of each task; 0 for all (default: %(default)s)")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="of hf (default: 1 8; 8 32 128 for gpu)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-gen-toks", type=int, default=32, help="of generation tasks (default: %(default)s)")
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 16, 64], help="of generation (default: 1 16 64)")
    parser.add_argument("--output", type=Path, help="write the measurements there, as JSON")
    parser.add_argument("--figure", type=Path, help="draw the curves of growth or shots there, .svg or .png")
    options = parser.parse_args()
    for name, value in (DEFAULTS[""] | DEFAULTS.get(options.what, {})).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.what == "gpu" and not torch.cuda.is_available():
        parser.error("gpu: there is no GPU here (torch.cuda.is_available() is False); `tasks` runs on a CPU")
    least = 0 if options.what in ("tasks", "outside") else 1
    if options.repetitions < 1 or options.documents < least or options.tasks < 0:
        parser.error(
            "--repetitions must be 1 or more, --tasks 0 or more, --documents 1 or more (0 for tasks and outside)"
        )
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.what in ("methods", "training", "shots") and "icl" not in options.methods:
        parser.error("--methods: icl is what the others are compared with, and must be among them")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    console = Console(width=150)
    found = COMPARE[options.what](options, console)
    if options.output:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        record = {"machine": machine(), "torch": torch.__version__, "options": settings, "found": found}
        options.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
