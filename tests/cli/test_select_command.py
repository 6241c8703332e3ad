"""`lm-eval-icl select` on large splits: what is chosen costs what is chosen from, not what the split has."""

import os
import shutil

import pytest
from lm_eval.tasks import TaskManager

from lm_eval_icl.demonstrations.choosing import Chooser
from lm_eval_icl.harness.choosing import PoolOfTask
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.methods import ICL, Predictor
from lm_eval_icl.smoke.demo import model_path
from tests import processes, tiny


def pool() -> PoolOfTask:
    manager = TaskManager(include_path=task_dir() / "demo", include_defaults=False)
    return PoolOfTask(manager.load(["icl_demo_four"])["tasks"]["icl_demo_four"])


def test_prompts_are_made_of_the_pool_alone():
    """The training split of AG News has 120,000 documents, whose prompts take a minute."""
    large = pool()
    assert len(large.docs) > 24
    Chooser(large, Predictor(*tiny.load(model_path()), ICL()), 24).choose("herding", 4, 0)
    assert large.query.cache_info().currsize == 24


@pytest.mark.slow
@pytest.mark.parametrize("command", ["select", "train"])
def test_a_chat_template_that_is_not_applied_is_said(chat_checkpoint, checkpoint, tmp_path, command):
    """Once, in one line, if the tokenizer has one."""
    line = ["--tasks", "icl_demo_short", "--num_fewshot", "2", "--device", "cpu", "--output", tmp_path / "out"]
    line += [] if command == "select" else ["--steps", "1", "--eval_steps", "0"]
    what = "herding:pool=20" if command == "select" else "icl"
    for folder, times in ((chat_checkpoint("gpt2"), 1), (checkpoint("gpt2"), 0)):
        (tmp_path / "out").exists() and (shutil.rmtree if command == "train" else os.remove)(tmp_path / "out")
        done = processes.command(command, what, "--model_args", f"pretrained={folder}", *line)
        assert done.returncode == 0, done.stderr
        said = [text for text in done.stderr.splitlines() if "has a chat template" in text]
        assert len(said) == times
        assert all("not applied here: prompts are those of an evaluation without --apply_chat" in text for text in said)
