"""Training steps, beside transformers' Trainer."""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import machine, now, peak, reset_peak, spread
from benchmarks.workloads import CONFIGS, WORDS, random_model, synthetic, train_tokenizer
from lm_eval_icl.metaicl.files import Row
from lm_eval_icl.methods import Predictor, make
from lm_eval_icl.training.episodes import Episode, EpisodePool, FileTask, draw_episode
from lm_eval_icl.training.rows import RowMaker, collate
from lm_eval_icl.training.trainer import EpisodeRows, LayoutTrainer


class Stopwatch(transformers.TrainerCallback):
    """The seconds of each step, from its batch to the updated weights."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._last = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(now() - self._last)
        self._last += self.seconds[-1]


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
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
    names = [name for name in options.methods if make(name).one_pass]
    for _ in range(options.repetitions):
        for name in ("plain", *names):
            model = random_model(options.model, options.device)
            pools, watch = [EpisodePool(task, 8, 0)], Stopwatch()
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
