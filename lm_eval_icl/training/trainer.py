"""transformers' Trainer on rows of episodes: the loss, the accuracy on held-out episodes, and whole checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import ProgressCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalPrediction
from transformers.utils import logging

from lm_eval_icl.errors import InputError, one_line
from lm_eval_icl.inference.devices import on_device
from lm_eval_icl.training.episodes import ATTEMPTS_OF_A_TASK, Episode
from lm_eval_icl.training.rows import RowMaker, TrainingRow, mean_loss, target_losses
from lm_eval_icl.training.settings import Settings

# So many episodes of one number are drawn until it is said that none fits.
_ATTEMPTS = 10 * ATTEMPTS_OF_A_TASK


def why_not(episode: Episode, make: RowMaker, fits: Sequence[RowMaker], option: int | None = None) -> str:
    """Why an episode does not fit the model under a method, or, with all tokens of its row, under one of `fits`; empty
    if it fits."""
    for maker in (make, *fits):
        if why := maker.why_not(episode, option):
            return f"under {maker.method.name}, its rows {why}"
    for maker in fits:
        if not maker.has_room(episode, option):
            return f"under {maker.method.name}, its rows have more tokens than the {maker.limits.positions:,} positions"
    return ""


@dataclass(eq=False)
class EpisodeRows(Dataset[TrainingRow]):
    """The rows of the episodes 0, 1, ...; each episode fits under every method of `fits`.

    Attributes:
        draw: the episode of a number, and of an attempt if those before it did not fit.
        make: makes the rows.
        fits: for the methods under which the tokens of a row have to fit too (`why_not`).
        size: how many episodes there are.

    Raises:
        InputError: (when a row is made) of a thousand draws none fits.
    """

    draw: Callable[[int, int], Episode]
    make: RowMaker
    fits: Sequence[RowMaker]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> TrainingRow:
        return replace(self.make.row(self.episode(number)[0]), number=number)

    def episode(self, number: int) -> tuple[Episode, int]:
        """The episode of a number, and how many were drawn before it and did not fit."""
        for attempt in range(_ATTEMPTS):
            episode = self.draw(number, attempt)
            if not (why := why_not(episode, self.make, self.fits)):
                return episode, attempt
        raise InputError(
            f"task {episode.task.name!r}: none of {_ATTEMPTS:,} episodes fits the model ({why}): lower --num_fewshot, "
            "or give tasks with shorter texts."
        )


class OptionRows(Dataset[TrainingRow]):
    """A row for each option of episodes that are held out. An episode is left out if a row of it does not fit.

    Attributes:
        episodes: those that fit.
    """

    def __init__(self, episodes: Sequence[Episode], make: RowMaker, fits: Sequence[RowMaker]) -> None:
        self.make = make
        self.episodes: list[Episode] = []
        self._options: list[tuple[int, int]] = []  # the number of an episode among these, and of an option
        for episode in episodes:
            options = range(len(episode.example.options))
            if not any(why_not(episode, make, fits, option) for option in options):
                self._options += [(len(self.episodes), option) for option in options]
                self.episodes.append(episode)

    def __len__(self) -> int:
        return len(self._options)

    def __getitem__(self, i: int) -> TrainingRow:
        number, option = self._options[i]
        return replace(self.make.row(self.episodes[number], option), number=number)


def per_pass(settings: Settings, processes: int) -> int:
    """How many episodes a process runs in one pass.

    Raises:
        InputError: the batch cannot be divided so.
    """
    parts = processes * settings.gradient_accumulation_steps
    if settings.batch_size % parts:
        raise InputError(
            f"--batch_size {settings.batch_size}: must be a multiple of {parts}: {processes} processes, "
            f"--gradient_accumulation_steps {settings.gradient_accumulation_steps}."
        )
    return settings.batch_size // parts


def training_arguments(
    output: Path, settings: Settings, cpu: bool, use_cache: bool, evaluates: bool
) -> TrainingArguments:
    """Trainer's arguments for a training with its checkpoints below `output`.

    Args:
        cpu: train on the CPU even if there is an accelerator.
        use_cache: what the trained model's configuration says of its cache.
        evaluates: there are rows that are held out.

    Raises:
        InputError: Trainer refuses them, or the batch cannot be divided among the processes.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    passed = per_pass(settings, processes)
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": settings.eval_steps}
    try:
        arguments = TrainingArguments(
            output_dir=str(output / "checkpoints"),
            max_steps=settings.steps,
            per_device_train_batch_size=passed,
            per_device_eval_batch_size=passed,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            gradient_checkpointing=settings.gradient_checkpointing,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            seed=settings.seed,
            bf16=settings.bf16,
            use_cpu=cpu or not torch.accelerator.is_available(),
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_steps=settings.save_steps,
            save_total_limit=2,
            restore_callback_states_from_checkpoint=True,
            remove_unused_columns=False,
            use_cache=use_cache,  # Trainer writes it to the model's configuration
            label_names=["number"],
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            accelerator_config={"non_blocking": torch.cuda.is_available()},
            **(evaluated if evaluates and settings.eval_steps else {}),
        )
    except (ValueError, ImportError, RuntimeError) as error:
        raise InputError(f"transformers' Trainer refuses these settings ({one_line(error)}).") from error
    # One process trains on one device. Trainer would take all GPUs that it sees (DataParallel), with larger batches.
    _ = arguments.device
    arguments._n_gpu = min(arguments._n_gpu, 1)
    return arguments


class LayoutTrainer(Trainer):
    """Trains a model on rows of episodes.

    Args:
        model: the model.
        args: transformers' arguments. `output_dir` is the folder of the checkpoints.
        held_out: the rows of episodes that accuracy is measured on; None for no evaluation.
        **kwargs: as for `Trainer`.

    Raises:
        InputError: (while training) the loss is not finite, or a checkpoint cannot be written.
    """

    # The loss is a mean over the rows of one batch, which Trainer divides by the number of batches of a step.
    loss_is_scaled_for_ga = False

    def __init__(self, model: nn.Module, args: TrainingArguments, held_out: OptionRows | None, **kwargs: Any) -> None:
        self.held_out = held_out
        metrics = None if held_out is None else self._accuracy
        super().__init__(model, args, eval_dataset=held_out, compute_metrics=metrics, **kwargs)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        if args.process_index == 0:
            self.add_callback(LossProgress)
        self._episodes: list[int] = []  # of the current step

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]  # the draw is random already

    # The loss and the measurements.

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._episodes += inputs["number"]
        return mean_loss(model, inputs)

    def _check_finite(self, what: str, value: float, where: str = "") -> None:
        if not math.isfinite(value):
            last = checkpoints(Path(str(self.args.output_dir)))
            kept = f"The last checkpoint is {last[-1]}" if last else "There is no checkpoint yet"
            raise InputError(
                f"the {what} is {value} at step {self.state.global_step}{where}: train with a lower --learning_rate, "
                f"or in float32, in another --output. {kept}."
            )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Tensor, Tensor]:
        """The numbers that the accuracy is computed from, [rows, 4]: the log-probability of the option, how many of its
        tokens greedy decoding would not give, its number of tokens, and the number of its episode."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            losses, greedy = target_losses(model, inputs)
        sums = torch.zeros(len(inputs["number"]), 4, dtype=losses.dtype, device=losses.device)
        by_target = torch.stack([-losses, (~greedy).to(losses), torch.ones_like(losses)], dim=1)
        sums[:, :3].index_add_(0, inputs["target_row"], by_target)
        sums[:, 3] = on_device(inputs["number"], sums.device)
        return None, sums, sums[:, 3]

    def _accuracy(self, prediction: EvalPrediction) -> dict[str, float]:
        """The share of episodes whose right option has the highest log-probability, and the mean loss of a token of the
        right option. An answer that is not one of several options is right if greedy decoding gives it."""
        assert self.held_out is not None
        rows: dict[int, list[Any]] = {}
        for row in prediction.predictions:
            rows.setdefault(int(row[3]), []).append(row)
        right, losses = 0, []
        for number, options in rows.items():
            example = self.held_out.episodes[number].example
            scores = [option[0] for option in options]
            correct = options[example.right]
            right += scores.index(max(scores)) == example.right if len(options) > 1 else correct[1] == 0
            losses.append(-correct[0] / correct[2])
        self._check_finite("loss on held-out rows", sum(losses))
        return {"accuracy": right / len(rows), "held_out_loss": sum(losses) / len(losses)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Trainer does.

        Raises:
            InputError: a loss or the norm of a gradient is not finite. Nothing is saved of such a step.
        """
        if "loss" in logs:
            # Of several processes, another's episodes may be the cause.
            episodes = f", episodes {self._episodes[0]} to {self._episodes[-1]}" if self.args.world_size == 1 else ""
            self._check_finite("loss", logs["loss"], episodes)
            self._check_finite("norm of the gradient", logs.get("grad_norm", 0.0))
            self._episodes = []
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as Trainer does.

        Raises:
            InputError: the checkpoint cannot be written; what there is of it is removed.
        """
        folder = Path(str(self.args.output_dir))
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:
            shutil.rmtree(folder / f"checkpoint-{self.state.global_step}", ignore_errors=True)
            last = checkpoints(folder)
            kept = f"the last one, {last[-1]}, is kept: --resume goes on from it" if last else "there is none before it"
            raise InputError(
                f"the checkpoint of step {self.state.global_step} could not be written to {folder} "
                f"({one_line(error)}): {kept} when there is room."
            ) from error


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the last one last. Trainer writes its state at the end."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return sorted(whole, key=lambda path: int(path.name.rpartition("-")[2]))


def entries(history: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """What Trainer has logged of each step: loss, learning rate and norm of the gradient, or the measurements."""
    names = ("step", "loss", "learning_rate", "grad_norm", "accuracy", "held_out_loss")
    without_prefix = ({name.removeprefix("eval_"): value for name, value in logged.items()} for logged in history)
    kept = ({name: logged[name] for name in names if name in logged} for logged in without_prefix)
    return [entry for entry in kept if "loss" in entry or "accuracy" in entry]


class LossProgress(ProgressCallback):
    """transformers' progress bar, with the last loss and accuracy at its end in place of lines above it."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, str] = {}

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, logged in (("loss", "loss"), ("accuracy", "eval_accuracy")):
            if logged in (logs or {}):
                self._last[name] = f"{logs[logged]:.3f}"
        if self.training_bar is not None:
            self.training_bar.set_postfix(self._last)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside this context, transformers logs errors alone, and shows no progress of what it loads and saves."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about names of its own
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
