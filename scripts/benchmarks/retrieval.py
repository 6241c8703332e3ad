"""Demonstrations that are retrieved for each document: our models beside `hf`, with and without shared encoding."""

from __future__ import annotations

import argparse
from typing import Any
from unittest.mock import patch

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console

from benchmarks.measuring import busy, machine, measure, table_of
from benchmarks.workloads import METHODS, random_model, requests_of, train_tokenizer
from lm_eval_icl.methods import joining

# A workload's task and its pool; 8 demonstrations are retrieved, after 80 fixed ones in the last row.
WORKLOADS = (
    ("icl_agnews", "similar:pool=5000"),
    ("icl_trec", "similar"),
    ("icl_sst2", "similar"),
)
SHOTS, FIXED = 8, 80


def retrieved(task: str, how: str, shots: int, documents: int) -> list[Instance]:
    """The requests of a task's first documents, with demonstrations that are retrieved for each."""
    (loaded,) = TaskManager(metadata={"demonstrations": how}).load([task])["tasks"].values()
    return requests_of(loaded, shots, documents)


def compare(options: argparse.Namespace, console: Console) -> None:
    """Each workload once: hf, icl, pcw that encodes each context by itself, pcw that encodes each demonstration once,
    and icl after demonstrations that all documents share. Only the last two share anything between documents; the
    others run a tenth of the documents, and the table has the time of a document."""
    for task, how in WORKLOADS:
        instances = retrieved(task, how, SHOTS, options.documents)
        few = retrieved(task, how, SHOTS, -(-options.documents // 10))
        longer = retrieved(task, f"{how}:fixed={FIXED}", FIXED + SHOTS, -(-options.documents // 10))
        model = random_model(options.model, options.device, torch.float32)
        arguments: dict[str, Any] = {
            "tokenizer": train_tokenizer(instances, model.config.vocab_size),
            "device": options.device,
            "batch_size": max(options.batch_sizes),
        }
        icl = METHODS["icl"](model, **arguments)
        pcw = METHODS["pcw"](model, store_bytes=options.store_bytes, **arguments)
        with patch.object(joining, "has_separate_demonstrations", lambda method: False):
            apart = METHODS["pcw"](model, **arguments)
        contenders = {
            f"hf, batch {arguments['batch_size']}": (HFLM(model, **arguments), few),
            "icl": (icl, few),
            "pcw, each context by itself": (apart, few),
            "pcw, each demonstration once": (pcw, instances),
            f"icl, {FIXED} fixed and {SHOTS} retrieved": (icl, longer),
        }
        title = f"{task}, {how}, {options.model}, {model.dtype}, {machine()}"
        seconds = (
            "seconds a document" if torch.cuda.is_available() else "processor seconds a document"
        )
        table = table_of(title, "model", "documents", "tokens a document", seconds, "times hf")
        runs: dict[str, tuple[int, float, float]] = {}
        for contender, (lm, requests) in contenders.items():
            documents, begun = len({instance.doc_id for instance in requests}), busy()
            tokens = measure(lm, requests).tokens
            runs[contender] = documents, tokens / documents, (busy() - begun) / documents
            ratio = (
                next(iter(runs.values()))[2] / runs[contender][2]
                if requests is not longer
                else None
            )
            row = f"{documents:,}", f"{tokens / documents:.0f}", f"{runs[contender][2]:.3f}"
            table.add_row(contender, *row, f"{ratio:.2f}" if ratio else "")
            console.print(f"{task} {contender}: {runs[contender]}")
        console.print(table)
