"""For every file of the folder."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(own_tasks, tried_once):
    """What takes long and always comes to the same is done once."""
