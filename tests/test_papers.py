"""Named studies and the commands of the pages, on narrow stand-ins of the papers' models at their
real lengths."""

import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import processes
from tests.test_docs import ROOT, blocks, commands_of

PAPERS = runpy.run_path(str(ROOT / "scripts/papers.py"))
# A named study of each kind, made smaller still. (`make papers` runs all of them.)
KINDS = {
    "a dev set chooses arguments and demonstrations": (
        "deep-thinking-table1",
        ["--tasks", "icl_trec", "--demonstrations", "stratified,herding:pool=200"],
    ),
    "long prompts of MMLU": (
        "deep-thinking-figure3",
        [
            "--model_args",
            "pretrained=meta-llama/Llama-2-7b-hf",
            "--tasks",
            "icl_mmlu_professional_law",
        ],
    ),
    "GPT-Neo is trained on MetaICL": (
        "invicl-table5",
        ["--tasks", "metaicl_hr_to_lr_unseen", "--methods", "invicl"],
    ),
    "orders are compared, and rules decide": ("cloze", ["--tasks", "icl_bbh_navigate"]),
}
# Pages whose commands differ in kind from those of others. (tests/test_docs.py reads the commands
# of all.)
RUN = (
    "README.md",
    *(f"docs/{name}.md" for name in ("deciding", "metaicl", "selecting", "studies", "training")),
)
# Models of the pages, and the stand-ins that take their places.
OTHERS = ("M", "YOURS", "SmolLM2-135M-Instruct")
# What this machine cannot run, and what is run elsewhere.
NOT_HERE = (
    "wandb|trackio|accelerate|torchrun|srun|load_in_8bit|parallelize|tp_plan|--arch|--lora|--ray|"
    "^python -m|^lm_eval_icl |"
    # test_docs and others run what reads results.
    "^lm-eval-icl (leaderboard|compare|collect|demo|findings)"
)
# Warnings of lm-eval about what is added here to make a command small, and those that it has for
# each task.
ADDED = (
    "--limit (SHOULD ONLY|takes the first rows)|the documents are few|"
    "generation_kwargs: .* through cli|Overwriting default num_fewshot"
)


@pytest.fixture(scope="module")
def out(shared, tmp_path_factory) -> Path:
    """A folder with stand-ins and data under their Hub names."""
    folder = tmp_path_factory.mktemp("papers")
    if not shutil.which("npm"):
        pytest.skip(
            "no npm, from which ../shared/tools/paper_models.py has the tokenizers of GPT-2 and "
            "Llama"
        )
    names = set().union(
        *(PAPERS["models"](yaml.safe_load(path.read_text())) for path in PAPERS["STUDIES"].values())
    )
    try:
        PAPERS["prepare"](folder, names)
    except subprocess.CalledProcessError as error:
        pytest.skip(
            f"no stand-ins: ../shared/tools/paper_models.py failed ({error.stderr[-200:]!r})"
        )
    for name in OTHERS:
        shutil.copytree(folder / "openai-community/gpt2", folder / name)
    template = (
        "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant: "
    )
    (folder / "SmolLM2-135M-Instruct/chat_template.jinja").write_text(template)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_study_of_each_kind_runs(out, kind):
    name, smaller = KINDS[kind]
    study = yaml.safe_load(PAPERS["STUDIES"][name].read_text(encoding="utf-8"))
    cells, failed, said = PAPERS["run"](name, study, out, out / "metaicl/data", 2, smaller)
    assert cells > 0 and (failed, said) == (0, "")


def runnable(page: Path) -> list[list[str]]:
    """The commands of a page as they are typed, but for their size."""
    found = []
    for command in commands_of(page):
        if re.search(NOT_HERE, command) or "..." in command:
            continue
        command = re.sub(
            r"demonstrations=k_center(?!\.)", "demonstrations=k_center:pool=200", command
        )
        command = command.replace("$seed", "0").replace("; done", "").replace("$MODEL", "gpt2")
        words = shlex.split(
            re.sub(r"(study \S+table2) ", r"\1 --seeds 0 ", command.partition(" | ")[0]),
            comments=True,
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_run(out, tmp_path, page):
    """In their order, in one folder. None is refused, and none has more than three warnings."""
    for path in out.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "MetaICL").symlink_to(out / "metaicl")
    for name, _, text in blocks(ROOT / page):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    found = runnable(ROOT / page)
    assert found
    for program, *arguments in found:
        if "--metaicl" in arguments:
            arguments += ["--train_k", "160", "--metadata", "missing=skip"]
        elif "metaicl=MetaICL/data" in arguments:
            arguments[arguments.index("metaicl=MetaICL/data")] += ",missing=skip"
        done = processes.command(*arguments, program=program, cwd=tmp_path)
        assert done.returncode == 0, (arguments, done.stderr[-2000:])
        warnings = [
            line
            for line in done.stderr.splitlines()
            if "WARNING" in line and not re.search(ADDED, line)
        ]
        assert len(warnings) <= 3, warnings
