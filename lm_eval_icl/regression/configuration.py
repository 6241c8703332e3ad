"""What is trained, on which functions, and how it is tested: as for InvICL's figures, and at smaller sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_icl.errors import InputError, is_number, is_whole

FUNCTIONS = ("linear", "sparse", "tree")
METHODS = ("icl", "nope", "prefixicl", "pcw", "invicl")


@dataclass(frozen=True)
class Configuration:
    """A model, the functions it is trained on, and how it is tested. The defaults are InvICL's (A.3) and, where the
    paper says nothing, those of Garg et al. (2022), whose code it follows.

    Args:
        function: "linear", "sparse" (linear, with few non-zero coefficients) or "tree" (a decision tree).
        dimensions: of the inputs.
        sparsity: how many coefficients of a sparse function are not zero.
        depth: of a decision tree.
        examples: the most examples before a query in training.
        longest: the most examples before a query in tests.
        layers, width, heads: of the GPT-2.
        batch_size: how many functions a step has.
        learning_rate: of Adam, constant.
        steps: how many updates there are.
        early: the step after which Figures 3 and 7 show the models, beside the last one.
        keep_every: after how many steps the weights are kept for Figures 8 and 9.
        first_dimensions: how many coordinates of the inputs are not zero at first; one more after each `interval`.
        first_points: how many points a prompt has at first, the query included.
        points_step: how many points are added after each `interval`.
        interval: the number of steps between two stages of this curriculum.
        lengths: into how many parts a batch is divided, each with another number of examples, under methods whose rows
            predict with one number only.
        tested: how many functions the models are tested on.
        stride: the difference between the numbers of examples with which they are tested.

    Raises:
        InputError: a value is outside its range.
    """

    function: str = "linear"
    dimensions: int = 20
    sparsity: int = 3
    depth: int = 4
    examples: int = 40
    longest: int = 100
    layers: int = 12
    width: int = 256
    heads: int = 8
    batch_size: int = 64
    learning_rate: float = 1e-4
    steps: int = 200_000
    early: int = 50_000
    keep_every: int = 10_000
    first_dimensions: int = 5
    first_points: int = 11
    points_step: int = 2
    interval: int = 2000
    lengths: int = 4
    tested: int = 1280
    stride: int = 1

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise InputError(f"function={self.function!r}: must be one of {', '.join(FUNCTIONS)}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not (is_whole(value) and value >= 1):
                raise InputError(f"{field.name}={value!r}: must be a whole number, 1 or more.")
        if not (is_number(self.learning_rate) and self.learning_rate > 0):
            raise InputError(f"learning_rate={self.learning_rate!r}: must be a number above 0.")
        for name, most, of in (
            ("first_dimensions", self.dimensions, "dimensions"),
            ("sparsity", self.dimensions, "dimensions"),
            ("first_points", self.examples + 1, "examples + 1"),
            ("examples", self.longest, "longest"),
            ("early", self.steps, "steps"),
        ):
            if getattr(self, name) > most:
                raise InputError(f"{name}={getattr(self, name)}: must be at most {of}, which is {most}.")
        for name, of in (("width", "heads"), ("batch_size", "lengths")):
            if getattr(self, name) % getattr(self, of):
                raise InputError(f"{name}={getattr(self, name)}: must be a multiple of {of}={getattr(self, of)}.")

    def stage(self, step: int) -> tuple[int, int]:
        """The curriculum: how many coordinates are not zero in the update after `step` updates, and how many points a
        prompt has."""
        passed = step // self.interval
        points = min(self.examples + 1, self.first_points + passed * self.points_step)
        return min(self.dimensions, self.first_dimensions + passed), points

    @property
    def kept(self) -> list[int]:
        """The steps after which the weights are kept."""
        return sorted({*range(self.keep_every, self.steps + 1, self.keep_every), self.early, self.steps})

    @property
    def shown(self) -> list[int]:
        """The steps at which Figures 3 and 7 show the models."""
        return sorted({self.early, self.steps})

    @property
    def numbers(self) -> list[int]:
        """With how many examples the models are tested."""
        return sorted({*range(0, self.longest + 1, self.stride), self.examples, self.longest})

    @property
    def probed(self) -> list[int]:
        """The layers whose hidden states are probed: a quarter, half, three quarters and all (Figure 10)."""
        return sorted({max(1, round(self.layers * part / 4)) for part in (1, 2, 3, 4)})


CONFIGURATIONS = {
    "linear": Configuration(),  # Figures 3, 7, 8, 9 and 10
    "sparse": Configuration(function="sparse"),  # Figure 6, left
    "tree": Configuration(  # Figure 6, right
        function="tree", examples=100, longest=200, first_points=26, points_step=5, keep_every=50_000
    ),
    "small": Configuration(
        dimensions=5,
        examples=10,
        longest=25,
        layers=6,
        width=64,
        heads=4,
        learning_rate=1e-3,
        steps=8000,
        early=2000,
        keep_every=1000,
        first_dimensions=2,
        first_points=5,
        points_step=2,
        interval=300,
        tested=512,
    ),
    "tiny": Configuration(
        dimensions=3,
        sparsity=1,
        depth=2,
        examples=10,
        longest=25,
        layers=4,
        width=32,
        heads=4,
        batch_size=32,
        learning_rate=2e-3,
        steps=3000,
        early=750,
        keep_every=375,
        first_dimensions=1,
        first_points=5,
        points_step=3,
        interval=300,
        lengths=2,
        tested=256,
        stride=3,
    ),
}


def configured(name: str, values: Sequence[str] = ()) -> Configuration:
    """A configuration by its name, with some values replaced.

    Args:
        values: what is replaced, each KEY=VALUE.

    Raises:
        InputError: there is no such configuration or key, or a value cannot be used.
    """
    if name not in CONFIGURATIONS:
        raise InputError(f"--config {name}: there is none of this name: give one of {', '.join(CONFIGURATIONS)}.")
    kinds = {field.name: {"int": int, "float": float}.get(str(field.type), str) for field in _FIELDS}
    given: dict[str, Any] = {}
    for each in values:
        key, _, value = each.partition("=")
        if key not in kinds:
            raise InputError(f"--set {each}: there is no key {key!r}: give KEY=VALUE with one of {', '.join(kinds)}.")
        try:
            given[key] = kinds[key](value)
        except ValueError:
            raise InputError(f"--set {each}: {value!r} is no number: give {key}=NUMBER.") from None
    return dataclasses.replace(CONFIGURATIONS[name], **given)


def read(values: object, where: str) -> Configuration:
    """The configuration that a file has.

    Args:
        where: the file, for an error.

    Raises:
        InputError: it is not one of this version.
    """
    names = {field.name for field in _FIELDS}
    if not isinstance(values, dict) or set(values) != names:
        raise InputError(f"{where}: its configuration is not one of this version: train again, in another folder.")
    return Configuration(**values)


_FIELDS = dataclasses.fields(Configuration)
