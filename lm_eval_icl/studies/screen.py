"""What `--dry_run` and `--status` print: a study on one screen, and the long lists only if they are asked for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from lm_eval.models.utils import resolve_max_length
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer

from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.harness.arguments import CommonArguments
from lm_eval_icl.harness.requests import RequestTokenizer, fit_requests
from lm_eval_icl.metaicl.reading import reader
from lm_eval_icl.methods import find
from lm_eval_icl.methods.limits import PromptLimits, Request
from lm_eval_icl.prompts.tokens import PromptTokenizer
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.cells import Cell, Model, batches, passes_of, together
from lm_eval_icl.studies.conduct import DONE, READY, WAITING, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.opening import Opened
from lm_eval_icl.studies.parts import Variant
from lm_eval_icl.studies.run import Models, OneTokenizer, Options
from lm_eval_icl.studies.units import make_room

_MODELS = 6  # rows of the table of models that fit on a screen with all else
_NAME = 26  # characters of a model's name in it
_LINE = 150  # characters of a list of methods or tasks
_PASSES = 4  # that are measured


class Plan:
    """What a study would run.

    Attributes:
        lacking: what cannot be had or run, by name, with the reason.
    """

    def __init__(self, opened: Opened, options: Options) -> None:
        self.opened, self.grid, self.options = opened, opened.grid, options
        self.lacking: dict[str, str] = {}
        self._parts: dict[str, tuple[Any, int]] = {}
        self._tokenizers: dict[tuple[str, bool, bool], OneTokenizer] = {}
        self._tasks: dict[tuple[Any, ...], Any] = {}
        self._requests: dict[tuple[Any, ...], Sequence[Request]] = {}

    def cells(self, model: Model) -> list[Cell]:
        """All cells of a model. Where the dev set will choose, the values that take most stand for the chosen ones."""
        cells: list[Cell] = []
        for candidates in self.grid.alternatives:
            if candidates[0].test[0].model is model:
                cells += {cell.path: cell for candidate in candidates for cell in candidate.dev}.values()
                cells += max(candidates, key=lambda candidate: passes_of(candidate.variant)[1]).test
        return cells

    def work(self, cells: Sequence[Cell]) -> Counter[str]:
        """The "passes" and "tokens" of these cells.

        Raises:
            InputError: their prompts cannot be had, or do not fit the model.
        """
        return sum((self._batch(alike) for same in batches(cells) for alike in together(same)), Counter[str]())

    def _batch(self, cells: Sequence[Cell]) -> Counter[str]:
        """The work of cells that are scored together: for each order the contexts, in the largest number of passes, and
        the queries for each number. lm-eval's own model runs whole prompts."""
        numbers = {passes_of(cell.variant)[1] for cell in cells}
        largest = max(cells, key=lambda cell: passes_of(cell.variant)[1])
        orders = len({cell.order for cell in cells})
        requests = self.requests(largest)
        contexts = {request.prompt.context: None for request in requests}
        queries = Counter[Any]()
        for request in requests:
            queries[request.prompt.context, request.prompt.query] += max(0, len(request.answer) - 1)
        tokens = sum(len(query) + answers for (_, query), answers in queries.items())
        if largest.variant.method == HF:
            whole = sum(len(context.tokens) for context, _ in queries)
            return Counter(passes=orders * len(queries), tokens=orders * (whole + tokens))
        method = find(largest.variant.method).from_arguments(largest.variant.arguments)
        orders = 1 if method.invariant else orders
        encoded = [query_context for query_context, _ in queries] if method.memory_depends_on_query else list(contexts)
        lengths = [len(method.passes(len(c.prefix), c.lengths)[0][1]) for c in encoded]
        packs = len(numbers) * -(-tokens // CommonArguments().pack_tokens)
        of_memories = max(numbers) * sum(lengths)
        passes = max(numbers) * len(lengths) + packs
        return Counter(passes=orders * passes, tokens=orders * (of_memories + len(numbers) * tokens))

    def requests(self, cell: Cell) -> Sequence[Request]:
        """The requests of a cell, as they fit the model. Those of other seeds and orders, and of the dev set, are taken
        to be as many and as long.

        Raises:
            InputError: the tokenizer cannot be had, or prompts do not fit.
        """
        variant = cell.variant if cell.variant.method != HF else Variant("icl", {}, 0)
        method = find(variant.method).from_arguments(variant.arguments)
        model, arguments = cell.model.name, cell.model.arguments
        key = (model, str(method), cell.task, cell.num_fewshot, cell.drawn)
        if key in self._requests:
            return self._requests[key]
        tokenizer, positions = self._model(arguments)
        common = CommonArguments(**{k: v for k, v in arguments.items() if k in CommonArguments.__dataclass_fields__})
        alike, canonical = method.treats_demonstrations_alike, common.is_canonical(method)
        if (kind := (model, alike, canonical)) not in self._tokenizers:
            prompts = PromptTokenizer(tokenizer, None, arguments.get("add_bos_token"), alike, canonical)
            self._tokenizers[kind] = OneTokenizer(RequestTokenizer(prompts, 256))
        if (which := (model, cell.task, cell.num_fewshot, cell.drawn)) not in self._tasks:
            # What a model chooses is not known before it is loaded: rows that are drawn stand for it.
            drawn = "random" if isinstance(cell.demonstrations, How) else cell.demonstrations
            self._tasks[which] = study_tasks.prepare(
                self.opened.leaves[cell.task],
                *(cell.num_fewshot, drawn, cell.seed, 0, None, cell.limit),
                bind=lambda task: task.read_by(reader(tokenizer, arguments.get("add_bos_token"), positions)),
            )
        instances = [i for i in self._tasks[which].instances if i.request_type != "loglikelihood_rolling"]
        limits = PromptLimits(method, model, positions, None, None, method.overflow_hint)
        overflow = "drop" if cell.variant.method == HF else common.overflow
        fitted = fit_requests(instances, self._tokenizers[kind], limits, overflow, quiet=True) if instances else []
        self._requests[key] = fitted
        return fitted

    def _model(self, arguments: Mapping[str, Any]) -> tuple[Any, int]:
        """The tokenizer and the number of positions of a model, without its weights."""
        name = str(arguments["pretrained"])
        if name not in self._parts:
            of_hub = {key: arguments[key] for key in ("revision", "subfolder", "trust_remote_code") if key in arguments}
            where = str(arguments.get("tokenizer", name))
            with refusing(f"tokenizer={where!r}: the tokenizer cannot be loaded"):
                tokenizer = AutoTokenizer.from_pretrained(where, **of_hub)
            with refusing(f"pretrained={name!r}: the configuration cannot be loaded"):
                positions = resolve_max_length(AutoConfig.from_pretrained(name, **of_hub), tokenizer, default=2048)
            self._parts[name] = tokenizer, int(arguments.get("max_length", positions))
        return self._parts[name]

    def tokens_per_second(self, model: Model) -> float | None:
        """How fast a model is, by a few passes under plain ICL; None if its weights are not here."""
        if not Path(model.name).is_dir():
            try:
                snapshot_download(model.name, local_files_only=True)
            except Exception:  # of many kinds
                return None
        requests = self.requests(self.cells(model)[0])
        prompts = [(request.prompt, request.answer) for request in requests[:8] if request.answer]
        make_room()  # which the model before may have taken
        lm = Models(model.arguments, self.options).first
        speeds = []
        for _ in range(_PASSES if prompts else 0):
            lm.begin([])
            begun = time.perf_counter()
            for _ in lm.runner.score_prompts(prompts):
                pass
            speeds.append(lm.runner.tokens_run / (time.perf_counter() - begun))
        return max(speeds, default=None)


def print_plan(
    opened: Opened, options: Options, lacking: dict[str, str], console: Console, verbose: bool
) -> Mapping[str, str]:
    """Print what a study would run: how many cells, forward passes and tokens, how long, and what is missing.

    Args:
        lacking: why tasks and trainings cannot be had, by name.
        verbose: list all cells, models and checkpoints.

    Returns:
        What is missing, or would be refused, by name, with the reason.
    """
    estimate, study = Plan(opened, options), opened.grid.study
    models = opened.grid.models
    cells = [cell for model in models for cell in estimate.cells(model)]
    trained = [model.checkpoint for model in models if model.training]
    if verbose:
        for line in (*(f"to be trained: {checkpoint}" for checkpoint in trained), *(cell.path for cell in cells)):
            _print(console, line)
    dev = sum(cell.split == "dev" for cell in cells)
    _print(console, f"{len(cells):,} cells: {len(cells) - dev:,} on the test set, {dev:,} on the dev set")
    _print(console, _counted("methods", (cell.variant.method for cell in cells), verbose))
    _print(console, _counted("tasks", (cell.task for cell in cells), verbose))
    if trained:
        _print(console, f"to be trained first, which is not counted: {len(trained)} checkpoints")
    table = Table(title="estimate of forward passes and tokens", title_justify="left", box=None, pad_edge=False)
    table.add_column("model", width=_NAME, no_wrap=True)
    for column in ("cells", "passes", "tokens", "time"):
        table.add_column(column, justify="right")
    speeds: dict[str, float | None] = {}
    lacking = dict(lacking)
    for number, model in enumerate(models):
        shown = ["?"] * 3
        try:
            work = estimate.work(estimate.cells(model))
            if model.name not in speeds and (verbose or number < _MODELS):
                speeds[model.name] = estimate.tokens_per_second(model)
            speed = speeds.get(model.name)
            shown = [f"{work['passes']:,}", f"{work['tokens']:,}", _duration(work["tokens"] / speed) if speed else "?"]
        except InputError as error:
            lacking.setdefault(model.name, error.message)
        if verbose or number < _MODELS:
            name = model.title if len(model.title) <= _NAME else f"...{model.title[3 - _NAME :]}"
            table.add_row(Text(name), f"{len(estimate.cells(model)):,}", *shown)
    console.print(table)
    if not verbose and len(models) > _MODELS:
        _print(console, f"and {len(models) - _MODELS} more models (--verbose)")
    chooses = any(isinstance(how, How) for how in study.demonstrations)
    for sentence in (
        "Times are by a few passes that were measured here, under icl." if any(speeds.values()) else "",
        "Cells that depend on the dev set are counted with the values that take most." if study.dev else "",
        "What the models take to choose demonstrations is not counted." if chooses else "",
        f"Every cell has the decision rules {', '.join(map(str, study.rules))}; their queries are not counted."
        if study.rules
        else "",
        "" if any(speeds.values()) else "No time is estimated: it needs a model's weights, to measure a few passes.",
    ):
        if sentence:
            _print(console, sentence)
    for name, why in lacking.items():
        _print(console, f"missing: {name}: {why}")
    return lacking


def print_status(opened: Opened, folder: StudyFolder, console: Console, verbose: bool) -> None:
    """Print how many cells are in which state, and why some could not be made.

    Args:
        verbose: list all targets that are not done.
    """
    failed = folder.record().get("failures", {})
    known = states(opened.grid, folder, failed)
    names = {DONE: "done", READY: "missing", WAITING: "waiting for others"}
    for state, number in Counter(names.get(s, "failed") for target, s in known if isinstance(target, Cell)).items():
        _print(console, f"{number} {state}")
    if folder.is_running:
        _print(console, "running: another process runs this study")
    for target, state in known:
        if state not in names:
            _print(console, f"failed: {target.path}: {state}")
        elif verbose and state != DONE:
            _print(console, f"{names[state]}: {target.path}")


def _duration(seconds: float) -> str:
    length, unit = next(part for part in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= part[0] or part[0] == 1)
    return f"{seconds / length:.1f} {unit}"


def _counted(what: str, names: Iterable[str], verbose: bool) -> str:
    """How many cells have each name, in a line that may be cut."""
    parts = [f"{name} {number:,}" for name, number in Counter(names).most_common()]
    for shown in range(1, len(parts)):
        line = f"{what}: {', '.join(parts[:shown])}, "
        if not verbose and len(line) + len(parts[shown]) > _LINE:
            return f"{line}and {len(parts) - shown} more (--verbose)"
    return f"{what}: {', '.join(parts)}"


def _print(console: Console, text: str) -> None:
    # Reasons have the texts of other people's tasks: nothing that a terminal would obey.
    console.print(Text("".join(c if c.isprintable() else "\ufffd" for c in text)), soft_wrap=True)
