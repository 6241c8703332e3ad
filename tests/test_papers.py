"""Named studies on narrow stand-ins of the papers' models at their real lengths."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.test_docs import ROOT

PAPERS = runpy.run_path(str(ROOT / "scripts/papers.py"))
# A named study of each kind, made smaller still. (`make papers` runs all of them.)
KINDS = {
    "a dev set chooses arguments and demonstrations": (
        "deep-thinking-table1",
        ["--tasks", "icl_trec", "--demonstrations", "stratified,herding:pool=200"],
    ),
    "long prompts of MMLU": (
        "deep-thinking-figure3",
        ["--model_args", "pretrained=meta-llama/Llama-2-7b-hf", "--tasks", "icl_mmlu_professional_law"],
    ),
    "GPT-Neo is trained on MetaICL": ("invicl-table5", ["--tasks", "metaicl_hr_to_lr_unseen"]),
    "orders are compared, and rules decide": ("cloze", ["--tasks", "icl_bbh_navigate"]),
}


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
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_study_of_each_kind_runs(out, kind):
    name, smaller = KINDS[kind]
    study = yaml.safe_load(PAPERS["STUDIES"][name].read_text(encoding="utf-8"))
    cells, failed, said = PAPERS["run"](name, study, out, out / "metaicl/data", 2, smaller)
    assert cells > 0 and (failed, said) == (0, "")
