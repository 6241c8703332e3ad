"""The models that a study trains: each is trained once, under one method, by `lm-eval-icl train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.metaicl.files import setting_of
from lm_eval_icl.metaicl.metadata import skips
from lm_eval_icl.studies.cells import Grid, Model
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study

# Of lm-eval's model arguments, those that put other weights in place of a checkpoint's, or on top of them.
_OTHER_WEIGHTS = {"peft", "delta", "gguf_file", "gptqmodel", "autogptq"}

# Checks the options of `lm-eval-icl train`, and returns what trains.
Trainer = Callable[[Mapping[str, Any]], Callable[[], None]]


def check(
    study: Study, model: Model, folder: StudyFolder, device: str | None, include_path: str | None, trainer: Trainer
) -> Callable[[], None]:
    """Check the options of a model's training, and return what trains it.

    Args:
        folder: where the model is trained: the study's folder, or a worker's in its place.
        device: the device of the study; None for the accelerator that is there.
        include_path: a folder of further tasks.
        trainer: checks the options of `lm-eval-icl train`, and returns what trains.

    Raises:
        InputError: an option cannot be used.
    """
    assert model.training and model.under
    where = f"train: {model.training.name}"
    if other := sorted(_OTHER_WEIGHTS & model.arguments.keys()):
        raise InputError(f"models: {other[0]}: {where} makes weights of its own: leave it out.")
    options = dict(model.training.options)
    if "metaicl" in options and "data" not in options:
        if "metaicl" not in study.metadata:
            raise InputError(f"{where}: needs the folder of MetaICL's data: give --metadata metaicl=DATA_DIR.")
        options["data"] = study.metadata["metaicl"]
    arguments = {
        **options,
        "method": model.under.method,
        "model_args": model.training_arguments,
        "output": str(folder.unfinished(model)),
        "resume": True,
        "metadata": study.metadata,
        "include_path": include_path,
        "device": device.removesuffix(":0") if device else None,
    }
    with naming(where):
        return trainer({name: value for name, value in arguments.items() if value is not None})


def check_beginning(grid: Grid, folder: StudyFolder, model: Model) -> None:
    """Refuse a model that began from other weights, or was trained on other rows, than others of its study; and one
    that was trained on a part of MetaICL's tasks, unless this is said.

    Raises:
        InputError: it is such a model, or its record is damaged.
    """
    mine = folder.training_record(model)
    options = model.training.options if model.training else {}
    if "metaicl" in options and not skips(grid.study.metadata):
        tasks = setting_of(str(options["metaicl"]))["train"]
        if without := [task for task in tasks if task not in mine["rows"]]:
            raise InputError(
                f"--output {folder.path}: {model.checkpoint} was trained without {', '.join(without)}, which had no "
                "files: give another folder, or missing=skip in --metadata."
            )
    for other in grid.models:
        if other.arguments != model.arguments or not folder.is_trained(other):
            continue
        theirs = folder.training_record(other)
        every = other.training == model.training
        both = mine["rows"].keys() | theirs["rows"] if every else mine["rows"].keys() & theirs["rows"]
        same_rows = all(mine["rows"].get(task) == theirs["rows"].get(task) for task in both)
        if not same_rows or mine["weights"] != theirs["weights"]:
            what = f"the weights of {model.name}" if same_rows else "the rows of the training tasks"
            raise InputError(
                f"--output {folder.path}: {what} changed between the trainings of {other.checkpoint} and "
                f"{model.checkpoint}: give another folder."
            )
