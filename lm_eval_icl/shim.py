"""Makes `lm_eval --model icl` work as typed with lm-eval 0.4.13, which has no plugin mechanism.

The `.pth` file beside the installed package imports this module at every start of Python, so it costs
next to nothing and must never fail: it puts one finder on `sys.meta_path`, which waits until somebody
imports `lm_eval.models` or `lm_eval.tasks.manager` and then, that module being loaded, tells it about us.
"""

import sys


class _Finder:
    # module that lm-eval imports -> what `lm_eval_icl.plugin` does once it is loaded
    waiting = {"lm_eval.models": "register_models", "lm_eval.tasks.manager": "add_task_dir"}  # noqa: RUF012

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
                from lm_eval_icl import plugin

                getattr(plugin, cls.waiting[name])()
            except Exception as error:
                print(f"lm-eval-icl: not registered with lm-eval: {error!r}", file=sys.stderr)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
