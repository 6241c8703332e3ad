"""The console command and the smoke test."""

import pkgutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm_eval_icl import cli, methods, version
from lm_eval_icl.cli import show
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import NAMES, PrefixICL
from lm_eval_icl.smoke import every_method, tiny
from lm_eval_icl.smoke.demo import model_path
from tests.processes import Process, command, refusal
from tests.tiny import slow_but

COMMAND = str(Path(sys.executable).parent / "lm-eval-icl")
SHORT = ["smoke_loglikelihood", "smoke_generation"]
LONG = ["smoke_long_loglikelihood", "smoke_long_generation"]


# The smoke test of one model type.


@pytest.mark.parametrize("arch", slow_but(["bloom"], ["llama", "bloom"]))
def test_smoke_runs_every_method(arch):
    scores = every_method.smoke(arch, limit=2)
    assert set(scores) == set(NAMES)
    # BLOOM has no positions to give; methods that need them say so, and nothing else is refused.
    refused = set(NAMES) - {"icl", "batchicl", "deepthink", "ttt"} if arch == "bloom" else set()
    assert set(every_method.refusals(scores)) == refused
    for name in set(scores) - refused:
        assert list(scores[name]) == (SHORT + LONG if name == "icl" else SHORT)


@pytest.mark.parametrize(
    "arch, says",
    [
        ("t5", "it is an encoder-decoder model"),
        ("lama", "transformers has no such model type .did you mean 'llama'"),
    ],
)
def test_smoke_says_why_there_is_no_tiny_model(arch, says):
    with pytest.raises(tiny.NoTinyModel, match=f"no tiny model of '{arch}': {says}"):
        every_method.smoke(arch)


@pytest.mark.parametrize(
    "name, broken, says",
    [
        (
            "inference.scoring.score_packed",
            lambda of: [(x * 1.001, greedy) for x, greedy in of],
            r"icl: smoke_logl.*\(1.0e-03 of",
        ),
        (
            "inference.scoring.score_packed",
            lambda of: [(x, not greedy) for x, greedy in of],
            "whether an answer is the greedy one",
        ),
        (
            "methods.continuing.continue_from",
            lambda of: [row[::-1] for row in of],
            "icl: smoke_generation: '.*' is generated",
        ),
    ],
)
def test_smoke_notices_what_hf_does_not_say(monkeypatch, name, broken, says):
    original = pkgutil.resolve_name(f"lm_eval_icl.{name}")
    monkeypatch.setattr(
        f"lm_eval_icl.{name}", lambda *args, **kwargs: broken(original(*args, **kwargs))
    )
    monkeypatch.setattr(every_method, "methods", SimpleNamespace(NAMES=("icl",)))
    with pytest.raises(InputError, match=says):
        every_method.smoke("gpt2", limit=1)


def test_smoke_notices_an_order_that_matters(monkeypatch):
    monkeypatch.setattr(PrefixICL, "pattern", methods.ICL.pattern)
    monkeypatch.setattr(every_method, "methods", SimpleNamespace(NAMES=("icl", "prefixicl")))
    says = (
        "smoke test on gpt2: prefixicl: smoke_permuted: a log-likelihood is .* first order of "
        "demonstrations"
    )
    with pytest.raises(InputError, match=says):
        every_method.smoke("gpt2")


@pytest.mark.slow
def test_the_smoke_test_of_a_checkpoint(capsys):
    cli.run(["smoke", "--arch", str(model_path()), "--limit", "1"])
    assert capsys.readouterr().out.splitlines()[-1] == f"methods: {len(NAMES)} ran, 0 refusals"


# lm-eval's own commands.


MODEL = ["--model", "icl", "--model_args", f"pretrained={model_path()}"]
DEMO = [*MODEL, "--tasks", "icl_demo_short"]


def test_the_versions_at_once():
    """Of this package and of what it runs on, without the seconds that it takes to import these."""
    program = "import sys; from lm_eval_icl import cli; cli.main(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], capture_output=True, text=True
    )
    ours, *others, imported = done.stdout.splitlines()
    assert ours == f"lm-eval-icl {version.version()} (commit {version.commit()})"
    assert imported == "False"
    assert others == [
        f"{name} {metadata.version(name)}" for name in ("lm-eval", "transformers", "torch")
    ]


def test_a_misspelled_command_is_one_line():
    says = "lm-eval-icl: there is no command 'studdy': did you mean 'study'?"
    assert subprocess.getstatusoutput(f"{COMMAND} studdy") == (1, says)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(tmp_path):
    """lm-eval would take the CPU; it does so for its own models, and for cuda:0, its default."""
    line = [*DEMO, "--limit", "1", "--device", "cuda:1"]
    says = "lm-eval-icl: device='cuda:1': torch finds no GPU here: give cpu, or leave it out."
    assert refusal(*line, cwd=tmp_path) == says
    line[1] = "hf"
    assert command(*line, cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_an_interrupt_is_one_line():
    line = [COMMAND, "smoke", "--arch", "llama,gpt2,gpt_neox,opt,qwen2,mistral"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        while (
            process.poll() is None
            and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        ):
            time.sleep(0.01)
        time.sleep(5)  # Python or a library may ignore an exception while a module is imported
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "lm-eval-icl: smoke: interrupted."
    assert "Traceback" not in said


def fails(*arguments):
    sys.argv = ["lm-eval-icl", *arguments]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(show, "command", lambda *_: 1 / 0)
        cli.main()


@pytest.mark.slow
def test_an_error_that_nobody_foresaw_is_one_line():
    code, (line,) = Process(fails, "show").finish()
    assert code == 1
    assert line.startswith("lm-eval-icl: show: ZeroDivisionError: division by zero, ")
    assert line.endswith("(--debug shows the traceback)")
    code, lines = Process(fails, "show", "--debug").finish()
    assert code == 1
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "ZeroDivisionError: division by zero"
