"""How many tokens, queries and texts run at once; the numbers are halved on out-of-memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.store import MemoryStore
from lm_eval_icl.tokens import Context

T = TypeVar("T")


@contextmanager
def room_for_trials(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context, a loaded model is tried with a few tokens.

    Raises:
        InputError: its weights leave no room for them on the device.
    """
    try:
        yield
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise InputError(
            f"{str(error).split('. ')[0]}: beside the weights of {type(model).__name__} ({model.dtype}), "
            f"{device_of(model)} has no room for the few tokens that a model is tried with: end other programs on the "
            "device, load a smaller dtype (--model_args dtype=bfloat16), or spread the model over devices "
            "(--model_args parallelize=True)."
        ) from error


class MemoryBudget:
    """How much runs at once on a device. On out-of-memory a number is halved, and stays so for the rest of the run.

    Attributes:
        pack_tokens: how many tokens of queries and options, and of contexts side by side, share one forward pass that
            scores.
        queries: how many queries share such a pass at least, even if they have more tokens.
        texts: how many texts are generated, or queries scored that cannot be packed, in one batch.

    Args:
        store: the stored memories, which are freed first.
        what: the model and the device, for the error: "GPT2LMHeadModel on cuda:0".
        tensor_parallel: each pass is divided among several processes. If one process retried with less, the others
            would wait for it forever, so out-of-memory is then an error.
    """

    def __init__(
        self, store: MemoryStore, pack_tokens: int, queries: int, texts: int, what: str, tensor_parallel: bool = False
    ) -> None:
        self.store, self.what, self.tensor_parallel = store, what, tensor_parallel
        self.pack_tokens, self.queries, self.texts = pack_tokens, queries, texts

    def fit(self, run: Callable[[], T], halve: Callable[[], str] = str, context: Context | None = None) -> T:
        """Call `run` and return its result. On out-of-memory, free the stored memories and retry; if there are none,
        call `halve` and retry.

        Args:
            halve: lowers the batch size of `run` and returns the line for the log, or "" if it cannot be lowered.
            context: the context whose memory is in use and is not freed.

        Raises:
            InputError: the device runs out of memory with the smallest batch too, or `tensor_parallel` is set.
        """
        while True:
            try:
                return run()
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                trouble = str(error).split(". ")[0]
            # Outside the except block, where the exception no longer holds references to the pass's tensors.
            clear_device_cache(garbage_collection=True)
            if self.tensor_parallel:
                raise InputError(
                    f"{trouble}: {self.what}: under tp_plan every process runs every pass, and one of them cannot run "
                    "less alone. Lower pack_tokens, batch_size or --num_fewshot. What --use_cache has stored is kept."
                )
            if self.store.shrink(context):
                log.warning("%s: %d bytes of memories are kept from here on", trouble, self.store.max_bytes)
            elif less := halve():
                log.warning("%s: %s", trouble, less)
            else:
                raise InputError(
                    f"{trouble}: one prompt is more than the memory of the device holds ({self.what}). Lower "
                    "--num_fewshot, or spread the model over devices (--model_args parallelize=True). What --use_cache "
                    "has stored is kept."
                )

    def halve_pack(self, tokens: int) -> str:
        """Limit packs to half of `tokens`, the size of the pack that did not fit. Returns the line for the log."""
        self.pack_tokens, self.queries = tokens // 2, 1
        return f"log-likelihoods are scored in packs of {self.pack_tokens} tokens from here on"

    def halve_texts(self, texts: int) -> str:
        """Limit batches to half of `texts`, the number of rows that did not fit. Returns the line for the log, or ""
        if a single row did not fit."""
        if texts == 1:
            return ""
        self.texts = texts // 2
        return f"batches have {self.texts} rows from here on"
