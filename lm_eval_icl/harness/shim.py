"""Makes `lm_eval --model icl` work with lm-eval 0.4.13, which has no plugins.

The `.pth` file next to the installed package imports this module at every start of Python, so the import must be fast
and must never fail. It only puts a finder on `sys.meta_path`. Directly after some modules of lm-eval are loaded, the
finder calls `plugin.imported`, which registers this package's models and tasks. Before lm-eval's command begins, it
lets threads of PyTorch that wait give way.

lm-eval after 0.4.13 finds our models by the entry points in pyproject.toml, when a model is made. The hook is still
needed then, since lm-eval reads its tasks before: for the folder of our tasks, `--metadata demonstrations=...`, the
checks of arguments that come before hours of work, names MODULE:CLASS, and what all models record and read
(`patches.PATCHES`, those that are early). Only `plugin.register_models` goes: for methods of other packages, these then
declare entry points of both groups.
"""

import sys


def give_way():  # type: ignore[no-untyped-def]
    """Let threads of PyTorch that wait for others give way, unless the environment says something else. By default they
    keep their cores busy meanwhile, which beside other programs makes everything several times as slow."""
    import os

    if "torch" not in sys.modules:  # its threads read the variable when it is imported
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _starts_lm_eval():  # type: ignore[no-untyped-def]
    """Whether this process is lm-eval's command, `lm_eval` or `python -m lm_eval`, and no other program."""
    program = sys.argv[0]
    if program == "-m":  # Python looks for the module, whose name only the original arguments have
        return sys.orig_argv[-len(sys.argv)] in ("lm_eval", "lm_eval.__main__", "-mlm_eval")
    name = program.replace("\\", "/").rpartition("/")[2]
    return name.removesuffix(".exe").removesuffix("-script.py") in ("lm_eval", "lm-eval")


class _Finder:
    # The modules of lm-eval for which something is done when they are loaded, or before.
    waiting = frozenset(
        {
            "lm_eval.__main__",
            "lm_eval.models",
            "lm_eval.tasks.manager",
            "lm_eval.api.task",
            "lm_eval.api.model",
            "lm_eval.evaluator",
            "lm_eval.api.registry",
            "lm_eval.config.evaluate_config",
        }
    )

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in cls.waiting:
            return None
        if name == "lm_eval.__main__":
            try:
                if _starts_lm_eval():
                    give_way()
            except Exception:  # a program that has put something else in place of its arguments
                pass
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
