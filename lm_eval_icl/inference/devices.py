"""The device on which a model takes its input, the copying of numbers to it, and its memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

# Where Linux tells the limit of the memory of this process's control group.
CONTROL_GROUP = Path("/sys/fs/cgroup")


def device_of(model: PreTrainedModel) -> torch.device:
    """The device on which a model takes its input.

    (`model.device` is the device of the first weights. If accelerate has offloaded these weights,
    it is "meta", and the weights are on the execution device only while they are used.)
    """
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


def free_bytes(device: torch.device) -> int:
    """How many bytes of memory are free on a device, for this process.

    On a CPU, the processes of a launcher divide them, and a control group (a container, a job of
    Slurm) may have less than the machine. Of accelerators other than CUDA's it is not known, and
    4 GiB are returned.
    """
    if device.type == "cuda":
        # Torch keeps what it has freed.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type != "cpu":
        return 2**32
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # there is no control group, or it has no limit ("max")
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        free = min(free, limit - int((CONTROL_GROUP / "memory.current").read_text()))
    return max(free, 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def kept_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Any:
    """The `logits_to_keep` for these tokens.

    It is a list if accelerate has spread the model over devices. A tensor would be moved to the
    device of the input, where it cannot be an index into the last hidden states.
    """
    return list(tokens) if hasattr(model, "_hf_hook") else on_device(tokens, device_of(model))


def on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Make a tensor of whole numbers, or of lists of them, on a device.

    (`torch.tensor(..., device=...)` would wait until everything that was begun on a GPU is done.
    numpy reads a list three times as fast as torch.)
    """
    return to_device(torch.from_numpy(np.array(numbers, dtype=np.int64)), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device.

    The copy is asynchronous on CUDA alone, which has read the tensor when `to` returns. Other
    devices may read it later, when its memory is used again (pytorch issue 189690, about MPS).
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def peak_bytes(device: torch.device, *, reset: bool = False) -> int:
    """The most bytes that torch held on a GPU since the last `reset`; elsewhere, the most memory of
    this process since it began (0 on Windows, which does not tell)."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 0
