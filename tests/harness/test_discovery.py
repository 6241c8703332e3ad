"""lm-eval finds the models and the tasks by itself; nothing else notices us."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from lm_eval_icl import methods
from lm_eval_icl.harness.models import model_class
from tests import processes

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, cwd: Path, *options: str, stderr: str | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert done.returncode == 0, done.stderr
    if stderr is not None:
        assert done.stderr.strip() == stderr
    return done.stdout.strip()


def test_start_up_imports_the_shim_and_nothing_of_weight(tmp_path):
    """Everything below would be empty without the shim."""
    names = "[name for name in sys.modules if name.split('.')[0] in ('lm_eval', 'lm_eval_icl', 'torch', 'datasets')]"
    ours = python(f"import sys; print(*{names})", tmp_path)
    assert ours.split() == ["lm_eval_icl", "lm_eval_icl.harness", "lm_eval_icl.harness.shim"]


def test_the_next_release_of_lm_eval_finds_every_model_by_its_entry_point():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "lm_eval.models"
    ]
    assert list(declared) == list(methods.NAMES)
    for name, value in declared.items():
        model = importlib.metadata.EntryPoint(name, value, "lm_eval.models").load()
        assert model is model_class(name) and model.method_class is methods.find(name)


def test_no_start_is_broken_by_a_broken_package(tmp_path):
    """The .pth line swallows whatever goes wrong; a failure later is one line on stderr."""
    line = (ROOT / "lm_eval_icl.pth").read_text()
    broken = tmp_path / "lm_eval_icl"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('broken')")
    code = f"import sys; sys.modules.pop('lm_eval_icl', None); sys.path.insert(0, {str(tmp_path)!r})\n{line}\nprint(1)"
    assert python(code, tmp_path, "-S", stderr="") == "1"
    code = (
        "import lm_eval_icl.harness.plugin as p\ndef fail(): raise RuntimeError('no')\np.register_models = fail\n"
        "import lm_eval.models; print(2)"
    )
    line = "lm-eval-icl: not registered with lm-eval: RuntimeError('no')"
    assert python(code, tmp_path, stderr=line) == "2"


def test_tasks_are_found_without_an_argument_and_include_path_wins(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: icl_sst2\ndataset_path: mine\n")
    code = (
        "from lm_eval.tasks import TaskManager\ngiven = {'labls': 1, 'load_format': 2}\n"
        f"t = TaskManager(include_path={str(tmp_path)!r})\nprint(t.task_index['icl_sst2'].yaml_path.name)\n"
        "print('icl_trec' in t.all_subtasks, 'icl_mmlu' in t.all_groups)\n"
        "from lm_eval_icl.harness.plugin import task_dir\nt = TaskManager(include_path=str(task_dir()))\n"
        "print('icl_trec' in t.all_tasks, TaskManager(include_defaults=False, metadata=given).all_tasks)"
    )
    done = processes.python(code, cwd=tmp_path)
    assert (
        done.stdout == "mine.yaml\nTrue True\nTrue []\n" and done.stderr.count("did you mean") == 1
    )
