"""Another engine: CTranslate2 beside `icl`, its times and its numbers, on options of one token."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .measuring import busy, machine, run, spread, table_of
from .workloads import METHODS, random_model, synthetic, train_tokenizer

DEMONSTRATIONS = 14
QUERY = 99  # words of a query, of about one token each
QUERIES = 24


class CTranslate2:
    """A model in CTranslate2, in float32 on a CPU with one thread, which scores options of one
    token. What all prompts begin with runs once. Texts run one at a time: for several texts in a
    batch, version 4.8.5 returns the logits of the whole batch with each of them."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = f"{folder}/checkpoint"
            model.save_pretrained(checkpoint)
            tokenizer.save_pretrained(checkpoint)
            converted = Path(folder, "converted")
            TransformersConverter(checkpoint).convert(str(converted))
            # With transformers 5 the converter leaves these two empty, or takes a default.
            file = converted / "config.json"
            config = json.loads(file.read_text())
            epsilons = ("layer_norm_epsilon", "rms_norm_eps")
            [epsilon] = [getattr(model.config, name) for name in epsilons if name in model.config]
            config["layer_norm_epsilon"] = epsilon
            config["unk_token"] = config["unk_token"] or tokenizer.eos_token
            file.write_text(json.dumps(config))
            self._generator = ctranslate2.Generator(
                str(converted), compute_type="float32", intra_threads=1, inter_threads=1
            )
        self._tokenizer = tokenizer

    def log_likelihoods(self, requests: Sequence[tuple[str, str]]) -> list[float]:
        """The log-likelihood of each continuation, a single token, after its context.

        Raises:
            ValueError: a continuation has several tokens.
        """
        prompts = dict[str, list[int]]()
        answers = list[int]()
        for context, continuation in requests:
            *prompts[context], answer = self._tokenizer(context + continuation)["input_ids"]
            if len(prompts[context]) != len(self._tokenizer(context)["input_ids"]):
                raise ValueError(f"{continuation!r} is not one token")
            answers.append(answer)
        predictions = dict(zip(prompts, self._predictions(prompts.values()), strict=True))
        numbers = []
        for (context, _), answer in zip(requests, answers, strict=True):
            numbers.append(predictions[context][answer].item())
        return numbers

    def _predictions(self, prompts: Iterable[list[int]]) -> list[torch.Tensor]:
        """The log-probabilities of the token after each prompt: [vocabulary]."""
        tokens = [self._tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts]
        columns = takewhile(lambda column: len(set(column)) == 1, zip(*tokens, strict=False))
        shared = [column[0] for column in columns]
        shared = shared[: min(map(len, tokens)) - 1]  # a query has a token at least
        results = self._generator.generate_batch(
            [prompt[len(shared) :] for prompt in tokens],
            static_prompt=shared or None,
            cache_static_prompt=True,
            max_batch_size=1,
            max_length=1,
            return_logits_vocab=True,
            include_prompt_in_result=False,
        )
        logits = [torch.from_numpy(np.array(result.logits[0])).flatten() for result in results]
        return [torch.log_softmax(of_prompt.float(), 0) for of_prompt in logits]


def compare(options: argparse.Namespace, console: Console) -> None:
    """Processor seconds of `icl` and of CTranslate2, the two taking turns, and how far their
    numbers are apart."""
    torch.set_num_threads(1)
    model = random_model(options.model, "cpu")
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    # CTranslate2 wants a token for each row of the embeddings.
    unused = [f"<{number}>" for number in range(len(tokenizer), model.config.vocab_size)]
    tokenizer.add_tokens(unused)
    instances = synthetic(QUERIES, demonstrations=DEMONSTRATIONS, shot=32, query=QUERY)
    requests = [instance.args for instance in instances]
    icl = METHODS["icl"](model, tokenizer=tokenizer, device="cpu")
    engine = CTranslate2(model, tokenizer)
    ratios: list[float] = []
    difference = 0.0
    for _ in range(options.repetitions):
        start = busy()
        [responses] = run(icl, instances)
        own = busy() - start
        start = busy()
        numbers = engine.log_likelihoods(requests)
        ratios.append((busy() - start) / own)
        for (number, _), other in zip(responses, numbers, strict=True):
            difference = max(difference, abs(number - other))
    table = table_of(f"{options.model}, {machine()}", "CTranslate2 / icl", "largest difference")
    table.add_row(spread(ratios), f"{difference:.1e}")
    console.print(table)
