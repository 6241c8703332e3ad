"""Files that are written whole or not at all."""

import resource

import pytest

from lm_eval_icl.files import replacing, write_atomically
from tests import commands
from tests.boards import write


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "first")
    with pytest.raises(ValueError, match="half way"), replacing(path) as half:
        half.write_text("sec")
        assert path.read_text() == "first" and half.parent == tmp_path
        raise ValueError("half way")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, "second")
    assert path.read_text() == "second" and list(tmp_path.iterdir()) == [path]


def test_a_page_on_a_full_disk_is_the_old_one(tmp_path):
    """A file cannot become larger than a limit of the process, as on a disk without space."""
    write(tmp_path / "runs", "icl", 0, says=[0, 1] * 20)
    page = tmp_path / "pages" / "board.html"
    command = ("leaderboard", tmp_path / "runs", "--output", page)
    commands.run(*command)
    before = page.read_bytes()
    write(tmp_path / "runs", "star", 0, says=[0] * 40)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        said = commands.refused(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.startswith(f"{page}: cannot be written")
    assert page.read_bytes() == before and list(page.parent.iterdir()) == [page]
    commands.run(*command)
    assert page.read_bytes() != before
