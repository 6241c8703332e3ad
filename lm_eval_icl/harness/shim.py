"""Makes `lm_eval --model icl` work with lm-eval 0.4.13, which has no plugins.

The `.pth` file next to the installed package imports this module at every start of Python, so the import must be fast
and must never fail. It only puts a finder on `sys.meta_path`. Directly after some modules of lm-eval are loaded, the
finder calls `plugin.imported`, which registers this package's models and tasks.

lm-eval after 0.4.13 finds our models by the entry points in pyproject.toml, when a model is made. The finder is still
needed then for the other patches (`patches.PATCHES`), and since lm-eval reads its tasks earlier. Only
`plugin.register_models` can go: other packages with methods then have to declare entry points of both groups.
"""

import sys


class _Finder:
    # The modules of lm-eval after whose loading `plugin.imported` is called.
    waiting = frozenset(
        (
            "lm_eval.models lm_eval.tasks.manager lm_eval.api.task lm_eval.api.model lm_eval.utils "
            "lm_eval.evaluator lm_eval.api.registry lm_eval.config.evaluate_config"
        ).split()
    )

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in cls.waiting:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            run(module)
            try:
                from lm_eval_icl.harness import plugin

                plugin.imported(name)
            except Exception as error:
                print(f"lm-eval-icl: not registered with lm-eval: {error!r}", file=sys.stderr)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
