"""For every file of the folder."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _tried_once(tried_once):
    """What a model can do is found out once."""
