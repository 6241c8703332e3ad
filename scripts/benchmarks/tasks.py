"""Whole workloads: our models beside lm-eval's own `hf`."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from benchmarks.measuring import Measurement, machine, measure, now, spread, table_of
from benchmarks.workloads import METHODS, WORKLOADS, build_requests, random_model, train_tokenizer
from lm_eval_icl.harness.models import ICLModel


def compare(options: argparse.Namespace, console: Console) -> None:
    """Each workload: hf at each batch size, on a GPU with flash attention if that is installed, then ours with packs of
    each size, in turns."""
    flash = options.device == "cuda" and transformers.utils.is_flash_attn_2_available()
    for name in options.workloads:
        names, shots = WORKLOADS[name]
        instances = build_requests(
            names, shots, options.tasks, options.documents, options.max_gen_toks
        )
        model = random_model(options.model, options.device)
        tokenizer = train_tokenizer(instances, model.config.vocab_size)
        shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
        kind = "hf with flash attention" if flash else "hf"
        theirs = {
            f"{kind}, batch {b}": HFLM(model, batch_size=b, **shared) for b in options.batch_sizes
        }
        ours = {}
        for m, n in itertools.product(options.methods, options.pack_tokens):
            contender = m if len(options.pack_tokens) == 1 else f"{m}, packs of {n}"
            ours[contender] = METHODS[m](
                model, batch_size=max(options.batch_sizes), pack_tokens=n, **shared
            )
        runs: dict[str, list[Measurement]] = defaultdict(list)
        limits = []
        tokens, answers = distinct(next(iter(ours.values())), instances)
        for repetition in range(options.repetitions):
            for contender, lm in (theirs | ours).items():
                if flash:
                    model.set_attn_implementation(
                        "flash_attention_2" if contender in theirs else "sdpa"
                    )
                runs[contender].append(measure(lm, instances))
                console.print(
                    f"{name} {repetition + 1}/{options.repetitions} {contender}: {runs[contender][-1]}"
                )
            limits.append(products(model, tokens, answers))
        best = min(theirs, key=lambda hf: statistics.median(run.seconds for run in runs[hf]))
        documents = len({(i.task_name, i.doc_id) for i in instances})
        limit = statistics.median(limits)
        title = (
            f"{name}: {documents} documents, {len(instances)} requests, {tokens} distinct tokens, "
        )
        title += f"{options.model}, {model.dtype}, {machine()}; bare matrix products {limit:.1f} s"
        columns = [
            "model",
            "seconds",
            f"times {best}",
            "limit reached",
            "outside",
            "outside, ms a document",
        ]
        table = table_of(title, *columns, "tokens / distinct", "peak, MiB")
        for contender, measured in runs.items():
            ratios = [
                hf.seconds / own.seconds for hf, own in zip(runs[best], measured, strict=True)
            ]
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
    contexts, nodes, answers = set[Any](), set[Any](), set[Any]()
    for instance in instances:
        [request] = lm.tokenize([instance])
        context, query = request.prompt.context, request.prompt.query
        contexts.add(context)
        whole = (*query, *request.answer[:-1])
        nodes |= {(context, whole[:end]) for end in range(1, len(whole) + 1)}
        answers |= {(context, whole[:end]) for end in range(len(query), len(whole) + 1)}
    return len(nodes) + sum(len(context.tokens) for context in contexts), len(answers)
