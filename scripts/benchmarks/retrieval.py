"""Demonstrations that are retrieved for each document: our models beside `hf`, with and without shared encoding."""

from __future__ import annotations

import argparse
import math
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
SHOTS = 8
FIXED = 80


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
        tenth = math.ceil(options.documents / 10)
        few = retrieved(task, how, SHOTS, tenth)
        longer = retrieved(task, f"{how}:fixed={FIXED}", FIXED + SHOTS, tenth)
        model = random_model(options.model, options.device, torch.float32)
        arguments: dict[str, Any] = {
            "tokenizer": train_tokenizer(instances, model.config.vocab_size),
            "device": options.device,
            "batch_size": max(options.batch_sizes),
        }
        hf = HFLM(model, **arguments)
        icl = METHODS["icl"](model, **arguments)
        pcw = METHODS["pcw"](model, store_bytes=options.store_bytes, **arguments)
        with patch.object(joining, "has_separate_demonstrations", lambda method: False):
            apart = METHODS["pcw"](model, **arguments)
        contenders = {
            f"hf, batch {arguments['batch_size']}": (hf, few),
            "icl": (icl, few),
            "pcw, each context by itself": (apart, few),
            "pcw, each demonstration once": (pcw, instances),
            f"icl, {FIXED} fixed and {SHOTS} retrieved": (icl, longer),
        }
        title = f"{task}, {how}, {options.model}, {model.dtype}, {machine()}"
        clock = "seconds" if torch.cuda.is_available() else "processor seconds"
        seconds = f"{clock} a document"
        table = table_of(title, "model", "documents", "tokens a document", seconds, "times hf")
        for contender, (lm, requests) in contenders.items():
            documents = len({instance.doc_id for instance in requests})
            begun = busy()
            tokens = measure(lm, requests).tokens / documents
            own = (busy() - begun) / documents
            if lm is hf:
                of_hf = own
            ratio = "" if requests is longer else f"{of_hf / own:.2f}"
            table.add_row(contender, f"{documents:,}", f"{tokens:.0f}", f"{own:.3f}", ratio)
            console.print(f"{task} {contender}: {(documents, tokens, own)}")
        console.print(table)
