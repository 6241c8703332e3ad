"""The methods: each turns a context into a memory, and owns the arguments that this takes."""

from lm_eval_icl.methods.deepthink import DeepThink
from lm_eval_icl.methods.icl import ICL

__all__ = ["ICL", "DeepThink"]
