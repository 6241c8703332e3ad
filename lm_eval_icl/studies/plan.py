"""What a study would take: its cells, and an estimate of forward passes and tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.metaicl.reading import reader
from lm_eval_icl.metaicl.strings import PER_SEQUENCE
from lm_eval_icl.prompts.encoded import EncodedPrompt
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, PromptTokenizer
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.cells import Cell, Grid, Model
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.order import batches, passes_of
from lm_eval_icl.studies.tasks import Leaf

_PACK = 1024  # tokens of queries that share a pass (`CommonArguments.pack_tokens`)


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

    Args:
        grid: which cells there are.
        leaves: the study's tasks, loaded.

    Attributes:
        lacking: of models whose work cannot be estimated, why, by name: their tokenizer cannot be had, for example.
    """

    def __init__(self, grid: Grid, leaves: Mapping[str, Leaf]) -> None:
        self.grid, self.leaves = grid, leaves
        self.lacking: dict[str, str] = {}
        self._prompts: dict[tuple[Any, ...], Prompts] = {}
        self._tokenizers: dict[str, PromptTokenizer] = {}

    def cells(self, model: Model) -> list[Cell]:
        """All cells of a model. Where the dev set will choose, the values that take most stand for the chosen ones."""
        study = self.grid.study
        cells = self.grid.dev_cells(model)
        taken = set()
        for variant in self.grid.variants(model):
            seeds: tuple[int, ...] = ()
            if study.chooses(variant):
                if variant.entry in taken:
                    continue
                taken.add(variant.entry)
                variant = max((v for v in study.variants if v.entry == variant.entry), key=lambda v: passes_of(v)[1])
                seeds = study.seeds[:1] if study.dev and "seeds" in study.dev.choose else ()
            cells += self.grid.cells("test", model, variant, seeds)
        return cells

    def work(self, model: Model) -> tuple[Counter[str], Counter[str]] | None:
        """The "passes" and "tokens" of what a study runs for a model, and of its cells if each is run by itself; `hf`
        is not counted. None if they cannot be estimated, which `lacking` explains."""
        cells = [cell for cell in self.cells(model) if cell.variant.method != HF]
        try:
            alone = sum((self._run_together([cell]) for cell in cells), Counter[str]())
            together = sum((self._run_together(batch.cells) for batch in batches(cells)), Counter[str]())
        except InputError as error:
            self.lacking[model.name] = error.message
            return None
        return together, alone

    def _run_together(self, cells: Sequence[Cell]) -> Counter[str]:
        """The passes and tokens of cells that differ only in the order and the number of passes: for each order the
        contexts, run with the largest number of passes, and for each number of passes the queries."""
        numbers = {passes_of(cell.variant)[1] for cell in cells}
        largest = max(cells, key=lambda cell: passes_of(cell.variant)[1])
        method = model_class(largest.variant.method).method_class.from_arguments(largest.variant.arguments)
        orders = 1 if method.invariant else len({cell.order for cell in cells})
        prompts = self._of(largest)
        layouts = method.passes(len(prompts.context.prefix), prompts.context.lengths)
        contexts = max(numbers) * (prompts.queries if method.memory_depends_on_query else prompts.contexts)
        packs = len(numbers) * -(-prompts.query_tokens // _PACK)
        tokens = contexts * len(layouts[0][1]) + len(numbers) * prompts.query_tokens
        return Counter(passes=orders * (contexts + packs), tokens=orders * tokens)

    def _of(self, cell: Cell) -> Prompts:
        """The prompts of a cell. Those of other seeds and orders, and of the dev set, count as many."""
        key = (cell.model.name, cell.task, cell.num_fewshot, cell.drawn)
        if key in self._prompts:
            return self._prompts[key]
        arguments = cell.model.arguments
        tokenizer = self._tokenizer(arguments)
        longest = int(arguments.get("max_length", PER_SEQUENCE))  # of MetaICL's sequences
        # What a model chooses is not known before it is loaded: rows that are drawn stand for it.
        drawn = "random" if isinstance(cell.demonstrations, How) else cell.demonstrations
        prepared = study_tasks.prepare(
            self.leaves[cell.task],
            *(cell.num_fewshot, drawn, cell.seed, 0, None, cell.limit),
            bind=lambda task: task.read_by(reader(tokenizer.tokenizer, arguments.get("add_bos_token"), longest)),
        )
        contexts, queries = Counter[Context](), dict[tuple[int, ...], int]()
        for instance in prepared.task.instances:
            prompt, scores = instance.args[0], instance.request_type == "loglikelihood"
            if isinstance(prompt, EncodedPrompt):
                tokens, answer = prompt.tokens, instance.args[1].ids
            else:
                if not isinstance(prompt, FewShotPrompt):  # a text that is scored as a whole, for example
                    prompt = FewShotPrompt("", (), prompt)
                text = instance.args[1] if scores else ""
                tokens, answer = tokenizer.pair(prompt, text) if text else (tokenizer.to_continue(prompt), ())
            contexts[tokens.context] += 1
            query = tokens.query
            queries[query] = queries.get(query, len(query)) + max(0, len(answer) - 1)
        (example, _), *_ = contexts.most_common(1)
        self._prompts[key] = Prompts(example, len(contexts), len(queries), sum(queries.values()))
        return self._prompts[key]

    def _tokenizer(self, model: Mapping[str, Any]) -> PromptTokenizer:
        name = str(model.get("tokenizer", model["pretrained"]))
        if name not in self._tokenizers:
            with refusing(f"tokenizer={name!r}: the tokenizer cannot be loaded"):
                arguments = {key: model[key] for key in ("revision", "subfolder", "trust_remote_code") if key in model}
                self._tokenizers[name] = PromptTokenizer(AutoTokenizer.from_pretrained(name, **arguments))
        return self._tokenizers[name]

    def record(self) -> list[dict[str, Any]]:
        """For each model: its cells, and the passes and tokens of the study and of the same cells run one by one, `hf`
        and training not counted. A model that `lacking` names has no passes and tokens."""
        models = []
        for model in self.grid.models:
            entry: dict[str, Any] = {"model": model.title, "cells": len(self.cells(model))}
            if work := self.work(model):
                for name, planned in zip(("", "_one_by_one"), work, strict=True):
                    entry |= {f"passes{name}": planned["passes"], f"tokens{name}": planned["tokens"]}
            models.append(entry)
        return models
