"""In-context-learning methods as models of lm-evaluation-harness.

Importing this package registers its models, its tasks and its changes with lm-eval: at once with
what is loaded of lm-eval, and with the rest when it is loaded. It loads neither lm-eval nor torch.
The methods are in `lm_eval_icl.methods`, and the models that lm-eval finds by name are in
`lm_eval_icl.harness.models`.
"""

import importlib


def __getattr__(name: str) -> str:
    """`__version__`, which is computed on first use: it may have to ask git."""
    if name == "__version__":
        from lm_eval_icl.version import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# By name, since the rooms below know this one.
importlib.import_module("lm_eval_icl.harness.shim").register()
