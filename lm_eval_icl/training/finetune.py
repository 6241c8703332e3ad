"""Trains a model under a method, and writes a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError, writing
from lm_eval_icl.files import HALF, read_json, write_atomically
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.predictor import Predictor
from lm_eval_icl.training.episodes import Episode, EpisodePool, RowDraw, Task, draw_episode
from lm_eval_icl.training.losses import draw_losses
from lm_eval_icl.training.metaicl_tasks import SettingTask
from lm_eval_icl.training.record import write
from lm_eval_icl.training.rows import RowMaker
from lm_eval_icl.training.settings import Settings as Settings
from lm_eval_icl.training.trainer import (
    EpisodeRows,
    HeldOut,
    LayoutTrainer,
    last_checkpoint,
    saving,
    step_of,
    training_arguments,
)

# A line before the training says how many episodes are left out until this many fit.
SAMPLE = 200
# The modules that get adapters, as peft names them: all linear ones but the output layer.
_LORA_TARGETS = "all-linear"


def claim(output: Path, identity: dict[str, Any], resume: bool) -> Path | None:
    """Take a folder for a run, and find the checkpoint from which the run continues.

    None if it begins.

    Args:
        identity: the run's arguments; they are written to the folder, and must be the same if the
            run resumes.

    Raises:
        InputError: the folder holds another run, or this run without `resume`, or other files, or
            cannot be written.
    """
    record = output / "training.json"
    known = json.loads(json.dumps(identity))
    recorded = read_json(record)
    if recorded is None:
        # Of a run that was stopped while it began there is a record that is not whole.
        begun = (record.name, HALF)
        others = output.iterdir() if output.is_dir() else ()
        if any(not path.name.startswith(begun) for path in others):
            raise InputError(
                f"--output {output}: there are other files in it: give an empty or a new folder."
            )
        with writing(f"--output {output}"):
            write_atomically(record, json.dumps(known, indent=1) + "\n")
        return None
    for name in {**known, **recorded}:
        if recorded.get(name) != known.get(name):
            raise InputError(
                f"--output {output}: holds another run, with another {name}: give another folder."
            )
    last = last_checkpoint(output / "checkpoints")
    if not resume and (last or (output / "config.json").is_file()):
        raise InputError(
            f"--output {output}: holds this run already: give --resume to continue, or another "
            "folder."
        )
    return last


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

    The folder gets the checkpoint, `training.json` with the run's arguments, Trainer's log and last
    checkpoints, and a picture of the loss.

    Args:
        model: the model, which is changed in place.
        tokenizer: its tokenizer, a fast one.
        method: the method. An episode is one row in its layout.
        tasks: the tasks from which episodes are drawn.
        output: the folder.
        settings: how training goes.
        fits: other methods. An episode is used only if its rows under `method` and under all of
            these methods have no more tokens than the model has positions (InvICL, appendix A.4).
        source: the name or folder of the model, for the record.
        identity: other arguments of the model and the tasks, which must be the same to resume.
        max_length, add_bos_token: as for `Predictor`.
        resume: continue from the last checkpoint in `output`, if there is one.
        cpu: train on the CPU even if there is an accelerator.
        dry_run: print how many rows there are and how many are left out, and train nothing.

    Raises:
        InputError: no model can be trained under the method, the model or a task cannot be used, or
            training fails.
    """
    settings = settings or Settings()
    under = partial(Predictor, model, tokenizer, max_length=max_length, add_bos_token=add_bos_token)
    predictor, rows, held_out = _rows(under, method, tasks, settings, fits)
    summary = _summary(rows, held_out, tasks, settings)
    if dry_run:
        print(summary)
        return
    use_cache = getattr(model.config, "use_cache", True)
    arguments = training_arguments(output, settings, cpu, use_cache, bool(held_out.rows))
    record = _record(method, tasks, settings, fits, source)
    run = record | settings.arguments | {"model": source} | dict(identity or {})
    del run["save_steps"]  # another number does not change the weights
    if isinstance(rows.draw, RowDraw):
        run["kept"] = rows.draw.shares
    with arguments.main_process_first(local=False):
        resume_from = claim(output, run, resume or arguments.process_index != 0)
    if arguments.process_index == 0:
        print(summary)
        if resume_from is not None:
            print(f"continuing from step {step_of(resume_from):,}")
    arguments.eval_on_start = arguments.do_eval and resume_from is None
    write(model.config, record)
    with predictor.runner.method_positions():
        model = _with_lora(model, settings) if settings.lora else model
        trainer = LayoutTrainer(model, arguments, rows, held_out)
        try:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        except KeyboardInterrupt:
            if trainer.is_world_process_zero():
                print(f"\n{output}: {_kept(output)}", file=sys.stderr)
            raise
        with saving(output):
            _save(trainer, tokenizer, output, method.name)


def _kept(output: Path) -> str:
    """What an interrupted run has kept, and how it goes on."""
    last = last_checkpoint(output / "checkpoints")
    if last is None:
        return "nothing is kept, since no checkpoint was written yet (--save_steps)."
    return f"step {step_of(last):,} is kept. The same command with --resume continues from there."


def _rows(
    under: Callable[[Method], Predictor],
    method: Method,
    tasks: Sequence[Task],
    settings: Settings,
    fits: Sequence[Method],
) -> tuple[Predictor, EpisodeRows, HeldOut]:
    """The model under the method, the rows to train on, and the rows that are held out."""
    for fitting in (method, *fits):
        why = fitting.why_not(settings.num_fewshot)
        if why:
            raise InputError(f"{fitting.name}: {why}.")
    predictor = under(method)
    make = RowMaker(predictor, settings.loss)
    all_methods = list(dict.fromkeys((method, *fits))) if fits else []
    makers = [RowMaker(under(fitting)) for fitting in all_methods]
    held_out_rows = settings.eval_documents if settings.eval_steps else 0
    pools = [EpisodePool(task, settings.num_fewshot, held_out_rows) for task in tasks]
    cut: list[Method] = []  # the methods under which MetaICL's rows are cut
    draw: Callable[[int, int], Episode]
    if settings.draw == "row":
        # MetaICL cuts rows that are too long. The episodes of all other tasks are used whole or not
        # at all.
        if all(isinstance(task, SettingTask) for task in tasks):
            cut = all_methods or [method]
        draw = RowDraw(pools, settings.seed, cut, all_remain=bool(fits))
    else:
        draw = partial(draw_episode, pools, settings.seed)
    rows = EpisodeRows(draw, make, makers, settings.steps * settings.batch_size)
    held_out: list[Any] = [episode for pool in pools for episode in pool.evaluation()]
    if fits:  # then the loss is that of the same whole prompts under every method
        held_out = [
            episode
            for episode in held_out
            if all(episode.task.remains(other, episode) for other in cut)
        ]
    return predictor, rows, _held_out(held_out, rows, predictor)


def _held_out(episodes: Iterable[Episode], rows: EpisodeRows, predictor: Predictor) -> HeldOut:
    """The rows of the held-out episodes that fit.

    Only the answer of the query is measured, also if loss="all" trains on more. If an option of an
    episode does not fit, the right answer alone is measured.
    """
    answers = RowMaker(predictor)
    held_out = HeldOut([], [])
    for episode in episodes:
        if rows.why_not(episode):
            continue
        example = episode.example
        options = list(example.options)
        right = example.right
        if any(answers.why_not(episode, option=option) for option in options):
            options = [example.answer]
            right = 0
        held_out.rows += [answers.row(episode, option) for option in options]
        held_out.choices.append((len(options), right))
    return held_out


def _summary(
    rows: EpisodeRows, held_out: HeldOut, tasks: Sequence[Task], settings: Settings
) -> str:
    """Lines that say how many rows there are, and how many are left out."""
    total = sum(map(len, tasks))
    lines = [
        f"{rows.make.method.name}: {len(tasks)} tasks with {total:,} rows, of which "
        f"{len(held_out.choices):,} are held out; {settings.num_fewshot} demonstrations an "
        f"episode, {settings.steps:,} steps of {settings.batch_size} episodes"
    ]
    if isinstance(rows.draw, RowDraw):
        lines.append(f"{len(rows.draw.rows):,} rows are used")
        if rows.draw.shares:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in rows.draw.shares.items())
            lines.append(f"rows whose tokens all fit under each method, without a cut: {shares}")
    number = min(SAMPLE, len(rows))
    left_out = sum(rows.episode(i)[1] for i in range(number))
    if left_out:
        lines.append(
            f"{left_out:,} episodes that do not fit were left out to get the first {number:,}"
        )
    return "\n".join(lines)


def _record(
    method: Method, tasks: Sequence[Task], settings: Settings, fits: Sequence[Method], source: str
) -> dict[str, Any]:
    """The record of a training for the checkpoint's configuration."""
    record = method.arguments | {
        "method": method.name,
        "tasks": [task.name for task in tasks],
        "num_fewshot": settings.num_fewshot,
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "loss": settings.loss,
        "fits": [other.name for other in fits],
        "seed": settings.seed,
        "from": Path(source).name if Path(source).is_dir() else source,  # no path of the machine
    }
    if settings.lora:
        record["lora"] = {
            "rank": settings.lora_rank,
            "alpha": settings.lora_alpha,
            "targets": _LORA_TARGETS,
        }
    return record


def _with_lora(model: PreTrainedModel, settings: Settings) -> Any:
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=_LORA_TARGETS,
    )
    torch.manual_seed(settings.seed)
    return peft.get_peft_model(model, config)


def _save(
    trainer: LayoutTrainer, tokenizer: PreTrainedTokenizerBase, output: Path, method: str
) -> None:
    """Write the model, the tokenizer, the log and its picture to the folder.

    Adapters are merged into the model, and also written to the folder's `adapter`.
    """
    model: Any = trainer.model
    adapted = hasattr(model, "merge_and_unload")
    trainer.save_model(str(output / "adapter" if adapted else output))
    if trainer.is_world_process_zero():
        if adapted:
            model.merge_and_unload().save_pretrained(output)
        tokenizer.save_pretrained(output)
        trainer.state.save_to_json(str(output / "trainer_state.json"))
        draw_losses(trainer.state.log_history, output / "loss.svg", method)
