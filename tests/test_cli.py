"""The console command and the smoke test."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm_eval_icl.demo import model_path
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import NAMES
from lm_eval_icl.smoke import smoke

COMMAND = str(Path(sys.executable).parent / "lm-eval-icl")


@pytest.mark.parametrize("arch", ["llama", "gpt2", "opt", "gpt_neo", "gpt_neox", "qwen3", "gemma2", "bloom"])
def test_smoke_runs_every_method(arch):
    scores = smoke(arch, limit=2)
    assert set(scores) == set(NAMES)
    # BLOOM has no positions to give; methods that need them say so, and nothing else is refused.
    refused = {name for name, of in scores.items() if isinstance(of, str)}
    assert refused == ({"nope", "prefixicl", "pcw", "saicl", "invicl"} if arch == "bloom" else set())
    assert all(set(scores[name]) == {"smoke_loglikelihood", "smoke_generation"} for name in set(scores) - refused)


@pytest.mark.parametrize(("arch", "says"), [("mamba", "MambaForCausalLM cannot be used"), ("t5", "no tiny model")])
def test_smoke_says_what_broke(arch, says):
    with pytest.raises(InputError, match=says):
        smoke(arch)


def test_smoke_notices_wrong_numbers(monkeypatch):
    from lm_eval_icl.methods import runner

    def broken(model, memory, pairs, *rest):
        return [(float("nan"), False)] * len(pairs)

    monkeypatch.setattr(runner, "score_packed", broken)
    with pytest.raises(
        InputError, match=r"smoke test of icl on llama: task 'smoke_loglikelihood', .*log-probability is nan"
    ):
        smoke("llama")


@pytest.mark.parametrize("command", [[COMMAND], [sys.executable, "-m", "lm_eval_icl"]])
def test_command_line(command, tmp_path):
    done = subprocess.run(
        [*command, "smoke", "--arch", "gpt2"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} on gpt2: ok (smoke_loglikelihood, smoke_generation)" for name in NAMES]


def test_command_line_failure_is_one_line(tmp_path):
    command = [COMMAND, "smoke", "--arch", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lm-eval-icl: smoke --arch nonsense: no tiny model of it")
    assert "Traceback" not in done.stderr


def test_a_task_that_is_not_there_is_one_line(tmp_path):
    command = [COMMAND, "--model", "icl", "--model_args", "pretrained=none", "--tasks", "icl_sst22"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lm-eval-icl: --tasks: Tasks not found: icl_sst22. `lm-eval-icl ls")
    assert "Traceback" not in done.stderr


def lm_eval_icl(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "lm_eval_icl", *arguments], capture_output=True, text=True, check=False
    )


def test_models_of_lm_eval_run_under_our_command_too():
    arguments = ["--model_args", f"pretrained={model_path()}", "--tasks", "icl_demo_short", "--limit", "2"]
    done = lm_eval_icl("--model", "hf", *arguments, "--device", "cpu")
    assert done.returncode == 0 and "|icl_demo_short|" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["shw", "invicl"], "unknown command 'shw': did you mean 'show'?"),
        (["smok"], "unknown command 'smok': did you mean 'smoke'?"),
        (["invicl"], "unknown command 'invicl': there are smoke, show, run, ls, validate."),
    ],
)
def test_a_misspelt_command_is_one_line(command, says):
    done = lm_eval_icl(*command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"lm-eval-icl: {says}\n")


@pytest.mark.parametrize("command", [["show", "invicl"], ["show", "invicl", "--output", "x.svg"]])
def test_a_reader_that_has_enough(tmp_path, command):
    """`lm-eval-icl show ... | head`, whose pipe is closed before or while we write."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([COMMAND, *command], stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--log_samples"], "the arguments are refused: Specify --output_path if providing --log_samples"),
        (["--fewshot_as_multiturn"], "the arguments are refused: When `fewshot_as_multiturn` is True"),
        (["--config", "nowhere.yaml"], "the arguments are refused: Config file not found: "),
        (["--include_path", "nowhere"], "--include_path nowhere: no such folder."),
        (["--output_path", "/proc/out"], "--output_path /proc/out: the results could not be saved there (/proc: "),
        (["--output_path", "file/out"], "--output_path file/out: the results could not be saved there ("),
    ],
)
def test_options_that_cannot_be_are_one_line(tmp_path, arguments, says):
    (tmp_path / "file").touch()
    command = [COMMAND, "--model", "icl", "--model_args", f"pretrained={model_path()}", "--tasks", "icl_demo_short"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Selected Tasks" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"lm-eval-icl: {says}")


def test_no_task_is_one_line():
    done = lm_eval_icl("--model", "icl", "--model_args", f"pretrained={model_path()}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lm-eval-icl: --tasks: No tasks specified, or no tasks found. `lm")


@pytest.mark.parametrize("command", ["show", "smoke"])
def test_an_interrupt_is_one_line(command):
    with subprocess.Popen(
        [COMMAND, command, *["invicl"] * (command == "show")], stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(1)  # while it imports torch
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (-signal.SIGINT, f"lm-eval-icl: {command}: interrupted.\n")


@pytest.mark.parametrize(
    ("name", "says"),
    [("deepthnk", "did you mean 'deepthink'?"), ("zzzzzz", "the methods are icl, nope, ")],
)
def test_a_misspelt_model_is_one_line(name, says):
    done = lm_eval_icl("--model", name, "--model_args", "pretrained=x", "--tasks", "icl_demo_short")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"lm-eval-icl: --model: unknown model '{name}': {says}" in done.stderr.splitlines()[-1]
