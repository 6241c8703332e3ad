"""Registers this package with lm-eval, whose modules are loaded before or after it.

lm-eval 0.4.13 looks for no plugins. Its next version finds models by the entry points in
pyproject.toml when a model is made; the other changes (`patches.PATCHES`) are needed by then, too.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from lm_eval_icl.harness.patches import PATCHES

# The modules of lm-eval with which something is registered.
MODULES = dict.fromkeys(["lm_eval.models", *(patch.module for patch in PATCHES)])


class _Finder:
    """A finder of `sys.meta_path` for modules of lm-eval, with which this package is registered
    when they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _register_with(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def register() -> None:
    """Register with the modules of lm-eval that are loaded, and with the others as soon as they are
    loaded. A second call changes nothing."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    for module in MODULES:
        if module in sys.modules:
            _register_with(module)


def _register_with(module: str) -> None:
    from lm_eval_icl.errors import refusing
    from lm_eval_icl.harness import plugin

    with refusing(
        "this version of lm-eval has changed where this package joins it",
        "Install the version of lm-eval that pip finds for lm-eval-icl, or set LM_EVAL_ICL=0 to "
        "run lm_eval without this package.",
    ):
        plugin.imported(module)
