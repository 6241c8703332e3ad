"""transformers' Trainer on rows of episodes: its arguments, the loss and the accuracy."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.files import read_json
from lm_eval_icl.inference.devices import peak_bytes
from lm_eval_icl.training.episodes import ATTEMPTS_OF_A_TASK, Episode
from lm_eval_icl.training.rows import RowMaker, TrainingRow, collate, mean_loss, row_losses
from lm_eval_icl.training.settings import Settings

# After this many episodes of one number that do not fit, training is refused.
_ATTEMPTS = 10 * ATTEMPTS_OF_A_TASK


@dataclass(eq=False)
class EpisodeRows(Dataset[TrainingRow]):
    """The rows of the episodes 0, 1, ...; each episode fits under every method of `fits`.

    Attributes:
        draw: maps (number, attempt) to an episode; `attempt` is how many episodes before it did not
            fit.
        make: makes the rows.
        fits: makers of rows under all methods whose tokens have to fit (InvICL, appendix A.4).
        size: how many episodes there are.
    """

    draw: Callable[[int, int], Episode]
    make: RowMaker
    fits: Sequence[RowMaker]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> TrainingRow:
        return self.make.row(self.episode(number)[0])

    def episode(self, number: int) -> tuple[Episode, int]:
        """The episode of a number, and how many were drawn before it and did not fit.

        Raises:
            InputError: none fits.
        """
        for attempt in range(_ATTEMPTS):
            episode = self.draw(number, attempt)
            why = self.why_not(episode)
            if not why:
                return episode, attempt
        raise InputError(
            f"task {episode.task.name!r}: none of {_ATTEMPTS:,} episodes fits the model ({why}): "
            "lower --num_fewshot, or give tasks with shorter texts."
        )

    def why_not(self, episode: Episode) -> str:
        """Why an episode does not fit; empty if it fits."""
        for maker in (self.make, *self.fits):
            why = maker.why_not(episode, by_tokens=maker is not self.make)
            if why:
                return f"under {maker.method.name}, its rows {why}"
        return ""


@dataclass
class HeldOut:
    """The rows of held-out episodes, one for each option. The options of an episode are adjacent.

    Attributes:
        rows: the rows.
        choices: for each episode, how many options it has, and which is right.
    """

    rows: list[TrainingRow]
    choices: list[tuple[int, int]]

    def measure(self, losses: Sequence[float]) -> dict[str, float]:
        """The mean loss of right answers, and the share of episodes whose right answer is best.

        Args:
            losses: the loss of each row, summed over its tokens. The best option of an episode is
                that with the smallest sum, as in lm-eval's `acc`.
        """
        right_losses = []
        is_right = []
        begin = 0
        for count, right in self.choices:
            of_episode = losses[begin : begin + count]
            right_losses.append(of_episode[right] / len(self.rows[begin + right].targets))
            if count > 1:
                is_right.append(of_episode.index(min(of_episode)) == right)
            begin += count
        measured = {"eval_loss": sum(right_losses) / len(right_losses)}
        if is_right:
            measured["eval_accuracy"] = sum(is_right) / len(is_right)
        return measured


def training_arguments(
    output: Path, settings: Settings, cpu: bool, use_cache: bool, evaluates: bool
) -> TrainingArguments:
    """Trainer's arguments for a training with its checkpoints below `output`.

    Args:
        use_cache: the value in the model's configuration, which Trainer would otherwise change.
        evaluates: whether there are held-out rows on which the loss is measured.

    Raises:
        InputError: Trainer refuses them, or the batch cannot be divided among the processes.
    """
    parts = int(os.environ.get("WORLD_SIZE", "1")) * settings.gradient_accumulation_steps
    if settings.batch_size % parts:
        what = "processes x --gradient_accumulation_steps"
        raise InputError(
            f"--batch_size {settings.batch_size}: must be a multiple of {parts}: {what}."
        )
    renamed = hasattr(TrainingArguments, "activation_checkpointing")  # from transformers 5.23 on
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    checkpointing: Any = {name: settings.gradient_checkpointing}
    with refusing("transformers' Trainer refuses these settings"):
        arguments = TrainingArguments(
            output_dir=str(output / "checkpoints"),
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size // parts,
            per_device_eval_batch_size=settings.batch_size // parts,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            **checkpointing,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            seed=settings.seed,
            bf16=settings.bf16,
            use_cpu=cpu or not torch.accelerator.is_available(),
            log_level="error",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_steps=settings.save_steps,
            save_total_limit=2,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=settings.eval_steps if evaluates else None,
            restore_callback_states_from_checkpoint=True,
            include_num_input_tokens_seen="all",
            remove_unused_columns=False,
            use_cache=use_cache,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            accelerator_config={"non_blocking": torch.cuda.is_available()},
        )
    # One process trains on one device. Trainer would take all GPUs that it sees (DataParallel),
    # with larger batches.
    _ = arguments.device
    arguments._n_gpu = min(arguments._n_gpu, 1)
    return arguments


class LayoutTrainer(Trainer):
    """Trains a model on rows of episodes.

    Args:
        rows: the rows, in the order of the training.
        held_out: the rows on which loss and accuracy are measured; they may be none.

    Raises:
        InputError: (while training) a loss or a gradient is not finite. The weights after such a
            step are not saved.
    """

    # The loss is a mean over the rows of one batch, which Trainer divides by the number of batches
    # of a step.
    loss_is_scaled_for_ga = False

    def __init__(
        self, model: Any, args: TrainingArguments, rows: EpisodeRows, held_out: HeldOut
    ) -> None:
        self.held_out = held_out
        data: Any = {"train_dataset": rows, "eval_dataset": held_out.rows or None}
        super().__init__(model, args, data_collator=partial(collate, dtype=model.dtype), **data)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(LossProgress)
        self.add_callback(Costs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]  # the draw is random already

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        return mean_loss(model, inputs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        model: Any = self.model
        model.eval()
        self.callback_handler.eval_dataloader = dataloader
        losses: list[float] = []
        for batch in dataloader:
            with torch.no_grad(), self.compute_loss_context_manager():
                of_rows = row_losses(model, self._prepare_inputs(batch))
            losses += self.accelerator.gather_for_metrics(of_rows).tolist()
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
        measured = self.held_out.measure(losses)
        # Without predictions, although the type asks for some.
        return EvalLoopOutput(None, None, measured, len(self.held_out.choices))  # type: ignore[arg-type]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for name in ("loss", "grad_norm", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise InputError(
                    f"{name} is {logs[name]} at step {self.state.global_step}: train with a lower "
                    "--learning_rate, or in float32, in another --output."
                )
        super().log(logs, start_time)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with saving(self.args.output_dir):
            super()._save_checkpoint(*args, **kwargs)


def saving(folder: object) -> Any:
    """A context manager in which libraries write a model.

    Each library has an error of its own for a full disk.
    """
    advice = "Run the same command with --resume when the disk has room."
    return refusing(f"--output {folder}: a checkpoint cannot be written", advice)


class LossProgress(ProgressCallback):
    """transformers' two progress bars, with labels.

    The bar of the training has the last numbers at its end, in place of a line for each step.
    """

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self._numbers: dict[str, float] = {}
        if self.training_bar is not None:
            self.training_bar.set_description("training")

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        super().on_prediction_step(*args, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.set_description("evaluation")

    def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
        for name in ("loss", "eval_loss", "eval_accuracy"):
            if name in logs:
                self._numbers[name] = round(logs[name], 4)
        if self.training_bar is not None:
            self.training_bar.set_postfix(self._numbers)


class Costs(TrainerCallback, ExportableState):
    """The seconds of all steps, and the most memory of a process (`peak_bytes`).

    Trainer writes them to `trainer_state.json`, from which a training that continues goes on.
    """

    def __init__(self, seconds: float = 0.0, memory: int = 0) -> None:
        self.seconds = seconds
        self.memory = memory

    def state(self) -> dict[str, Any]:
        return {"args": {"seconds": self.seconds, "memory": self.memory}, "attributes": {}}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._begun
        self.memory = max(self.memory, peak_bytes(args.device))


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint in a folder, if there is one.

    Trainer writes its state at the end.
    """
    states = folder.glob("checkpoint-*/trainer_state.json")
    whole = [state.parent for state in states if all(map(_is_whole, state.parent.iterdir()))]
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def _is_whole(file: Path) -> bool:
    """Whether a file of a checkpoint has its end. After a power failure it may have none."""
    if file.suffix == ".json":
        return read_json(file) is not None
    if file.suffix == ".safetensors":
        with suppress(SafetensorError), safe_open(file, "pt"):
            return True
        return False
    if file.suffix in (".pt", ".pth", ".bin"):  # torch.save makes archives
        return is_zipfile(file)
    return file.stat().st_size > 0
