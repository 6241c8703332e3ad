"""Trains a model under a method, from its arguments to a checkpoint that any of these models can load."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError, Unsupported, log, one_line, writing
from lm_eval_icl.files import HALF, write_atomically
from lm_eval_icl.methods import ICL, InvICL
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.predictor import Predictor
from lm_eval_icl.training.episodes import ATTEMPTS_OF_A_TASK, Episode, EpisodePool, RowDraw, Task, draw_episode
from lm_eval_icl.training.metaicl import SettingTask
from lm_eval_icl.training.record import write
from lm_eval_icl.training.rows import RowMaker, check_trainable, collate, target_losses
from lm_eval_icl.training.settings import Settings as Settings
from lm_eval_icl.training.trainer import (
    EpisodeRows,
    LayoutTrainer,
    OptionRows,
    checkpoints,
    entries,
    quiet,
    training_arguments,
    why_not,
)

# Of so many episodes is said, before a training begins, how many fit and what else they are.
SAMPLE = 200
# The modules that get adapters, as peft names them: all linear ones but the output layer.
_LORA_TARGETS = "all-linear"


def check_lora(settings: Settings) -> None:
    """Refuse adapters that could not be trained or merged.

    Raises:
        InputError: the library peft is not installed, or the training is under FSDP or DeepSpeed.
    """
    if settings.lora and importlib.util.find_spec("peft") is None:
        raise InputError("--lora: needs the library peft: pip install peft.")
    if settings.lora and any(os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED")):
        raise InputError("--lora: adapters are not merged under FSDP or DeepSpeed: leave one of them out.")


def claim(output: Path, identity: dict[str, Any], resume: bool) -> Path | None:
    """Take a folder for a run, and find the checkpoint that the run goes on from.

    Args:
        output: the folder.
        identity: what the weights depend on; it is written to the folder, and must be the same if the run resumes.
        resume: go on from the last checkpoint, or begin if there is none.

    Returns:
        The checkpoint; None to begin.

    Raises:
        InputError: the folder holds another run, or one that is not to be resumed, or cannot be written.
    """
    record = output / "training.json"
    known, saved = json.loads(json.dumps(identity)), checkpoints(output / "checkpoints")
    if not record.is_file():
        if output.is_dir() and any(path.name != "checkpoints" and HALF not in path.name for path in output.iterdir()):
            raise InputError(f"--output {output}: there are other files in it: give an empty or a new folder.")
        with writing(f"--output {output}"):
            (output / "checkpoints").mkdir(parents=True, exist_ok=True)
            write_atomically(record, json.dumps(known, indent=1) + "\n")
        return None
    try:
        recorded = json.loads(record.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"--output {output}: training.json cannot be read ({error}).") from error
    for name in {**known, **recorded}:
        if recorded.get(name) != known.get(name):
            raise InputError(
                f"--output {output}: holds another run, which has {name}={recorded.get(name)!r} where this one has "
                f"{known.get(name)!r}: give another folder."
            )
    if not resume and (saved or (output / "config.json").is_file()):
        raise InputError(f"--output {output}: holds this run already: give --resume to go on, or another folder.")
    return saved[-1] if saved else None


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    tasks: Sequence[Task],
    output: Path,
    settings: Settings | None = None,
    *,
    fits: Sequence[Method] = (),
    source: str = "",
    identity: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    add_bos_token: bool | None = None,
    resume: bool = False,
    cpu: bool = False,
    dry_run: bool = False,
) -> None:
    """Train a model under a method, and save it as a checkpoint.

    The folder has the checkpoint (weights, configuration, tokenizer), `training.json` with the run's arguments,
    `log.jsonl`, `loss.png`, and the last two checkpoints of the training itself in `checkpoints`.

    Args:
        model: the model, which is changed in place.
        tokenizer: its tokenizer, a fast one.
        method: the method. An episode is one row in its layout.
        tasks: what episodes are drawn from.
        output: the folder.
        settings: how training goes.
        fits: methods: only episodes are used whose rows have, under these and under `method`, no more tokens than the
            model has positions (InvICL, appendix A.4).
        source: the name or folder of the model, for the record.
        identity: what else the model and the tasks were made with: a run resumes only if it is the same.
        max_length, add_bos_token: as for `Predictor`.
        resume: go on from the last checkpoint in `output`, if there is one.
        cpu: train on the CPU even if there is an accelerator.
        dry_run: print what there is to train on and what is left out, and train nothing.

    Raises:
        InputError: the method cannot be trained under, the model or a task cannot be used, or training fails.
    """
    settings = settings or Settings()
    check_lora(settings)
    check_trainable(method, settings.loss)
    for one_method in (method, *fits):
        if why := one_method.why_not(settings.num_fewshot):
            raise InputError(f"{one_method.name}: {why}.")
    make_predictor = partial(Predictor, model, tokenizer, max_length=max_length, add_bos_token=add_bos_token)
    predictor, pools, rows, held_out, other = _rows(make_predictor, method, tasks, settings, fits)
    _check_forward(predictor, rows.episode(0)[0], rows.make)
    record = _record(method, tasks, settings, fits, source)
    if dry_run:
        print(_summary(method, pools, held_out, settings, None), _used(rows, other), sep="\n")
        return

    with quiet():
        arguments = training_arguments(
            output, settings, cpu, getattr(model.config, "use_cache", True), len(held_out) > 0
        )
    known = {
        "model": source,
        **record,
        **settings.identity,
        **(identity or {}),
        "rows": {task.name: _digest(task) for task in tasks},
        "weights": _fingerprint(model),
        "processes": arguments.world_size,
        **({"kept": rows.draw.shares} if isinstance(rows.draw, RowDraw) and rows.draw.shares else {}),
    }
    with arguments.main_process_first(local=False):
        first = arguments.process_index == 0
        resume_from = claim(output, known, resume or not first)
    arguments.eval_on_start = arguments.do_eval and resume_from is None
    if first:
        print(_summary(method, pools, held_out, settings, resume_from), _used(rows, other), sep="\n")
    write(model.config, record)
    with quiet(), predictor.runner.own_positions():
        unused = [table.weight for table in predictor.runner.without_positions or () if table.weight.requires_grad]
        for weight in unused:  # several processes would wait for its gradient
            weight.requires_grad_(False)
        trained: Any = _with_lora(model, settings) if settings.lora else model
        collated = {"train_dataset": rows, "data_collator": partial(collate, dtype=model.dtype)}
        trainer = LayoutTrainer(trained, arguments, held_out if len(held_out) else None, **collated)
        try:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        except BaseException:
            with contextlib.suppress(OSError):  # the error is what has to be said
                _write_log(trainer, output)
            raise
        _save(trainer, trained, tokenizer, output)
        for weight in unused:
            weight.requires_grad_(True)
    with writing(f"--output {output}"):
        if log := _write_log(trainer, output):
            draw_loss(log, output / "loss.png", method.name)


def _rows(
    make_predictor: Callable[[Method], Predictor],
    method: Method,
    tasks: Sequence[Task],
    settings: Settings,
    fits: Sequence[Method],
) -> tuple[Predictor, list[EpisodePool], EpisodeRows, OptionRows, RowMaker | None]:
    """The model under the method, the tasks that are trained on, their rows, the rows that are held out, and what makes
    the rows of the method of which is said how many episodes it would leave out (`_used`)."""
    predictor = make_predictor(method)
    make = RowMaker(predictor, settings.loss)
    named = list(dict.fromkeys((method, *fits))) if fits else []
    others = [RowMaker(make_predictor(one_method)) for one_method in named]
    # MetaICL cuts rows that are too long. All other tasks' episodes are used whole or not at all.
    cut = all(isinstance(task, SettingTask) for task in tasks)
    rival = InvICL() if method.name == "icl" else ICL()
    held_out_rows = settings.eval_documents if settings.eval_steps else 0
    pools = [EpisodePool(task, settings.num_fewshot, held_out_rows) for task in tasks]
    draw: Callable[[int, int], Episode]
    if settings.draw == "row":
        draw = RowDraw(pools, settings.seed, (named or [method, rival]) if cut else (), all_remain=bool(fits))
    else:
        pools = _with_room(pools, make, others)
        draw = partial(draw_episode, pools, settings.seed)
    rows = EpisodeRows(draw, make, others, settings.steps * settings.batch_size)
    held_out = OptionRows([episode for pool in pools for episode in pool.evaluation()], make, others)
    other = None
    if not fits and not cut and not rival.why_not(settings.num_fewshot):
        with contextlib.suppress(Unsupported):  # the model is not for it
            other = RowMaker(make_predictor(rival))
    return predictor, pools, rows, held_out, other


def _with_room(pools: Sequence[EpisodePool], make: RowMaker, others: Sequence[RowMaker]) -> list[EpisodePool]:
    """The tasks of which at least one of a hundred random episodes fits (`why_not`). The others are warned of.

    Raises:
        InputError: there is no such task.
    """
    fitting = []
    for pool in pools:
        reasons = (why_not(pool.draw(Random(i)), make, others) for i in range(ATTEMPTS_OF_A_TASK))
        if all(why := reason for reason in reasons):
            none = f"of {ATTEMPTS_OF_A_TASK} episodes none fits ({why})"
            log.warning("training goes on without task %r: %s.", pool.task.name, none)
        else:
            fitting.append(pool)
    if not fitting:
        raise InputError(f"no task is left: {none}: lower --num_fewshot, or give tasks with shorter texts.")
    return fitting


def _used(rows: EpisodeRows, other: RowMaker | None) -> str:
    """What is said of the rows that are used: of all, if every row is drawn; else of the first episodes.

    Args:
        rows: the episodes of the training.
        other: for a method of which is said how many of the episodes it would leave out; None for none.
    """
    number = min(SAMPLE, len(rows))
    episodes, attempts = zip(*map(rows.episode, range(number)), strict=True)
    of_number = f"of the first {number:,} episodes"
    lines = []
    if isinstance(rows.draw, RowDraw):
        pools = rows.draw.pools
        used = Counter(pool.task.name for pool, _ in rows.draw.rows)
        lines.append(f"{len(rows.draw.rows):,} of {sum(len(pool.rows) for pool in pools):,} rows are used")
        if rows.draw.shares:
            fitting = ", ".join(f"{name} {share:.1%}" for name, share in rows.draw.shares.items())
            lines.append(f"rows of which nothing is cut, by the tokens that they have under a method: {fitting}")
        if none := [pool.task.name for pool in pools if not used[pool.task.name]]:
            lines.append(f"no row is used of {len(none)} tasks: {', '.join(none)}")
    if any(attempts):
        lines.append(f"{sum(attempts):,} episodes that do not fit were left out to have the first {number:,}")
    if other is not None and (beyond := sum(not other.has_room(episode) for episode in episodes)):
        name, positions = other.method.name, other.limits.positions
        lines.append(
            f"{of_number}, {name} would leave out {beyond:,}, whose rows then have more tokens than the model has "
            f"positions ({positions:,}). --fits {name} leaves them out"
        )
    if copies := sum(episode.copies for episode in episodes):
        what = "are replaced by other rows" if episodes[0].task.replaces_copies else "stay, as in MetaICL"
        lines.append(f"{of_number}, {copies:,} demonstrations say what their query says and {what}")
    return "\n".join(lines)


def _check_forward(predictor: Predictor, episode: Episode, make: RowMaker) -> None:
    """Refuse a method or a model with which training would run something else than scoring does.

    Raises:
        InputError: the log-probabilities of an answer differ.
    """
    if not make.fits(episode):
        return
    right = episode.example.right
    row = make.row(episode, right)
    with predictor.runner.inference_mode():
        losses, _ = target_losses(predictor.runner.model, collate([row], predictor.runner.model.dtype))
    prompt, answer = make.tokens(episode, right)
    [(_, [(scored, _)])] = predictor.runner.score({prompt.context: {prompt.query: [answer]}})
    tolerance = 1e-3 if predictor.runner.model.dtype in (torch.float32, torch.float64) else 0.1
    trained = -float(losses.sum())
    if not abs(trained - scored) <= tolerance * max(1.0, abs(scored)):
        raise InputError(
            f"{predictor.runner.method.name} on {type(predictor.runner.model).__name__}: a training pass gives "
            f"{trained:.4f} for the log-probability of an answer, and scoring {scored:.4f}: what would be trained is "
            "not what is evaluated."
        )


def _digest(task: Task) -> str:
    """A digest of a task's number of rows, and of some of the rows."""
    rows = range(0, len(task), max(1, len(task) // 64))
    texts = [[str(example.prompt), *example.options, example.right] for example in (task.example((), i) for i in rows)]
    return hashlib.sha256(json.dumps([len(task), texts]).encode()).hexdigest()[:16]


def _fingerprint(model: PreTrainedModel) -> str:
    """A digest of some of the weights that a model begins with."""
    digest = hashlib.sha256()
    for name, weights in model.named_parameters():
        digest.update(name.encode() + weights.detach().flatten()[:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _summary(
    method: Method, pools: Sequence[EpisodePool], held_out: OptionRows, settings: Settings, resume_from: Path | None
) -> str:
    rows, measured = sum(len(pool.rows) for pool in pools), len(held_out.episodes)
    available = sum(len(pool.held_out) for pool in pools)
    begins = f"goes on from {resume_from.name}" if resume_from else "begins"
    accuracy = f"accuracy on {measured} of {available} rows that are held out" if measured else "no rows are held out"
    if replaced := sum(episode.replaced for episode in held_out.episodes):
        accuracy += f", behind {replaced} demonstrations that replace some which say what their query says"
    return (
        f"{method.name}: training {begins}: {len(pools)} tasks with {rows:,} rows, {settings.num_fewshot} "
        f"demonstrations an episode, {settings.steps:,} steps of {settings.batch_size} episodes; {accuracy}"
    )


def _record(
    method: Method, tasks: Sequence[Task], settings: Settings, fits: Sequence[Method], source: str
) -> dict[str, Any]:
    """The record of a training for the checkpoint's configuration."""
    lora = {"rank": settings.lora_rank, "alpha": settings.lora_alpha, "targets": _LORA_TARGETS}
    return {
        "method": method.name,
        **dataclasses.asdict(method),
        "tasks": [task.name for task in tasks],
        "num_fewshot": settings.num_fewshot,
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "loss": settings.loss,
        **({"lora": lora} if settings.lora else {}),
        "fits": [other.name for other in fits],
        "seed": settings.seed,
        "from": Path(source).name if Path(source).is_dir() else source,  # no path of the machine
    }


def _with_lora(model: PreTrainedModel, settings: Settings) -> Any:
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=_LORA_TARGETS
    )
    torch.manual_seed(settings.seed)
    return peft.get_peft_model(model, config)


def _save(trainer: LayoutTrainer, model: Any, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write the trained model and the tokenizer to the folder; adapters merged, and in its folder `adapter`."""
    try:
        adapted = trainer.args.process_index == 0 and hasattr(model, "merge_and_unload")
        trainer.save_model(str(output / "adapter" if hasattr(model, "merge_and_unload") else output))
        if adapted:
            model.merge_and_unload().save_pretrained(output)
        if trainer.args.process_index == 0:
            tokenizer.save_pretrained(output)
            # Trainer's own arguments, pickled: training.json has the run's.
            for folder in (output, output / "adapter"):
                (folder / "training_args.bin").unlink(missing_ok=True)
    except Exception as error:
        raise InputError(
            f"--output {output}: the trained model could not be written ({one_line(error)}): --resume goes on from the "
            "last checkpoint when there is room."
        ) from error


def _write_log(trainer: LayoutTrainer, output: Path) -> list[dict[str, float]]:
    """Write what has been logged to `log.jsonl`, and return it; nothing in other processes than the first."""
    log = entries(trainer.state.log_history) if trainer.args.process_index == 0 else []
    if log:
        write_atomically(output / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in log))
    return log


def draw_loss(entries: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the loss of each step and its mean over ten steps, and the accuracy on held-out rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    loss = figure.subplots()
    parts = [entry for entry in entries if "loss" in entry]
    steps, losses = [entry["step"] for entry in parts], [entry["loss"] for entry in parts]
    means = [sum(near) / len(near) for i in range(len(losses)) if (near := losses[max(0, i - 5) : i + 5])]
    loss.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8)
    loss.plot(steps, means, color="C0")
    loss.set(xlabel="step", title=f"Training under {title}", yscale="log")
    loss.set_ylabel("training loss", color="C0")
    measured = [entry for entry in entries if "accuracy" in entry]
    if measured:
        accuracy = loss.twinx()
        accuracy.plot([m["step"] for m in measured], [m["accuracy"] for m in measured], "o-", color="C1")
        accuracy.set(ylim=(0, 1.02))
        accuracy.set_ylabel("accuracy on held-out rows", color="C1")
    figure.savefig(path)
