"""In-context-learning methods as models of lm-evaluation-harness.

Importing this package imports nothing else. The methods are in `lm_eval_icl.methods`, and the models that lm-eval
finds by name are in `lm_eval_icl.harness.models`.
"""


def __getattr__(name: str) -> str:
    """`__version__`, which is computed on first use: Python imports this package at every start (harness/shim.py)."""
    if name == "__version__":
        from lm_eval_icl.version import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
