"""What the commands refuse before they load a model."""

import pytest
import torch

from lm_eval_icl.cli.reading import model_arguments
from lm_eval_icl.cli.train import training
from lm_eval_icl.errors import InputError
from tests import commands

SELECT = ["select", "herding", "--tasks", "toy", "--num_fewshot", "2"]
SELECT += ["--model_args", "pretrained=none"]
TRAINING = {"method": "icl", "tasks": "toy", "model_args": {"pretrained": "none"}}


def test_arguments_of_a_model_name_a_checkpoint():
    with pytest.raises(InputError) as refusal:
        model_arguments("dtype=float32")
    rest = "has no pretrained=...: give the name or folder of a checkpoint."
    assert str(refusal.value) == f"lm-eval-icl: --model_args: {rest}"


def test_chosen_demonstrations_are_written_to_a_file(tmp_path):
    line = commands.refused(*SELECT, "--seeds", "0", "--output", tmp_path)
    rest = "must be a file in a folder that exists and can be written to."
    assert f"--output {tmp_path}: {rest}" in line


def test_seeds_of_a_selection_are_whole_numbers(tmp_path):
    line = commands.refused(*SELECT, "--seeds", "x", "--output", tmp_path / "o.json")
    rest = "must be whole numbers, 0 or more, or ranges such as 0..9."
    assert f"--seeds x: {rest}" in line


def test_a_training_has_a_folder_for_its_checkpoint():
    with pytest.raises(InputError) as refusal:
        training(TRAINING)
    rest = "give the folder of the trained checkpoint."
    assert str(refusal.value) == f"lm-eval-icl: --output: {rest}"


def test_a_training_refuses_an_accelerator_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    options = TRAINING | {"output": "o", "device": "cuda"}
    with pytest.raises(InputError) as refusal:
        training(options)
    rest = "torch finds no accelerator here: give cpu, or leave it out."
    assert str(refusal.value) == f"lm-eval-icl: --device cuda: {rest}"


def test_a_selection_for_no_task_and_a_demo_of_no_number_are_refused(tmp_path):
    assert "--tasks: names no task." in commands.refused(
        *SELECT, "--tasks", "", "--output", tmp_path / "o.json"
    )
    assert "--limit 0: must be 1 or more." in commands.refused("smoke", "--limit", "0")
    line = commands.refused("demo", "--limit", "x", "--output", tmp_path / "demo")
    assert "argument --limit: invalid float value: 'x'" in line
