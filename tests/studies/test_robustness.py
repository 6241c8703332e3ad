"""Labels and formats as axes of a study, and the study `robustness`, which ends in a card."""

import io

import pytest
from rich.console import Console

from lm_eval_icl.studies import end
from tests.studies import running

pytestmark = pytest.mark.usefixtures("own_tasks")
METHODS = ["hf", "icl", {"icl": {"canonical_order": True}}, "pcw"]
AXES = {"labels": ["none", "flipped:0.5"], "formats": "0..1", "orders": 3, "num_fewshot": [4, 2]}


@pytest.fixture(scope="module")
def study(tmp_path_factory, own_tasks):
    return running.conduct(
        tmp_path_factory.mktemp("o") / "study", methods=METHODS, one_at_a_time=True, **AXES
    )


def test_cells_differ_in_one_thing(study):
    """And each is what lm-eval gives alone, with `--metadata labels=...` or `format=...`; `hf` too."""
    axes = {(c.num_fewshot, c.labels, c.format, c.order) for c in study.cells()}
    others = {
        (4, "flipped:0.5", 0, 0),
        (4, None, 1, 0),
        (2, None, 0, 0),
    }  # two demonstrations have no third order
    assert axes == others | {(4, None, 0, order) for order in range(3)}
    assert len(study.cells()) == 4 * 6 * 2
    for cell in (cell for cell in study.cells() if (cell.labels or cell.format) and cell.seed == 1):
        metadata = {"labels": cell.labels} if cell.labels else {"format": cell.format}
        alone = running.evaluated(study, cell, metadata=metadata)
        mine = study.samples(cell)
        theirs = alone["samples"][cell.task]
        assert [sample["prompt_hash"] for sample in mine] == [
            sample["prompt_hash"] for sample in theirs
        ]
        running.assert_alike(mine, theirs)
        assert metadata.items() <= study.results(cell)["configs"][cell.task]["metadata"].items()


def test_the_end_is_one_card(study):
    said = io.StringIO()
    end.conclude(study.grid, study.folder, "robustness", {}, Console(file=said, width=80))
    assert "canonical_order=True" in said.getvalue()
    assert "format" in said.getvalue()
    assert (study.folder.path / "figures" / "card.svg").is_file()
    assert "What predictions depend on" in (study.folder.path / "board.html").read_text()
    board = end.board_of(
        end.results_of(study.folder, study.cells()), end.columns_of(study.study, study.grid.tasks)
    )
    flips = {row.entry.label: [e.mean for of, e in row.values.items() if of.name == "order flips"]
             for row in board.card.rows}  # fmt: skip
    assert len(flips) == 4
    assert flips["pcw"] == flips["icl canonical_order=True"] == [0]
