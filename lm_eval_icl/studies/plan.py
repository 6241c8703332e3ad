"""The plan of a study: how many passes, tokens and minutes it takes, and whether prompts fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval.models.utils import resolve_max_length
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from lm_eval_icl import methods
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.harness.arguments import read_arguments
from lm_eval_icl.harness.requests import RequestTokenizer, fit_requests
from lm_eval_icl.metaicl.reading import reader
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.limits import PromptLimits, Request
from lm_eval_icl.prompts.tokens import PromptTokenizer
from lm_eval_icl.studies.cells import Cell, Grid, Model, batches, passes_of
from lm_eval_icl.studies.conduct import DONE, Failure, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.run import UnitRunner
from lm_eval_icl.studies.tasks import prepare

_TRIAL = 4  # the documents of a trial
_GENERATED = 256  # lm-eval's number of tokens of a generated text, if a task gives none


class Plan:
    """Counts the passes and tokens of a model's cells from their tokenized requests. The weights are not loaded.

    Raises:
        InputError: the tokenizer or the configuration cannot be loaded.
    """

    def __init__(self, grid: Grid, model: Model) -> None:
        self.grid = grid
        self.model = model
        self._requests: dict[tuple[Any, ...], Sequence[Request]] = {}
        given = model.arguments
        name = model.name
        hub_names = {"revision", "subfolder", "trust_remote_code"} & given.keys()
        hub = {key: given[key] for key in hub_names}
        with refusing(
            f"tokenizer={(where := str(given.get('tokenizer', name)))!r}: the tokenizer cannot be loaded"
        ):
            self.tokenizer = AutoTokenizer.from_pretrained(where, **hub)
        with refusing(f"pretrained={name!r}: the configuration cannot be loaded"):
            config = AutoConfig.from_pretrained(name, **hub)
        self.positions = int(
            given.get("max_length") or resolve_max_length(config, self.tokenizer, default=2048)
        )
        _, self.common, _ = read_arguments(methods.find("icl"), given)

    def work(self, cells: Sequence[Cell]) -> Counter[str]:
        """The "passes" and "tokens" of cells that are scored together. For each order, they are those of the contexts,
        times the largest number of passes, and of the queries, for each number of passes. lm-eval's own model runs
        whole prompts. Queries of decision rules and choices of demonstrations are not counted. An `InputError` is
        raised if a prompt does not fit."""
        numbers = {passes_of(cell.variant)[1] for cell in cells}
        first = max(cells, key=lambda cell: passes_of(cell.variant)[1])
        answers = Counter[
            Any
        ]()  # (context, query) -> tokens of its answers; a text is as long as it may be
        for request in self.requests(first):
            answers[request.prompt.context, request.prompt.query] += request.answer_positions
        tokens = sum(len(query) + answer for (_, query), answer in answers.items())
        contexts = [context for context, _ in answers]
        method, is_canonical = self.method_of(first)
        orders = 1 if is_canonical else len({cell.order for cell in cells})
        if first.variant.method == HF:
            whole = tokens + sum(len(context.tokens) for context in contexts)
            return Counter(passes=orders * len(contexts), tokens=orders * whole)
        if not method.memory_depends_on_query:
            contexts = list(dict.fromkeys(contexts))
        encoded = sum(
            len(method.passes(len(context.prefix), context.lengths)[0][1]) for context in contexts
        )
        passes = max(numbers) * len(contexts) + len(numbers) * -(-tokens // self.common.pack_tokens)
        return Counter(
            passes=orders * passes, tokens=orders * (max(numbers) * encoded + len(numbers) * tokens)
        )

    def requests(self, cell: Cell) -> Sequence[Request]:
        """The requests of a cell, shortened to fit the model, as if the study had no `fits`. Requests of other seeds,
        orders, labels and formats are assumed to be as long."""
        method, canonical = self.method_of(cell)
        bos = self.model.arguments.get("add_bos_token")
        key = str(method), cell.task, cell.num_fewshot, cell.drawn, cell.split
        if key not in self._requests:
            alike = method.treats_demonstrations_alike
            tokenize = RequestTokenizer(
                PromptTokenizer(self.tokenizer, None, bos, alike, canonical), _GENERATED
            )
            # The rows that a model will choose are not known: rows that are drawn stand for them.
            how = "random" if isinstance(cell.demonstrations, How) else cell.demonstrations
            stand_in = replace(cell, order=0, demonstrations=how)
            metaicl = reader(self.tokenizer, bos, self.positions)
            task = prepare(self.grid.study, self.grid.tasks[cell.task], stand_in, None, metaicl)
            instances = [i for i in task.instances if i.request_type != "loglikelihood_rolling"]
            limits = PromptLimits(
                method, self.model.name, self.positions, None, None, method.overflow_hint
            )
            overflow = "drop" if cell.variant.method == HF else self.common.overflow
            self._requests[key] = (
                fit_requests(instances, tokenize, limits, overflow, quiet=True) if instances else []
            )
        return self._requests[key]

    def method_of(self, cell: Cell) -> tuple[Method, bool]:
        """The method of a cell, and whether its demonstrations are encoded in canonical order. For lm-eval's own model,
        plain ICL in the given order."""
        if cell.variant.method == HF:
            return methods.make("icl"), False
        arguments = {**self.model.arguments, **cell.variant.arguments}
        method, common, _ = read_arguments(methods.find(cell.variant.method), arguments)
        return method, common.is_canonical(method)


def seconds_a_token(runner: UnitRunner, cells: Sequence[Cell]) -> tuple[float, ...]:
    """The seconds for a token in two trials of one unit, on few of its documents. No trials if the
    model must be trained first, or if no cell counts tokens (those of `hf` do not)."""
    units = [unit for unit in batches(cells) if unit[0].variant.method != HF]
    if not units or units[0][0].model.training:
        return ()
    trial = [replace(cell, limit=_TRIAL) for cell in units[0]]
    rates = []
    with TemporaryDirectory() as folder:  # the study's own need not be there
        runner.folder = StudyFolder(Path(folder))
        for _ in range(2):
            _, results = next(runner.run(trial))
            if isinstance(results, Failure):
                raise InputError(results)
            icl = results["config"]["icl"]
            rates.append(icl["study"]["shared"]["seconds"] / icl["tokens_run"])
    return tuple(sorted(rates))


def print_plan(grid: Grid, folder: StudyFolder, console: Console, runner: UnitRunner) -> None:
    """Print the passes, tokens and minutes of the missing cells, model by model. An `InputError`
    names models that cannot run."""
    missing: dict[str, list[Cell]] = defaultdict(list)
    for target, state in states(grid, folder, {}):
        if isinstance(target, Cell) and state != DONE:
            missing[str(target.model.arguments)].append(target)
    refused = []
    for cells in missing.values():
        line = f"{(name := cells[0].model.name)}: {len(cells):,} cells"
        try:
            plan = Plan(grid, cells[0].model)
            work = sum(map(plan.work, batches(cells)), Counter[str]())
            line += f", {work['passes']:,} forward passes, {work['tokens']:,} tokens"
            if rates := seconds_a_token(runner, cells):
                low, high = (rate * work["tokens"] / 60 for rate in rates)
                line += f", {low:.1f} to {high:.1f} minutes at the speed of two trials of one unit"
        except InputError as error:
            refused.append(name)
            line += f" that cannot be run: {error.message}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if refused:
        raise InputError(f"{', '.join(refused)}: cannot be run as it is, for the reasons above.")
