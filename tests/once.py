"""What lm-eval does again for every evaluation, each time with the same result, is done once by the tests.

An evaluation of a tiny model takes a tenth of a second. Of the packages that are installed, which lm-eval writes into
the results, pip makes a list in 0.8 seconds; and every command of lm-eval reads its 14,000 task files, for several
seconds. Programs that a test starts as a user does, do all of it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import filelock

# Names a file in which the process that reads the task files first keeps what is in them, for all others.
KEPT = "LM_EVAL_ICL_TASK_FILES"
if KEPT not in os.environ:
    os.environ[KEPT] = str(Path(tempfile.gettempdir()) / f"lm_eval_task_files_{os.getpid()}")
    for name in (os.environ[KEPT], f"{os.environ[KEPT]}.lock"):
        atexit.register(Path(name).unlink, missing_ok=True)


@functools.cache
def install() -> None:
    import lm_eval.utils
    import torch.utils.collect_env
    from lm_eval.tasks import _index

    collect = torch.utils.collect_env
    collect.get_pretty_env_info = functools.cache(collect.get_pretty_env_info)
    # A compiled template is a function of its text. Our models keep them; here, others do, too.
    lm_eval.utils.env.from_string = functools.lru_cache(1000)(lm_eval.utils.env.from_string)  # type: ignore[method-assign]
    load, own = _index.load_yaml, Path(_index.__file__).parent

    @functools.cache
    def task_files() -> dict[Path, dict[str, Any]]:
        """What is in lm-eval's task files."""
        file = Path(os.environ[KEPT])
        with filelock.FileLock(f"{file}.lock"):
            if not file.exists():
                configs = {}
                for path in _index.TaskIndex._iter_yaml_files(own):
                    try:
                        config = load(path, resolve_func=False, recursive=True)
                        if json.loads(json.dumps(config)) == config:
                            configs[str(path)] = config
                    except Exception:  # lm-eval leaves it out; or it holds more than JSON can, and is read again
                        continue
                file.write_text(json.dumps(configs), encoding="utf-8")
        return {Path(path): config for path, config in json.loads(file.read_text(encoding="utf-8")).items()}

    def load_yaml(path: Path, **kwargs: Any) -> dict[str, Any]:
        """lm-eval copies what it has read before it changes it."""
        if kwargs == {"resolve_func": False, "recursive": True} and path.is_relative_to(own):
            known = task_files()
            if path in known:
                return known[path]
        return load(path, **kwargs)

    _index.load_yaml = load_yaml


if __name__ == "__main__":  # `python -m tests.once MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS` after `install`
    import runpy
    import sys

    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
