"""What a study would take: its cells, and an estimate of forward passes and tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from lm_eval_icl.demonstrations.how import read
from lm_eval_icl.encoded import EncodedPrompt
from lm_eval_icl.errors import refusing
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.metaicl.reading import Reader, reader
from lm_eval_icl.metaicl.strings import PER_SEQUENCE
from lm_eval_icl.prompt import FewShotPrompt
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.conduct import Conductor
from lm_eval_icl.studies.folder import Cell, Model
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.run import by_work, passes_of
from lm_eval_icl.tokens import Context, PromptTokenizer

_PACK = 1024  # tokens of queries that share a pass (`CommonArguments.pack_tokens`)


@dataclass(frozen=True)
class Work:
    """An estimate of what is run: forward passes, and tokens in them."""

    passes: int = 0
    tokens: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.passes + other.passes, self.tokens + other.tokens)

    def times(self, n: int) -> Work:
        return Work(self.passes * n, self.tokens * n)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a task with some demonstrations: an example context, and how many tokens there are.

    Attributes:
        context: the first document's prefix and demonstrations.
        contexts: how many different ones there are.
        queries: how many there are.
        query_tokens: of all queries together, with their options.
    """

    context: Context
    contexts: int
    queries: int
    query_tokens: int


class Plan:
    """The plan of a study.

    Raises:
        InputError: a tokenizer or a prompt cannot be had.
    """

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self._prompts: dict[tuple[Any, ...], Prompts] = {}
        self._tokenizers: dict[str, PromptTokenizer] = {}

    def cells(self, model: Model) -> list[Cell]:
        """All cells of a model. Where the dev set will choose, the first of the values stand for the chosen ones."""
        study = self.conductor.study
        found = self.conductor.dev_cells(model)
        taken = set()
        for variant in self.conductor.variants(model):
            if study.chooses(variant):
                if variant.entry in taken:
                    continue
                taken.add(variant.entry)
                variant = max((v for v in study.variants if v.entry == variant.entry), key=lambda v: passes_of(v)[1])
            one = study.seeds[0] if study.dev and study.chooses(variant) and "seeds" in study.dev.choose else None
            found += self.conductor.cells("test", model, variant, one)
        return found

    def shared(self, model: Model) -> Work:
        """What a study runs for a model, `hf` not counted."""
        total = Work()
        for cells in by_work(self.cells(model)).values():
            if cells[0].variant.method == HF:
                continue
            largest = max(cells, key=lambda cell: passes_of(cell.variant)[1])
            method = model_class(largest.variant.method).method_class.from_arguments(largest.variant.arguments)
            orders = 1 if method.invariant else len({cell.order for cell in cells})
            numbers = len({passes_of(cell.variant)[1] for cell in cells})
            total += self._encoding(largest).times(orders) + self._queries(largest).times(orders * numbers)
        return total

    def alone(self, cell: Cell) -> Work:
        """What one cell takes if it is run by itself."""
        return self._encoding(cell) + self._queries(cell)

    def _encoding(self, cell: Cell) -> Work:
        prompts = self._of(cell)
        method = model_class(cell.variant.method).method_class.from_arguments(cell.variant.arguments)
        layouts = method.passes(len(prompts.context.prefix), prompts.context.lengths)
        first = len(layouts[0][1])
        _, passes = passes_of(cell.variant)
        contexts = prompts.queries if method.memory_depends_on_query else prompts.contexts
        return Work(passes, first * passes).times(contexts)

    def _queries(self, cell: Cell) -> Work:
        tokens = self._of(cell).query_tokens
        return Work(-(-tokens // _PACK), tokens)

    def _of(self, cell: Cell) -> Prompts:
        """The prompts of a cell. Those of other seeds and orders, and of the dev set, count as many."""
        key = (cell.model.name, cell.task, cell.num_fewshot, cell.demonstrations)
        if key not in self._prompts:
            leaf = self.conductor.leaves[cell.task]
            # What a model chooses is not known before it is loaded: rows that are drawn stand for it.
            how = cell.demonstrations
            drawn = "random" if how is not None and read(how) is not None else how
            given = (cell.num_fewshot, drawn, cell.seed, 0, None, cell.limit)
            prepared = study_tasks.prepare(leaf, *given, bind=lambda task: task.read_by(self._reader(cell.model)))
            self._prompts[key] = self._count(cell, prepared)
        return self._prompts[key]

    def _count(self, cell: Cell, prepared: study_tasks.Prepared) -> Prompts:
        tokenizer = self._tokenizer(cell.model.arguments)
        contexts, queries = Counter[Context](), dict[tuple[int, ...], int]()
        for instance in prepared.task.instances:
            prompt = instance.args[0]
            if isinstance(prompt, EncodedPrompt):
                contexts[prompt.tokens.context] += 1
                query = prompt.tokens.query
                queries[query] = queries.get(query, len(query)) + len(instance.args[1].ids) - 1
                continue
            if not isinstance(prompt, FewShotPrompt):  # a text that is scored as a whole, for example
                prompt = FewShotPrompt("", (), prompt)
            text = instance.args[1] if instance.request_type == "loglikelihood" else ""
            found, answer = tokenizer.pair(prompt, text) if text else (tokenizer.to_continue(prompt), ())
            contexts[found.context] += 1
            queries[found.query] = queries.get(found.query, len(found.query)) + max(0, len(answer) - 1)
        (example, _), *_ = contexts.most_common(1)
        return Prompts(example, len(contexts), len(queries), sum(queries.values()))

    def _reader(self, model: Model) -> Reader:
        """How a model reads MetaICL's sequences, if it takes as many tokens as these may have."""
        tokenizer = self._tokenizer(model.arguments).tokenizer
        longest = int(model.arguments.get("max_length", PER_SEQUENCE))
        return reader(tokenizer, model.arguments.get("add_bos_token"), longest)

    def _tokenizer(self, model: Mapping[str, Any]) -> PromptTokenizer:
        name = str(model.get("tokenizer", model["pretrained"]))
        if name not in self._tokenizers:
            with refusing(f"tokenizer={name!r}: the tokenizer cannot be loaded"):
                given = {key: model[key] for key in ("revision", "subfolder", "trust_remote_code") if key in model}
                self._tokenizers[name] = PromptTokenizer(AutoTokenizer.from_pretrained(name, **given))
        return self._tokenizers[name]

    def record(self) -> list[dict[str, Any]]:
        """For each model: its cells, and the passes and tokens of the study and of the same cells run one by one, `hf`
        and training not counted."""
        found = []
        for model in self.conductor.models:
            cells = self.cells(model)
            ours = [cell for cell in cells if cell.variant.method != HF]
            alone, shared = sum(map(self.alone, ours), Work()), self.shared(model)
            found.append(
                {
                    "model": model.checkpoint or model.name,
                    "cells": len(cells),
                    "passes": shared.passes,
                    "tokens": shared.tokens,
                    "passes_one_by_one": alone.passes,
                    "tokens_one_by_one": alone.tokens,
                }
            )
        return found
