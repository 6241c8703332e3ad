"""Makes `lm_eval --model icl` work with lm-eval 0.4.13, which has no plugins.

The `.pth` file next to the installed package imports this module at every start of Python, so the import must be fast
and must never fail. It only puts a finder on `sys.meta_path`. When `lm_eval.models` or `lm_eval.tasks.manager` is
imported, the finder registers this package's models or tasks directly after that module is loaded.
"""

import sys


class _Finder:
    # module of lm-eval -> (module below lm_eval_icl.harness, its function to call when the former is loaded)
    waiting = {  # noqa: RUF012
        "lm_eval.models": ("plugin", "register_models"),
        "lm_eval.tasks.manager": ("patches", "find_tasks"),
    }

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
                from importlib import import_module

                ours, function = cls.waiting[name]
                getattr(import_module(f"lm_eval_icl.harness.{ours}"), function)()
            except Exception as error:
                print(f"lm-eval-icl: not registered with lm-eval: {error!r}", file=sys.stderr)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
