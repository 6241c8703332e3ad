"""In-context-learning methods as models of lm-evaluation-harness.

Importing this package imports nothing else. The methods are in `lm_eval_icl.methods`, and the models that lm-eval
finds by name are in `lm_eval_icl.harness.models`.
"""

__version__ = "0.1.0"
