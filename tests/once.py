"""What lm-eval reads and computes again for every evaluation, each time with the same result, is
kept by the tests.

Measured on two idle cores: an index of lm-eval's 14,000 task files takes 8 seconds, the list of
installed packages 0.8.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def install() -> None:
    import lm_eval.utils
    import torch.utils.collect_env
    from lm_eval.tasks import _index

    collect = torch.utils.collect_env
    collect.get_pretty_env_info = functools.cache(collect.get_pretty_env_info)
    # A compiled template is a function of its text. Our models keep them; here, other models do,
    # too.
    lm_eval.utils.env.from_string = functools.lru_cache(1000)(lm_eval.utils.env.from_string)
    theirs = Path(_index.__file__).parent
    load = _index.load_yaml
    keep = functools.cache(load)

    def load_yaml(path: Path, **kwargs: Any) -> dict[str, Any]:
        """A file of lm-eval's own, read for its index: lm-eval copies what is in it before it
        changes it."""
        for_index = kwargs == {"resolve_func": False, "recursive": True}
        read = keep if for_index and path.is_relative_to(theirs) else load
        return read(path, **kwargs)

    _index.load_yaml = load_yaml
