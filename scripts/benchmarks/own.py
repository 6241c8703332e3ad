"""Documents that have demonstrations of their own, beside `hf`."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import busy, machine, run, spread
from benchmarks.workloads import METHODS, random_model, synthetic, train_tokenizer

SHOT, QUERY = 18, 12  # words of a demonstration and of a query


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Scores and texts behind some numbers of demonstrations, at some batch sizes."""
    model = random_model(options.model, options.device)
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
    title = f"{options.documents} documents with demonstrations of their own; {options.model}, {machine()}"
    table = Table(title=title)
    for column in ("asked", "demonstrations", "batch size", "model", "ms a document", "times hf"):
        table.add_column(column, justify="left" if column in ("asked", "model") else "right")
    runs: dict[str, dict[str, list[float]]] = {}
    for batch_size in options.batch_sizes:
        contenders: dict[str, Any] = {"hf": HFLM(model, batch_size=batch_size, **shared)}
        for name in options.methods:
            contenders[name] = METHODS[name](model, batch_size=batch_size, **shared)
        for asked in ("scores", "texts"):
            for demonstrations in options.shots:
                instances = requests(asked, options.documents, demonstrations, options.max_gen_toks)
                seconds: dict[str, list[float]] = defaultdict(list)
                for _ in range(options.repetitions):
                    for name, lm in contenders.items():
                        start = busy()
                        run(lm, instances)
                        seconds[name].append(busy() - start)
                runs[f"{asked} {demonstrations} {batch_size}"] = seconds
                for name in ("hf", *options.methods):
                    row = [asked, str(demonstrations), str(batch_size), name]
                    row.append(spread([1e3 * each / options.documents for each in seconds[name]]))
                    row.append(spread([a / b for a, b in zip(seconds["hf"], seconds[name], strict=True)]))
                    table.add_row(*row)
    console.print(table)
    return runs


def requests(asked: str, documents: int, demonstrations: int, tokens: int) -> list[Instance]:
    """Requests for the scores of four options of one token, or for texts of so many tokens."""
    found = []
    for document in range(documents):
        sizes = {"demonstrations": demonstrations, "shot": SHOT, "query": QUERY, "seed": document}
        for each in synthetic(documents=1, options=4 if asked == "scores" else 1, **sizes):
            prompt, option = each.args
            kind = "loglikelihood"
            if asked == "texts":
                option = {"until": [], "max_gen_toks": tokens, "min_new_tokens": tokens, "do_sample": False}
                kind = "generate_until"
            found.append(Instance(kind, {}, (prompt, option), each.idx, metadata=("synthetic", document, 1)))
    return found
