"""Whole workloads: our models beside lm-eval's own `hf`."""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from torch import nn
from torch.utils.benchmark import Timer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from benchmarks.measuring import Measurement, machine, measure, spread, table_of
from benchmarks.workloads import METHODS, WORKLOADS, build_requests, random_model, train_tokenizer
from lm_eval_icl.harness.models import ICLModel


def compare(options: argparse.Namespace, console: Console) -> None:
    """Each workload: hf at each batch size, then ours, in turns."""
    for name in options.workloads:
        names, shots = WORKLOADS[name]
        instances = build_requests(
            names, shots, options.tasks, options.documents, options.max_gen_toks
        )
        model = random_model(options.model, options.device)
        tokenizer = train_tokenizer(instances, model.config.vocab_size)
        shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
        theirs = {
            f"hf, batch {b}": HFLM(model, batch_size=b, **shared) for b in options.batch_sizes
        }
        most = max(options.batch_sizes)
        ours = {m: METHODS[m](model, batch_size=most, **shared) for m in options.methods}
        runs: dict[str, list[Measurement]] = defaultdict(list)
        limits = []
        tokens, answers = distinct(ours[options.methods[0]], instances)
        for repetition in range(1, options.repetitions + 1):
            for contender, lm in (theirs | ours).items():
                measured = measure(lm, instances)
                runs[contender].append(measured)
                console.print(f"{name} {repetition}/{options.repetitions} {contender}: {measured}")
            limits.append(products(model, tokens, answers))
        documents = len({(i.task_name, i.doc_id) for i in instances})
        title = (
            f"{name}: {documents} documents, {len(instances)} requests, {tokens} distinct tokens, "
            f"{options.model}, {model.dtype}, {machine()}; bare matrix products {median(limits):.1f} s"
        )
        seconds = {who: np.array([run.seconds for run in runs[who]]) for who in runs}
        best = min(theirs, key=lambda hf: median(seconds[hf]))
        table = table_of(
            title,
            "model",
            "seconds",
            f"times {best}",
            "limit reached",
            "outside",
            "outside, ms a document",
            "tokens / distinct",
            "peak, MiB",
        )
        for contender, own in seconds.items():
            outside = np.array([run.outside for run in runs[contender]])
            table.add_row(
                contender,
                spread(own),
                spread(seconds[best] / own),
                f"{median(limits / own):.0%}",
                f"{median(outside / own):.1%}",
                f"{1e3 * median(outside) / documents:.2f}",
                f"{runs[contender][0].tokens / tokens:.2f}",
                f"{max(run.peak for run in runs[contender]) / 2**20:.0f}",
            )
        console.print(table)


def products(model: PreTrainedModel, tokens: int, answers: int) -> float:
    """Seconds that the bare matrix products of so many tokens take, their vocabulary projections at `answers` of
    them: every weight matrix of the model times 512 tokens at a time, attention left out."""
    head = model.get_output_embeddings()
    matrices = [
        (m.weight if isinstance(m, Conv1D) else m.weight.t())
        for m in model.modules()
        if isinstance(m, (nn.Linear, Conv1D)) and m is not head
    ]

    def rate(weights: list[torch.Tensor], rows: int) -> float:
        pairs = [(w.new_empty(rows, len(w)).normal_(), w) for w in weights]
        threads = torch.get_num_threads()
        timer = Timer("for x, w in pairs: x @ w", globals={"pairs": pairs}, num_threads=threads)
        return timer.blocked_autorange(min_run_time=2).mean / rows

    with torch.no_grad():
        return tokens * rate(matrices, 512) + answers * rate([head.weight.t()], 32)


def distinct(lm: ICLModel, instances: list[Instance]) -> tuple[int, int]:
    """How many tokens have to run, and at how many an answer is read: counted by the set of their histories."""
    contexts = set[Any]()
    nodes = set[Any]()
    answers = set[Any]()
    for request in lm.tokenize(instances):
        context = request.prompt.context
        query = request.prompt.query
        contexts.add(context)
        whole = (*query, *request.answer[:-1])
        histories = [(context, whole[:end]) for end in range(1, len(whole) + 1)]
        nodes.update(histories)
        answers.update(histories[len(query) - 1 :])
    return len(nodes) + sum(len(context.tokens) for context in contexts), len(answers)
