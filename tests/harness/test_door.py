"""The doors by which lm-eval finds this package, in environments in which its wheel is installed.

Programs are started here as a user starts them: no test uses `tests.processes`.
"""

import ast
import functools
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from lm_eval_icl import methods
from lm_eval_icl.demonstrations.retrieve import BM25, sentence_vectors
from lm_eval_icl.drawing import picture
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies.cluster import connected
from lm_eval_icl.training.settings import Settings
from lm_eval_icl_hook import is_lm_eval, program_of

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = PYPROJECT["project"]["entry-points"]["lm_eval.models"]
SCRIPT = "#!{python}\nimport sys\nfrom {module} import {attr}\nsys.exit({attr}())\n"


class Installed:
    """A new environment that has the packages of this one, and the wheel of this package or not."""

    def __init__(self, folder: Path, wheel: Path | None) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        paths = {"base": str(folder), "platbase": str(folder)}
        self.packages = Path(sysconfig.get_path("purelib", vars=paths))
        # A path in a .pth file joins sys.path, and .pth files in that path are not read.
        others = sysconfig.get_path("purelib")
        (self.packages / "others.pth").write_text(f"{others}\n", encoding="utf-8")
        if wheel is not None:
            pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
            subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
        for name in ("lm_eval", "lm-eval", "accelerate", "torchrun"):
            (entry,) = importlib.metadata.entry_points(group="console_scripts", name=name)
            values = {"python": self.python, "module": entry.module, "attr": entry.attr}
            script = folder / "bin" / name
            script.write_text(SCRIPT.format(**values), encoding="utf-8")
            script.chmod(0o755)

    def run(self, *command: object, **kwargs: str) -> subprocess.CompletedProcess[str]:
        """What a command prints; it ends well. Further variables of its environment are
        arguments."""
        program, *rest = map(str, command)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.folder / "bin" / program, *rest],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**environment, "TQDM_DISABLE": "1", **kwargs},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment in which pip has installed the wheel."""
    pytest.importorskip("hatchling", reason="building the wheel needs: pip install hatchling")
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return Installed(folder / "env", wheel)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The same environment without the wheel."""
    return Installed(tmp_path_factory.mktemp("without") / "env", None)


# Importing what an evaluation needs of others takes longer than all that programs do here. One
# process imports it, and is forked for each program. None of it may notice us.
LIBRARIES = """
import gc, os, sys
from pathlib import Path
import datasets, requests, sacrebleu, torch.utils.collect_env
from transformers import PreTrainedModel, modeling_layers, processing_utils
assert [name for name in sys.modules if name.startswith("lm_eval")] == ["lm_eval_icl_hook"]
assert not [finder for finder in sys.meta_path if finder.__module__.startswith("lm_eval")]
torch.utils.collect_env.get_pretty_env_info = str  # would list the installed packages
gc.freeze()
for program in Path("programs").glob("*.py"):
    if os.fork() == 0:
        said = os.open(program.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        exec(program.read_text("utf-8"))
        break
    if os.wait()[1]:
        sys.exit(program.with_suffix(".txt").read_text("utf-8"))
"""
PROGRAMS: dict[str, str] = {}


@pytest.fixture(scope="module")
def ran(installed):
    """The names of PROGRAMS -> the lines that each prints, errors too. All end well."""
    folder = installed.folder / "programs"
    folder.mkdir()
    for name, code in PROGRAMS.items():
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    installed.run("python", "-c", LIBRARIES)
    return {file.stem: file.read_text("utf-8").splitlines() for file in folder.glob("*.txt")}


# The start-up hook.

STATE = """
import sys
finders = [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]
print(finders, sys.excepthook is sys.__excepthook__)
print(*sys.modules)
"""


def test_other_programs_start_with_one_module_more(installed, without):
    """And notice nothing else. How long it takes is measured in docs/guarantees.md, and not
    here."""
    ours = installed.run("python", "-c", STATE).stdout.splitlines()
    expected = without.run("python", "-c", STATE).stdout.splitlines()
    assert ours[0] == expected[0] and "True" in expected[0]
    assert {*ours[1].split()} == {*expected[1].split(), "lm_eval_icl_hook"}


def test_what_python_reads_at_its_start(installed):
    """No `exec`, and nothing on the line of the .pth file but an import."""
    (line,) = (installed.packages / "lm_eval_icl.pth").read_text(encoding="utf-8").splitlines()
    (statement,) = ast.parse(line).body
    assert line == "import lm_eval_icl_hook" and isinstance(statement, ast.Import)
    text = (installed.packages / "lm_eval_icl_hook.py").read_text(encoding="utf-8")
    assert re.findall(r"^import (.*)$", text, re.MULTILINE) == ["os", "sys"]
    assert "exec(" not in text and "except" not in text


def test_python_315_calls_what_the_start_file_names(installed):
    """What its `site` does (PEP 829), maybe twice: resolve each line as an entry point, and call
    it. The package is imported, and no library."""
    code = f"""
import pathlib, pkgutil, sys
sys.path.append({str(installed.packages)!r})
sys.orig_argv = [sys.executable, "-m", "lm_eval"]
before = list(sys.meta_path)
file = pathlib.Path({str(installed.packages / "lm_eval_icl.start")!r})
for _ in range(2):
    for line in file.read_text("utf-8").splitlines():
        pkgutil.resolve_name(line)()
(ours,) = [finder for finder in sys.meta_path if finder not in before]
print(type(ours).__module__, sys.excepthook.__module__)
assert "lm_eval_icl" in sys.modules and not {{"torch", "lm_eval", "numpy"}} & {{*sys.modules}}
"""
    done = installed.run("python", "-S", "-c", code)
    assert done.stdout == "lm_eval_icl.harness.shim lm_eval_icl.errors\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "PATH"),
        (["-m", "probe"], "-m probe"),
        (["-mprobe"], "-m probe"),
        (["-X", "utf8", "-m", "probe"], "-m probe"),
        (["-Xutf8", "-um", "probe"], "-m probe"),
        (["-W", "ignore", "-Wignore", "-bBsP"], "PATH"),
        (["--check-hash-based-pycs", "never", "-uX", "dev", "-m", "probe"], "-m probe"),
        (["--"], "PATH"),
        (["-OO", "--"], "PATH"),
        (["-c", "import probe"], ""),
        (["-uBc", "import probe"], ""),
        (["-"], ""),
    ],
)
def test_a_command_line_is_read_as_python_reads_it(tmp_path, options, expected):
    """Python runs the line, and prints what it has run and the line that the hook reads."""
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import json, sys\nmain = sys.modules['__main__']\n"
        "ran = '-m probe' if main.__spec__ else getattr(main, '__file__', '')\n"
        "print(json.dumps([ran, sys.orig_argv]))\n"
    )
    words = [*options, "-m", "lm_eval"] if options[-1:] in (["import probe"], ["-"]) else options
    words = [str(probe), "lm_eval"] if not options else words
    if expected == "PATH" and options:
        words = [*options, str(probe), "-m", "lm_eval"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *words],
        input="import probe",
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    ran, line = json.loads(done.stdout)
    expected = str(probe) if expected == "PATH" else expected
    assert program_of(line[1:]) == expected
    assert ran == expected or expected == ""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("-m lm_eval", True),
        ("-m lm_eval.__main__", True),
        ("/env/bin/lm_eval", True),
        ("lm-eval", True),
        ("C:\\env\\Scripts\\lm_eval.exe", True),
        ("C:\\env\\Scripts\\lm-eval-script.py", True),
        ("/site-packages/lm_eval/__main__.py", True),
        ("/site-packages/lm_eval/", True),
        ("-m lm_eval_icl", False),
        ("-m lm_eval.tasks", False),
        ("/home/me/lm_eval.py", False),
        ("/home/me/lm_eval/plot.py", False),
        ("/env/bin/lm-eval-icl", False),
        ("/env/bin/accelerate", False),
        ("/env/bin/torchrun", False),
        ("", False),
    ],
)
def test_which_program_is_lm_eval(program, expected):
    assert is_lm_eval(program) is expected


def test_the_environment_turns_the_hook_on_and_off(installed):
    code = "import lm_eval.models; from lm_eval.api.registry import model_registry as known\n"
    code += "print('pcw' in known, 'icl-pcw' in known)"
    assert installed.run("python", "-c", code).stdout == "False False\n"
    assert installed.run("python", "-c", code, LM_EVAL_ICL="1").stdout == "True True\n"
    for value, ours in (("0", False), ("", True)):
        done = installed.run("python", "-m", "lm_eval", "-h", LM_EVAL_ICL=value)
        assert "usage" in done.stdout
        shown = installed.run("python", "-c", STATE, LM_EVAL_ICL="1" if ours else value).stdout
        assert ("_Finder" in shown) is ours


def test_a_change_of_lm_eval_is_a_line_and_not_hidden(installed):
    code = "import lm_eval_icl.harness.plugin as plugin\ndef fail(): raise RuntimeError('no')\n"
    code += "plugin.register_models = fail\nimport lm_eval.models"
    with pytest.raises(AssertionError, match=r"changed where .*RuntimeError: no.*LM_EVAL_ICL=0"):
        installed.run("python", "-c", code)


# Commands, as typed.

ARGUMENTS = ["--model", "deepthink", "--model_args", f"pretrained={model_path()},T=5,eta=0.01"]
ARGUMENTS += ["--tasks", "icl_demo_short,icl_demo_long", "--num_fewshot", "2", "--limit", "6"]
ARGUMENTS += ["--device", "cpu"]
TWO = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
TWO += ["--dynamo_backend", "no", "--cpu"]
# Forms that start Python in ways of their own: a refusal shows that they are the command.
FORMS = {
    "lm_eval": ["lm_eval"],
    "lm-eval": ["lm-eval"],
    "python -m": ["python", "-m", "lm_eval"],
    "python -X utf8 -m": ["python", "-X", "utf8", "-m", "lm_eval"],
}
COMMANDS = {
    "lm_eval": ["lm_eval"],
    "accelerate launch": ["accelerate", "launch", *TWO, "-m", "lm_eval"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "lm_eval"],
}


@pytest.mark.slow
@pytest.mark.parametrize("form", COMMANDS)
def test_commands_run_as_typed(installed, tmp_path, form):
    """Under a launcher, two processes share the documents; the results are the same."""
    command = [*COMMANDS[form], *ARGUMENTS, "--output_path", tmp_path]
    done = installed.run(*command, ACCELERATE_USE_CPU="true")
    assert done.stdout.count("|icl_demo_short|") == 1 and "|icl_demo_long" in done.stdout
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["results"]["icl_demo_short"]["acc,none"] == 1.0
    assert results["n-samples"]["icl_demo_short"]["effective"] == 6
    run = results["config"]["icl"]
    assert (run["method"], run["T"], run["eta"]) == ("deepthink", 5, 0.01)
    (origin,) = results["plugins"]["models"].items()
    expected = {
        "target": TARGETS["deepthink"],
        "dist": f"lm-eval-icl {run['version']}",
        "used": True,
    }
    assert origin == ("deepthink", expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_of_the_command_is_one_line(installed, form):
    """Before lm-eval reads its tasks."""
    command = [*FORMS[form], "--model", "icl", "--tasks", "icl_demo_short"]
    command += ["--metadata", '{"demonstrations": "graphcut"}']
    with pytest.raises(AssertionError) as error:
        installed.run(*command)
    assert "did you mean 'graph_cut'" in str(error.value) and "Traceback" not in str(error.value)


def test_a_refusal_in_another_program_has_a_traceback(installed):
    with pytest.raises(AssertionError, match="Traceback"):
        installed.run("python", "-c", "from lm_eval_icl.methods import make; make('icll')")


# Python.

EVALUATE = """
import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.smoke.demo import model_path
results = lm_eval.simple_evaluate(
    model=model, model_args={"pretrained": str(model_path())}, tasks=["icl_demo_short"],
    num_fewshot=2, limit=4, device="cpu", bootstrap_iters=0,
    task_manager=TaskManager(include_defaults=False, include_path=task_dir() / "demo"))
print(results["config"]["icl"]["contexts_encoded"], sys.excepthook is sys.__excepthook__)
"""
LAST = "import lm_eval.evaluator, lm_eval.models, lm_eval.tasks, lm_eval.utils\n"
LAST += "from lm_eval import simple_evaluate\n"
PROGRAMS["first"] = f"import lm_eval_icl\nmodel = 'deepthink'\n{EVALUATE}"
PROGRAMS["last"] = LAST + PROGRAMS["first"]


@pytest.mark.parametrize("order", ["first", "last"])
def test_importing_the_package_registers(ran, order):
    assert ran[order][-1] == "1 True"


# Entry points, which lm-eval reads after 0.4.13.

# Its rules (docs/plugins.md and tests/test_registry_plugins.py of its main branch): every entry
# point of the group becomes a placeholder, and one whose name is registered already is passed over.
# LM_EVAL_REGISTRY may name its own file (lm_eval/api/registry.py), which then takes the place of
# this.
DISCOVER = """
import importlib.metadata, importlib.util, os, sys
import lm_eval.api
path = os.environ.get("LM_EVAL_REGISTRY")
if path:
    spec = importlib.util.spec_from_file_location("lm_eval.api.registry", path)
    lm_eval.api.registry = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lm_eval.api.registry)
import lm_eval.models
from lm_eval.api.registry import get_model, model_registry
if builtin:
    model_registry.register(builtin, target="lm_eval.models.dummy:DummyLM")
for point in [] if path else importlib.metadata.entry_points(group="lm_eval.models"):
    if point.name not in model_registry:
        model_registry.register(point.name, target=point)
assert "lm_eval_icl" not in sys.modules
"""


def test_entry_points_are_all_methods_under_two_names():
    names = [*methods.NAMES, *(f"icl-{name}" for name in methods.NAMES)]
    assert list(TARGETS) == names
    for name, value in TARGETS.items():
        model = importlib.metadata.EntryPoint(name, value, "lm_eval.models").load()
        assert model is model_class(name.removeprefix("icl-"))


PROGRAMS["entry"] = f"""builtin = ""
{DISCOVER}
assert get_model("icl-pcw") is get_model("pcw") and "lm_eval_icl" in sys.modules
model = "icl-pcw"
{EVALUATE}
print(results["plugins"]["models"]["pcw"]["target"])
"""


def test_entry_points_alone_run_a_model(ran):
    """Without the hook: with our tasks' folder given, the patches come with the model."""
    assert ran["entry"][-2:] == ["1 True", TARGETS["pcw"]]


PROGRAMS["another"] = f"""builtin = "pcw"
{DISCOVER}
assert get_model("pcw").__name__ == "DummyLM"
import lm_eval_icl
from lm_eval.api.registry import get_model
print(get_model("pcw").__name__, get_model("icl-pcw").__name__)
try:
    get_model("invicll")
except ValueError as refusal:
    print(refusal)
"""


def test_another_model_of_our_name_is_named(ran):
    """lm-eval's own goes first, silently; whoever has imported us is told, and has a second
    name."""
    *errors, names, refusal = ran["another"]
    assert names == "DummyLM pcw"
    assert refusal == "lm-eval-icl: --model: unknown model 'invicll': did you mean 'invicl'?"
    (line,) = [line for line in errors if "DummyLM" in line]
    assert "--model pcw is lm_eval.models.dummy:DummyLM" in line
    assert f"--model icl-pcw is {TARGETS['pcw']}" in line


# Tasks.

# Of lm-eval's 14,000 task files, those of one folder are read.
PROGRAMS["tasks"] = """
import lm_eval_icl
from lm_eval.tasks import TaskManager, manager
manager.__file__ = manager.__file__.replace("manager.py", "glue/manager.py")
Path("mine").mkdir()
Path("mine/mine.yaml").write_text("task: icl_sst2\\ndataset_path: mine\\n")
found = TaskManager(include_path="mine")
given = TaskManager(include_defaults=False, metadata={"labls": 1, "load_format": 2})
path = found.task_index["icl_sst2"].yaml_path
known = {"icl_trec", "sst2"} <= {*found.all_subtasks}
print(path.name, known, "icl_mmlu" in found.all_groups)
print(given.all_tasks)
"""


def test_tasks_are_found_without_an_argument_and_include_path_wins(ran):
    *errors, found, ours = ran["tasks"]
    assert found == "mine.yaml True True" and ours == "[]"
    assert "".join(errors).count("did you mean") == 1


PROGRAMS["list"] = """
from lm_eval_icl.cli import main
sys.argv = ["lm-eval-icl", "tasks"]
main()
"""


def test_the_command_lists_our_tasks(installed, ran):
    folder = installed.run("lm-eval-icl", "tasks", "--path").stdout.strip()
    assert Path(folder).is_relative_to(installed.packages)
    listed = ran["list"]
    assert "icl_sst2" in listed and "icl_mmlu" in listed and "mmlu" not in listed
    files = [file for file in task_dir().rglob("*.yaml") if not file.name.startswith("_")]
    assert len(listed) >= len(files) > 50


# What is imported, and what is declared.


@functools.cache
def distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def imported(folder: Path) -> set[str]:
    """The packages of others that files import, in functions too."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - {*sys.stdlib_module_names, "lm_eval_icl", "lm_eval_icl_hook"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_declared_and_nothing_else():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    users = [extras[name] for name in extras if name not in ("all", "dev", "docs")]
    requirements = itertools.chain(project["dependencies"], *users)
    declared = {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}
    # Distributions that are not installed here have the names of their packages.
    known = {
        name: {plain(dist) for dist in distributions().get(name, [name])}
        for name in imported(ROOT / "lm_eval_icl")
    }
    undeclared = {name for name, dists in known.items() if not dists & declared}
    assert not undeclared
    assert declared == set().union(*known.values()) & declared
    named = re.fullmatch(r"lm-eval-icl\[(.*)\]", *extras["all"])[1].split(",")
    assert sorted(named) == sorted(extras.keys() - {"all", "dev", "docs"})


PARTS = {
    "matplotlib": ("figures", lambda: picture.check_output(Path("x.svg"))),
    "bm25s": ("retrieval", lambda: BM25(["a"], ["a"])),
    "sentence_transformers": ("sentences", lambda: sentence_vectors("a/model", ["a"])),
    "peft": ("lora", lambda: Settings(lora=True)),
    "ray": ("cluster", lambda: connected("")),
}


@pytest.mark.parametrize("package", PARTS)
def test_a_part_without_its_library_says_what_to_install(monkeypatch, package):
    extra, use = PARTS[package]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError) as refusal:
        use()
    assert f"needs {package}: pip install 'lm-eval-icl[{extra}]'." in str(refusal.value)
    assert extra in PYPROJECT["project"]["optional-dependencies"]
