"""Random functions and their values at random points (Garg et al., 2022; InvICL, A.3 and B.1)."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from scripts.regression.configuration import Configuration

# How tests differ from training (InvICL, B.1 and Figure 7): not at all; y has an offset b ~ N(0, 1); x is 3 times as
# large; x is in a random subspace of half the dimensions, as large as before on average (as in the code of Garg et al.,
# which the paper follows).
SHIFTS = ("none", "offset", "scale", "subspace")
_SCALE = 3.0


def generator(*key: object) -> torch.Generator:
    """A random generator that is a function of the key alone."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def draw_functions(
    configuration: Configuration,
    random: torch.Generator,
    count: int,
    points: int,
    dimensions: int | None = None,
    shift: str = "none",
) -> tuple[Tensor, Tensor]:
    """Points and values of random functions.

    Args:
        count: how many functions.
        points: how many points of each.
        dimensions: how many coordinates of the points are not zero; None for all.
        shift: one of `SHIFTS`.

    Returns:
        x: [count, points, dimensions of the configuration]. y: [count, points].
    """
    d = configuration.dimensions
    valid = dimensions or d
    x = torch.randn(count, points, d, generator=random)
    x[:, :, valid:] = 0
    if shift == "scale":
        x = _SCALE * x
    elif shift == "subspace":
        basis, _ = torch.linalg.qr(torch.randn(count, d, max(1, d // 2), generator=random))
        x = x @ basis @ basis.mT * math.sqrt(d / basis.shape[2])
    if configuration.function == "tree":
        return x, _tree(x, configuration.depth, random)
    w = torch.randn(count, d, 1, generator=random)
    if configuration.function == "sparse":
        chosen = torch.rand(count, valid, generator=random).argsort(1)[:, : configuration.sparsity]
        w = w * torch.zeros(count, d).scatter_(1, chosen, 1.0)[:, :, None]
    b = torch.randn(count, 1, generator=random) if shift == "offset" else 0.0
    return x, (x @ w)[:, :, 0] + b


def _tree(x: Tensor, depth: int, random: torch.Generator) -> Tensor:
    """Complete binary trees: a node goes right where its coordinate is above 0, and a leaf's value is from N(0, 1)."""
    count, points, d = x.shape
    nodes = 2 ** (depth + 1) - 1  # the children of node i are 2i + 1 and 2i + 2
    coordinate = torch.randint(d, (count, nodes), generator=random)
    value = torch.randn(count, nodes, generator=random)
    at = torch.zeros(count, points, dtype=torch.long)
    for _ in range(depth):
        right = x.gather(2, coordinate.gather(1, at)[:, :, None])[:, :, 0] > 0
        at = 2 * at + 1 + right
    return value.gather(1, at)


def mean_square(configuration: Configuration, shift: str = "none") -> float:
    """The expected square of a value: the error of predicting 0, by which errors are divided."""
    square = {"linear": configuration.dimensions, "sparse": configuration.sparsity, "tree": 1}[
        configuration.function
    ]
    return {"offset": square + 1.0, "scale": square * _SCALE**2}.get(shift, float(square))
