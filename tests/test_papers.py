"""Named studies and the commands of the pages, on narrow stand-ins of the papers' models at their real lengths."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import processes
from tests.test_docs import DOCS, PAGES, ROOT, commands_of

PAPERS = runpy.run_path(str(ROOT / "scripts/papers.py"))
# A named study of each kind, made smaller still.
KINDS = {
    "a dev set chooses arguments": ("deep-thinking-figure6", ["--tasks", "icl_sst2"]),
    "a dev set chooses arguments and demonstrations": (
        "deep-thinking-table1",
        ["--tasks", "icl_trec", "--demonstrations", "stratified,herding:pool=200"],
    ),
    "models select demonstrations": (
        "deep-thinking-table1-no-dev",
        ["--tasks", "icl_mr", "--demonstrations", "stratified,herding:pool=200,cal:pool=200,graph_cut:pool=200"],
    ),
    "models are trained, on MetaICL": ("invicl-table8", ["--tasks", "metaicl_hr_to_lr"]),
    "GPT-Neo is trained and evaluated behind its window": (
        "invicl-table5",
        ["--tasks", "metaicl_hr_to_lr,metaicl_hr_to_lr_unseen"],
    ),
    "orders are compared": ("deep-thinking-figure5", []),
    "long prompts of MMLU": ("deep-thinking-figure3", ["--model_args", "pretrained=meta-llama/Llama-2-7b-hf"]),
}
# Models of the pages, and the stand-ins that take their places.
OTHERS = ("M", "YOURS", "SmolLM2-135M-Instruct")
# What this machine cannot run, and what is run elsewhere.
NOT_HERE = (
    "wandb|trackio|accelerate|torchrun|srun|load_in_8bit|parallelize|tp_plan|--arch|--lora|--ray|"
    "^python -m|^lm_eval_icl |"
    "^lm-eval-icl (leaderboard|compare|collect|demo|findings)"  # test_docs and others run what reads results
)
# Warnings of lm-eval about what is added here to make a command small, and those that it has for each task.
ADDED = "--limit SHOULD ONLY|generation_kwargs: .* specified through cli|Overwriting default num_fewshot"
# They run for minutes even here: every cell of a whole table; `make papers` runs them.
WHOLE_TABLES = "study (deep-thinking-table2|invicl-table2|which|thinking|shots|cloze)"


@pytest.fixture(scope="module")
def out(shared, tmp_path_factory) -> Path:
    """A folder with stand-ins and data under their Hub names."""
    folder = tmp_path_factory.mktemp("papers")
    if not shutil.which("npm"):
        pytest.skip("no npm, from which ../shared/tools/paper_models.py has the tokenizers of GPT-2 and Llama")
    names = set().union(*(PAPERS["models"](yaml.safe_load(path.read_text())) for path in PAPERS["STUDIES"].values()))
    try:
        PAPERS["prepare"](folder, names)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no stand-ins: ../shared/tools/paper_models.py failed ({error.stderr[-200:]!r})")
    for name in OTHERS:
        shutil.copytree(folder / "openai-community/gpt2", folder / name)
    template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant: "
    (folder / "SmolLM2-135M-Instruct/chat_template.jinja").write_text(template)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_study_of_each_kind_runs(out, kind):
    name, smaller = KINDS[kind]
    study = yaml.safe_load(PAPERS["STUDIES"][name].read_text(encoding="utf-8"))
    cells, failed, said = PAPERS["run"](name, study, out, out / "metaicl/data", 2, smaller)
    assert cells > 0 and (failed, said) == (0, "")


@pytest.mark.slow
def test_a_study_that_generates(out):
    """No named study does. Chains of thought of BBH, whose prompts fill GPT-2."""
    study = {
        "models": "pretrained=openai-community/gpt2",
        "methods": ["icl", "invicl", {"deepthink": {"T": 2}}],
        "tasks": [{"task": "bbh_cot_fewshot_navigate", "generation_kwargs": {"max_gen_toks": 4}}],
        "seeds": 0,
        "metric": "exact_match",
    }
    (out / "generates.yaml").write_text(yaml.safe_dump(study))
    cells, failed, said = PAPERS["run"]("generates.yaml", study, out, None, 2)
    assert (cells, failed, said) == (3, 0, "")


def runnable(page: Path) -> list[list[str]]:
    """The commands of a page as they are typed, but for their size."""
    found = []
    for command in commands_of(page):
        if re.search(NOT_HERE, command) or re.search(WHOLE_TABLES, command) or "..." in command:
            continue
        command = re.sub(r"demonstrations=k_center(?!\.)", "demonstrations=k_center:pool=200", command)
        command = command.replace("$seed", "0").replace("; done", "").replace("$MODEL", "gpt2")
        words = shlex.split(command.partition(" | ")[0], comments=True)
        if "train" in words[:2]:
            words += ["--steps", "2", "--device", "cpu", "--eval_steps", "0"]
        elif "select" in words[:2]:
            words = [*words[:2], f"{words[2]}:pool=200", *words[3:], "--seeds", "3"]
        elif words[0] == "lm_eval":
            words += ["--limit", "2", "--device", "cpu", "--batch_size", "2"]
            if any(name in " ".join(words) for name in (",bbh", "leaderboard")):
                words += ["--gen_kwargs", "max_gen_toks=4"]
        found.append(words)
    return found


# Reports have what was run once, with the models and data of then.
COMMANDS = [(page, words) for page in PAGES if "reports" not in page.parts for words in runnable(page)]


def test_most_commands_of_the_pages_are_run_here():
    assert len(COMMANDS) > 40 and {words[0] for _, words in COMMANDS} == {"lm_eval", "lm-eval-icl"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", dict.fromkeys(page for page, _ in COMMANDS), ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_of_a_page_run(out, tmp_path, page):
    """In their order, in one folder. None is refused, and none has more than three warnings."""
    for path in out.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "MetaICL").symlink_to(out / "metaicl")
    (tmp_path / "DATA").symlink_to(out / "metaicl/data")
    for name, text in re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```\n", page.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "prompt.json").write_text(json.dumps({"demonstrations": ["a b\n", "c\n"], "query": "d"}))
    for of_page, (program, *arguments) in COMMANDS:
        if of_page != page:
            continue
        if "--metaicl" in arguments:
            arguments += ["--train_k", "160", "--metadata", "missing=skip"]
        elif "metaicl=MetaICL/data" in arguments:
            arguments[arguments.index("metaicl=MetaICL/data")] += ",missing=skip"
        done = processes.command(*arguments, program=program, cwd=tmp_path)
        assert done.returncode == 0, (arguments, done.stderr[-2000:])
        warnings = [line for line in done.stderr.splitlines() if "WARNING" in line and not re.search(ADDED, line)]
        assert len(warnings) <= 3, (arguments, warnings)


def test_every_study_has_options_that_make_it_small():
    """Those that the command takes; and every study is of a model that has a stand-in."""
    for path in PAPERS["STUDIES"].values():
        study = yaml.safe_load(path.read_text(encoding="utf-8"))
        small = PAPERS["options"](study, DOCS, 2)
        assert small[:2] == ["--limit", "2"] and re.fullmatch(r"\d+", small[3])
        assert ("--train" in small) == ("train" in study)
        assert all(name.count("/") == 1 for name in PAPERS["models"](study))
