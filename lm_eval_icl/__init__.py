"""In-context-learning methods as models of lm-evaluation-harness.

Importing this package imports nothing else; the models are in `lm_eval_icl.models`.
"""

__version__ = "0.1.0"
