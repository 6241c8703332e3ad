"""Files that are written whole or not at all."""

import pytest

from lm_eval_icl.files import replacing, write_atomically


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
