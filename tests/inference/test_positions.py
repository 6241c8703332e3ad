"""A model's learned positions, and prompts that need more of them."""

from __future__ import annotations

import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.positions import check_length
from tests import tiny


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_length_above_the_learned_positions_is_refused(name):
    model = tiny.build(name)
    known = model.config.max_position_embeddings
    check_length(model, known)
    with pytest.raises(InputError, match=f"max_length={known + 1}: .* for {known} positions only"):
        check_length(model, known + 1)


def test_rotary_embeddings_have_no_such_limit():
    model = tiny.build("llama")
    check_length(model, model.config.max_position_embeddings + 1)
