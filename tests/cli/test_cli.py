"""The console command and the smoke test."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from lm_eval_icl import cli, methods, version
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import NAMES, PrefixICL
from lm_eval_icl.smoke import smoke, tiny
from lm_eval_icl.smoke.demo import model_path
from tests import evaluation
from tests.processes import Process, command, refusal
from tests.tiny import slow_but

COMMAND = str(Path(sys.executable).parent / "lm-eval-icl")
SHORT = ["smoke_loglikelihood", "smoke_generation"]
LONG = ["smoke_long_loglikelihood", "smoke_long_generation"]


# The smoke test of one model type.


@pytest.mark.parametrize("arch", slow_but(["bloom"], ["llama", "bloom"]))
def test_smoke_runs_every_method(arch):
    scores = smoke.smoke(arch, limit=2)
    assert set(scores) == set(NAMES)
    # BLOOM has no positions to give; methods that need them say so, and nothing else is refused.
    refused = set(NAMES) - {"icl", "batchicl", "deepthink"} if arch == "bloom" else set()
    assert set(smoke.refusals(scores)) == refused
    for name in set(scores) - refused:
        assert list(scores[name]) == (SHORT + LONG if name == "icl" else SHORT)


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        ("t5", "it is an encoder-decoder model"),
        ("clip", "transformers has no causal language model of this type"),
        ("lama", "transformers has no such model type .did you mean 'llama'"),
        ("blt", "lm-eval's hf fails on it .AttributeError: 'BltConfig'"),
    ],
)
def test_smoke_says_why_there_is_no_tiny_model(arch, says):
    with pytest.raises(tiny.NoTinyModel, match=f"no tiny model of '{arch}': {says}"):
        smoke.smoke(arch)


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("score_packed", lambda of: [(math.nan, greedy) for _, greedy in of], "icl: task 'smoke_loglik.*bility is nan"),
        ("score_packed", lambda of: [(x * 1.001, greedy) for x, greedy in of], r"icl: smoke_logl.*\(1.0e-03 of"),
        ("score_packed", lambda of: [(x, not greedy) for x, greedy in of], "whether an answer is the greedy one"),
        ("continue_from", lambda of: [row[::-1] for row in of], "icl: smoke_generation: '.*' is generated"),
    ],
)
def test_smoke_notices_what_hf_does_not_say(monkeypatch, name, broken, says):
    from lm_eval_icl.methods import runner

    original = getattr(runner, name)
    monkeypatch.setattr(runner, name, lambda *args, **kwargs: broken(original(*args, **kwargs)))
    monkeypatch.setattr(smoke, "methods", SimpleNamespace(NAMES=("icl",), installed=dict))
    with pytest.raises(InputError, match=says):
        smoke.smoke("gpt2", limit=1)


def test_smoke_notices_an_order_that_matters(monkeypatch):
    monkeypatch.setattr(PrefixICL, "pattern", methods.ICL.pattern)
    monkeypatch.setattr(smoke, "methods", SimpleNamespace(NAMES=("icl", "prefixicl"), installed=dict))
    says = "smoke test on gpt2: prefixicl: smoke_permuted: a log-likelihood is .* first order of demonstrations"
    with pytest.raises(InputError, match=says):
        smoke.smoke("gpt2")


def test_prompts_are_shorter_and_longer_than_windows():
    """Three demonstrations fit a window in two copies, as InvICL has them; eight do not fit in one."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    for name, copies in (("smoke_loglikelihood", 2), ("smoke_long_loglikelihood", 1)):
        task = smoke._tasks()[name]
        task.build_all_requests(limit=3)
        for instance in task.instances:
            *demonstrations, query = str(instance.args[0]).split("\n\n")
            length = copies * len(tokenizer("\n\n".join([*demonstrations, ""])).input_ids)
            assert (length <= tiny.WINDOW) == (copies == 2), (length, query)


@pytest.mark.slow
def test_command_line(tmp_path):
    """As it is started by a user."""
    done = subprocess.run(
        [COMMAND, "smoke", "--arch", "gpt2"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *(f"{name} on gpt2: ok ({', '.join(SHORT + (LONG if name == 'icl' else []))})" for name in NAMES),
        f"methods: {len(NAMES)} ran, 0 refusals",
    ]
    assert "Running" not in done.stderr  # lm-eval's progress bars


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--limit", "0"], "smoke: --limit 0: must be 1 or more"),
        (["--arch", "llama,nonsense"], "smoke --arch: no tiny model of 'nonsense': transformers has no such model"),
    ],
)
def test_options_of_the_smoke_test_that_cannot_be(options, says):
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says}"):
        cli.run(["smoke", *options])


@pytest.mark.slow
def test_weights_for_pictures_are_not_listed(capfd):
    """transformers lists the weights of a checkpoint that the text model does not take, each time it is loaded."""
    cli.run(["smoke", "--arch", "mllama", "--limit", "1"])
    printed = capfd.readouterr()
    assert "vision" not in printed.err and printed.out.splitlines()[-1] == f"methods: {len(NAMES)} ran, 0 refusals"


@pytest.mark.parametrize("options", [[], ["--strict"]])
def test_a_refusal_fails_a_strict_smoke_test(monkeypatch, capsys, options):
    scores = {"llama": {"icl": {"t": 1.0}}, "gpt2": {"icl": {"t": 1.0, "g": "no texts"}, "nope": "why"}}
    monkeypatch.setattr(smoke, "smoke", lambda arch, limit: scores[arch])
    with pytest.raises(SystemExit) if options else nullcontext() as exited:
        cli.run(["smoke", "--arch", "llama,gpt2", *options])
    assert not options or exited.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "icl on llama: ok (t)",
        "icl on gpt2: ok (t)",
        "icl (texts) on gpt2: refused (no texts)",
        "nope on gpt2: refused (why)",
        "methods: 2 ran, 2 refusals",
    ]


def test_the_smoke_test_of_a_checkpoint(capsys):
    cli.run(["smoke", "--arch", str(model_path()), "--limit", "1"])
    assert capsys.readouterr().out.splitlines()[-1] == f"methods: {len(NAMES)} ran, 0 refusals"


# lm-eval's own commands.


MODEL = ["--model", "icl", "--model_args", f"pretrained={model_path()}"]
DEMO = [*MODEL, "--tasks", "icl_demo_short"]
LISTED = "`lm-eval-icl ls tasks{}` lists those there are."
OWN = f"{LISTED.format('')} For tasks in a folder of your own, give --include_path DIR."


@pytest.mark.parametrize(
    ("line", "says"),
    [
        # With the nearest name, of lm-eval's tasks, ours and those of the folder.
        ([*MODEL, "--tasks", "icl_sst22"], f"--tasks: there is no task 'icl_sst22': did you mean 'icl_sst2'? {OWN}"),
        ([*MODEL, "--tasks", "of_my_onw"], f"--tasks: there is no task 'of_my_onw'.*{OWN}"),
        (
            [*MODEL, "--include_path", "own", "--tasks", "of_my_onw"],
            f"--tasks: there is no task 'of_my_onw': did you mean 'of_my_own'? {LISTED.format(' --include_path own')}",
        ),
        (MODEL, "--tasks: No tasks specified, or no tasks found. `lm"),
        (
            [*DEMO, "--samples", '{"icl_demo_short": [0, 200]}', "--device", "cpu"],
            "--samples: a task has no document of such a number (.*k=200",
        ),
        ([*DEMO, "--log_samples"], "the arguments are refused: Specify --output_path if providing --log_samples"),
        ([*DEMO, "--fewshot_as_multiturn"], "the arguments are refused: When `fewshot_as_multiturn` is True"),
        ([*DEMO, "--config", "nowhere.yaml"], "the arguments are refused: Config file not found: "),
        ([*DEMO, "--include_path", "nowhere"], "--include_path nowhere: no such folder."),
        ([*DEMO, "--output_path", "/proc/out"], "--output_path /proc/out: the results could not be saved there (/proc"),
        ([*DEMO, "--output_path", "file/out"], "--output_path file/out: the results could not be saved there ("),
    ],
)
def test_options_of_an_evaluation_that_cannot_be_are_one_line(tmp_path, line, says):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/t.yaml").write_text("task: of_my_own")
    (tmp_path / "file").touch()
    pattern = ".*".join(map(re.escape, f"lm-eval-icl: {says}".split(".*")))
    done = command(*line, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Selected Tasks" not in done.stderr or "--samples" in line or line == MODEL
    assert re.match(pattern, done.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("key", "template", "says"),
    [
        ("doc_to_text", "Q: {{qestion}}\nA:", "'qestion' is undefined: did you mean 'question'?"),
        ("doc_to_text", "{{question", "unexpected end of template, expected 'end of print statement'."),
        *slow_but(
            [],
            [
                ("doc_to_target", "{{lable}}", "'lable' is undefined: did you mean 'label'?"),
                ("doc_to_choice", "{{zzz}}", "'zzz' is undefined."),
                ("fewshot_config: doc_to_text", "{{quest}}", "'quest' is undefined: did you mean 'question'?"),
                ("description", "{{queston}}", "'queston' is undefined: did you mean 'question'?"),
            ],
        ),
    ],
)
def test_a_template_of_fields_that_there_are_not_is_one_line(tmp_path, key, template, says):
    """In a YAML file of the user's: the task, its file, the template, the field and those there are."""
    outer, _, inner = key.partition(": ")
    asked = {"doc_to_text": "{{question}}", "doc_to_target": "label", "doc_to_choice": ["no", "yes"]}
    asked[outer] = {inner: template} if inner else template
    rows = [{"question": f"is {i} odd?", "label": i % 2} for i in range(8)]
    (tmp_path / "own").mkdir()
    evaluation.task_file(tmp_path / "own", "mine", {"train": rows, "test": rows}, **asked)
    line = [*MODEL, "--device", "cpu", "--num_fewshot", "2", "--tasks", "mine", "--include_path", "own"]
    last = refusal(*line, cwd=tmp_path)
    assert last.startswith(f"lm-eval-icl: task 'mine' (own/mine.yaml): {key}: {template!r}: {says}")
    assert last.endswith("A document has the fields question, label.")


def test_the_versions_at_once():
    """Of this package and of what it runs on, without the seconds that it takes to import these."""
    program = "import sys; from lm_eval_icl import cli; cli.main(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=True)
    ours, *others, imported = done.stdout.splitlines()
    assert ours == f"lm-eval-icl {version.version()} (commit {version.commit()})" and imported == "False"
    assert others == [f"{name} {metadata.version(name)}" for name in ("lm-eval", "transformers", "torch")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("program", slow_but(["lm-eval-icl"], ["lm_eval", "lm-eval-icl"]))
def test_a_gpu_that_is_not_there_is_one_line(tmp_path, program):
    """lm-eval would take the CPU; it does so for its own models."""
    line = [*DEMO, "--limit", "1", "--device", "cuda:0"]
    says = "lm-eval-icl: device='cuda:0': here is no GPU that torch can use: give cpu, or leave it out."
    assert refusal(*line, program=program, cwd=tmp_path) == says
    line[1] = "hf"
    assert command(*line, program=program, cwd=tmp_path).returncode == 0


def test_a_misspelt_command_is_one_line():
    line = [sys.executable, "-m", "lm_eval_icl", "shw", "invicl"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "lm-eval-icl: unknown command 'shw': did you mean 'show'?\n"
    with pytest.raises(InputError, match=f"unknown command 'invicl': there are {', '.join(cli.COMMANDS)}, run, ls, "):
        cli.run(["invicl"])


def without_a_reader(*arguments):
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(read)
    os.close(write)
    sys.argv = ["lm-eval-icl", *arguments]
    cli.main()


@pytest.mark.parametrize("arguments", [["show", "invicl"], ["show", "invicl", "--output", "x.svg"]])
def test_a_reader_that_has_enough(tmp_path, arguments):
    """`lm-eval-icl show ... | head`, whose pipe is closed before or while we write."""
    arguments = [str(tmp_path / each) if each == "x.svg" else each for each in arguments]
    assert Process(without_a_reader, *arguments).finish() == (128 + signal.SIGPIPE, [])


@pytest.mark.parametrize("command", ["show", "smoke"])
def test_an_interrupt_is_one_line(command):
    with subprocess.Popen(
        [COMMAND, command, *["invicl"] * (command == "show")], stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (-signal.SIGINT, f"\nlm-eval-icl: {command}: interrupted.\n")


@pytest.mark.parametrize("where", ["import module", "Object()"])
def test_an_interrupt_is_heard_where_python_or_a_library_ignores_it(tmp_path, where):
    (tmp_path / "module.py").write_text("""
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    print("ignored")
""")
    program = f"""
import signal, time
from lm_eval_icl.harness.interrupt import end, never_ignored
class Object:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
try:
    never_ignored(lambda: "interrupted.")
    {where}
    time.sleep(999)
except KeyboardInterrupt as stopped:
    end(stopped, lambda: "interrupted.")
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "\nlm-eval-icl: interrupted.\n")


@pytest.mark.parametrize(
    ("program", "name", "says"),
    [
        ("lm_eval", "deepthnk", "did you mean 'deepthink'?"),
        ("lm-eval-icl", "deepthnk", "did you mean 'deepthink'?"),
        ("lm-eval-icl", "zzzzzz", "the methods are icl, nope, "),
    ],
)
def test_a_misspelt_model_is_one_line(tmp_path, program, name, says):
    (tmp_path / "run.yaml").write_text(f"model: {name}\ntasks: icl_demo_short\n")
    for arguments in (["--model", name, "--tasks", "icl_demo_short"], ["--config", "run.yaml"]):
        last = refusal(*arguments, program=program, cwd=tmp_path)
        assert f"lm-eval-icl: --model: unknown model '{name}': {says}" in last


@pytest.mark.parametrize("program", ["lm_eval", "lm-eval-icl"])
def test_a_misspelt_model_is_refused_before_torch_is_imported(program):
    module = "lm_eval.__main__" if program == "lm_eval" else "lm_eval_icl.cli"
    function = "cli_evaluate" if program == "lm_eval" else "main"
    code = f"import atexit, sys; from {module} import {function} as main\n"
    code += "atexit.register(lambda: print(*{'torch', 'transformers', 'datasets'} & {*sys.modules})); main()"
    line = [sys.executable, "-c", code, "--model", "invicll", "--tasks", "x"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "\n") and "did you mean 'invicl'?" in done.stderr


@pytest.mark.parametrize("program", slow_but(["lm_eval"], ["lm_eval", "lm-eval-icl"]))
def test_without_a_device_the_machines_own_is_taken(tmp_path, program):
    """lm-eval's default is cuda:0, on a machine without a GPU too."""
    done = command(*DEMO, "--limit", "2", program=program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-300:]
