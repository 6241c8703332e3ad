"""Accelerators on a machine without one: tensors that say they are on `maia:0`, `maia:1`, ..., and are on the CPU. What
torch refuses on real devices is refused here: tensors of two devices in one operation, and an index of one device into
a tensor of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# A type of device that torch knows, without a backend that would have to be initialized, which autocast takes.
FIRST, SECOND = torch.device("maia:0"), torch.device("maia:1")
_ATEN = torch.ops.aten
_INDEXING = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
_MOVING = {_ATEN._to_copy.default, _ATEN.copy_.default}
# Methods that hand numbers to Python.
_READING = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


def _inside(given: Any) -> Any:
    return tree_map_only(Elsewhere, lambda tensor: tensor.inner, given)


class Elsewhere(Tensor):
    """A tensor of a simulated device; `inner` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> Elsewhere:
        kept = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, device=device, **kept)
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Some methods of Tensor look for the device's backend; they are replaced."""
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.__getitem__ or function is Tensor.__setitem__:
                return _indexed(function, *args)
            if getattr(function, "__name__", "") in _READING:
                return function(*_inside(args), **(kwargs or {}))
            if function is Tensor.contiguous:
                return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
            if function is Tensor.copy_:
                _inside(args[0]).copy_(_inside(args[1]))
                return args[0]
            if function is Tensor.__invert__:
                return torch.bitwise_not(args[0])
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function}: outside of simulated devices")


def _indexed(function: Any, tensor: Tensor, at: Any, *value: Any) -> Any:
    """`tensor[at]`, or `tensor[at] = value`."""
    for index in tree_leaves(at):
        if isinstance(index, Tensor) and index.device not in (torch.device("cpu"), tensor.device):
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({tensor.device})"
            )
    found = function(*_inside((tensor, at, *value)))
    return Elsewhere(found, tensor.device) if found is not None and isinstance(tensor, Elsewhere) else found


class _Devices(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        # A number may come from the CPU, as may an index.
        bound = [each for each in given if each.dim() or each.device.type != "cpu"] or given[:1]
        if function in _INDEXING:
            bound = given[:1] + [each for each in given[1:] if each.device.type != "cpu"]
        devices = {each.device for each in bound}
        if len(devices) > 1 and function not in _MOVING:
            raise RuntimeError(f"{function}: expected all tensors to be on the same device, and found {devices}")
        device = next((each.device for each in bound), None)
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), "cpu"
        found = function(*_inside(args), **_inside(kwargs))
        if device is None or device.type != FIRST.type:
            return found
        known = {id(each.inner): each for each in given if isinstance(each, Elsewhere)}  # of operations in place
        return tree_map_only(
            Tensor, lambda each: known[id(each)] if id(each) in known else Elsewhere(each, device), found
        )


@contextmanager
def simulated() -> Iterator[None]:
    """Inside this context there are simulated devices."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` makes them on the CPU and moves them
    try:
        with _Devices():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
