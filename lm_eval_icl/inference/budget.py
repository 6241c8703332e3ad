"""Halves the numbers of tokens, queries and texts that run at once on out-of-memory.

`methods.runner` encodes contexts, scores queries and continues texts inside a `MemoryBudget`. Two
kinds of passes are outside, since they cannot be made smaller: those that find out what a model can
do (`inference.trials`), and those of `score_memories`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.schedule import Sizes
from lm_eval_icl.prompts.tokens import Context

T = TypeVar("T")


@dataclass
class MemoryBudget:
    """How much runs at once on a device. On out-of-memory a number is halved for the whole run.

    Args:
        store: the stored memories, which are freed first.
        sizes: how much runs at once at the beginning.
        where: the model and the device, for the error: "GPT2LMHeadModel on cuda:0".
        tensor_parallel: each pass is divided among several processes. If one process ran a smaller
            pass, the others would wait for it forever, so an out-of-memory error ends the run.
    """

    store: PrefixCache
    sizes: Sizes
    where: str
    tensor_parallel: bool = False

    def fit(
        self, run: Callable[[], T], halve: Callable[[], str] = str, context: Context | None = None
    ) -> T:
        """Call `attempt` until `run` does not run out of memory. Return the result of `run`."""
        while (result := self.attempt(run, halve, context)) is None:
            pass
        return result

    def attempt(
        self, run: Callable[[], T], halve: Callable[[], str], context: Context | None
    ) -> T | None:
        """Call `run` and return its result, which is not None.

        On out-of-memory, free the stored memories. If there are none, call `halve`. Then return
        None, and the caller tries again.

        Args:
            halve: lowers a number of `sizes`, for example by the method `halve`. It returns a line
                for the log, or "" if no number can be lowered.
            context: the context whose memory is in use and is not freed.

        Raises:
            InputError: no memory can be freed, and no number lowered.
        """
        try:
            return run()
        except RuntimeError as error:
            if self.tensor_parallel or not should_reduce_batch_size(error):
                raise
            trouble = str(error).split(". ")[0]
        # After the except block, the exception no longer holds references to the tensors of the
        # pass.
        clear_device_cache(garbage_collection=True)
        if self.store.shrink(context):
            log.warning(
                "%s: %d bytes of memories are kept from now on", trouble, self.store.max_bytes
            )
        elif less := halve():
            log.warning("%s: %s", trouble, less)
        else:
            raise InputError(
                f"{trouble}: one prompt alone needs more memory than the device has "
                f"({self.where}). Lower --num_fewshot, or spread the model over devices "
                "(--model_args parallelize=True). What --use_cache has stored is kept."
            )
        return None

    def halve(self, tokens: int, rows: int = 1) -> str:
        """Halve the size that did not fit.

        Args:
            tokens: the number of tokens of a pack; 0 if a batch of rows did not fit.
            rows: the number of rows of the batch.

        Returns:
            The line for the log, or "" if a single row did not fit.
        """
        if tokens:
            self.sizes = replace(self.sizes, pack_tokens=tokens // 2, queries=1)
            return (
                f"from now on, log-likelihoods are scored in packs of {self.sizes.pack_tokens} "
                "tokens"
            )
        if rows == 1:
            return ""
        self.sizes = replace(self.sizes, texts=rows // 2)
        return f"from now on, batches have {self.sizes.texts} rows"
