"""Labels and formats as axes of a study, and the study `robustness`, which ends in a card."""

import io

import pytest
from rich.console import Console

from lm_eval_icl.studies import end
from tests.studies import running

pytestmark = [pytest.mark.usefixtures("own_tasks"), pytest.mark.slow]
METHODS = ["hf", "icl", {"icl": {"canonical_order": True}}, "pcw"]
AXES = {"labels": ["none", "flipped:0.5"], "formats": "0..1", "orders": 3, "num_fewshot": [4, 2]}


@pytest.fixture(scope="module")
def study(tmp_path_factory, own_tasks):
    return running.conduct(
        tmp_path_factory.mktemp("o") / "study", methods=METHODS, one_at_a_time=True, **AXES
    )


def test_cells_differ_in_one_thing(study):
    varied = {(cell.num_fewshot, cell.labels, cell.format, cell.order) for cell in study.cells()}
    orders = {(4, None, 0, order) for order in range(3)}
    # Two demonstrations have no third order.
    assert varied - orders == {(4, "flipped:0.5", 0, 0), (4, None, 1, 0), (2, None, 0, 0)}
    assert orders <= varied
    assert len(study.cells()) == 4 * 6 * 2


def test_each_cell_is_what_lm_eval_gives_alone(study):
    """With `--metadata labels=...` or `format=...`; `hf` too."""
    for cell in study.cells(seed=1):
        if cell.labels:
            metadata = {"labels": cell.labels}
        elif cell.format:
            metadata = {"format": cell.format}
        else:
            continue
        mine = study.samples(cell)
        theirs = running.evaluated(study, cell, metadata=metadata)["samples"][cell.task]
        running.assert_same_prompts(mine, theirs)
        running.assert_alike(mine, theirs)
        assert metadata.items() <= study.results(cell)["configs"][cell.task]["metadata"].items()


def test_the_end_is_one_card(study):
    printed = io.StringIO()
    end.conclude(study.grid, study.folder, "robustness", {}, Console(file=printed, width=80))
    assert "canonical_order=True" in printed.getvalue()
    assert "format" in printed.getvalue()
    assert (study.folder.path / "figures" / "card.svg").is_file()
    assert "What predictions depend on" in (study.folder.path / "board.html").read_text()
    results, _ = end.results_of(study.folder, study.cells())
    board = end.board_of(results, end.columns_of(study.study, study.grid.tasks))
    flips = {}
    for row in board.card.rows:
        values = {column.name: estimate for column, estimate in row.values.items()}
        flips[row.entry.label] = values["order flips"].mean
    assert len(flips) == 4
    assert flips["pcw"] == flips["icl canonical_order=True"] == 0
