"""The methods: each turns a context into a memory, and owns the arguments that this takes."""

from lm_eval_icl.methods.batchicl import BatchICL
from lm_eval_icl.methods.deepthink import DeepThink
from lm_eval_icl.methods.icl import ICL
from lm_eval_icl.methods.invicl import InvICL
from lm_eval_icl.methods.method import Method
from lm_eval_icl.methods.nope import NoPE
from lm_eval_icl.methods.pcw import PCW
from lm_eval_icl.methods.prefixicl import PrefixICL
from lm_eval_icl.methods.saicl import SAICL

__all__ = ["ICL", "PCW", "SAICL", "BatchICL", "DeepThink", "InvICL", "Method", "NoPE", "PrefixICL"]
