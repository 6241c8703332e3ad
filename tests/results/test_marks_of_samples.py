"""What a sample cannot show is said as a mark of the cell."""

from __future__ import annotations

from tests.boards import write
from tests.results.files import board_of


def marks(folder, seeds=1, **settings):
    for seed in range(seeds):
        write(folder, seed=seed, **settings)
    (entry,) = board_of(folder).entries
    return set(entry.cells["t"].marks)


def test_few_seeds(tmp_path):
    assert marks(tmp_path / "1") == {"one set"}
    assert marks(tmp_path / "2", seeds=2) == {"few seeds"}
    assert marks(tmp_path / "5", seeds=5) == set()


def test_few_documents(tmp_path):
    assert marks(tmp_path, seeds=5, n=29) == {"few documents"}


def test_one_label(tmp_path):
    assert marks(tmp_path / "all", seeds=5, gold=[1] * 40) == {"one label"}
    assert marks(tmp_path / "most", seeds=5, gold=[1] * 39 + [0]) == set()


def test_one_run_is_enough_where_no_set_is_drawn(tmp_path):
    assert marks(tmp_path / "retrieved", metadata={"demonstrations": "similar"}) == set()
    assert marks(tmp_path / "none", shots=0) == set()


def test_one_set_is_drawn_for_all_documents_however_their_queries_look(tmp_path):
    way = {"demonstrations": "stratified"}
    assert marks(tmp_path, fewshot_delimiter="\n", metadata=way) == {"one set"}


def test_all_right_answers_without_samples_have_no_narrow_interval(tmp_path):
    write(tmp_path, put={"results.t": {"acc,none": 1.0, "acc_stderr,none": 0.0}}, samples=False)
    (entry,) = board_of(tmp_path).entries
    low, high = entry.cells["t"].estimate.interval
    assert 0.93 < low < 0.95
    assert high == 1


def test_few_seeds_without_samples_have_a_wide_interval(tmp_path):
    """The standard error of three values is not exceeded by chance as that of many."""
    for seed, right in enumerate(([1, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0])):
        write(tmp_path, seed=seed, right=right * 10, samples=False)
    (entry,) = board_of(tmp_path).entries
    assert entry.cells["t"].estimate.interval == (0, 1)
