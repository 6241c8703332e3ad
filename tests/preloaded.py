"""What the processes of `tests.processes` begin with: all that a command imports, and lm-eval's
task files read."""

import torch
import torch.utils.collect_env
from lm_eval.tasks import TaskManager

import tests.conftest
import tests.harness.test_resume  # noqa: F401
from tests import once, plain

torch.set_num_threads(1)
once.install()
if plain.ON:
    plain.install()
torch.utils.collect_env.get_pretty_env_info()
TaskManager()
