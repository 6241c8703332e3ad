"""Configurations: which model is trained, on which functions, and how it is tested. They are InvICL's, or smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from lm_eval_icl.declared import Arguments, Positive, read_into
from lm_eval_icl.errors import InputError

METHODS = ("icl", "nope", "prefixicl", "pcw", "invicl")


@dataclass(frozen=True)
class Configuration(Arguments):
    """A model, the functions it is trained on, and how it is tested. The defaults are InvICL's (A.3) and, where the
    paper says nothing, those of Garg et al. (2022), whose code it follows.

    Args:
        function: "linear", "sparse" (linear, with few non-zero coefficients) or "tree" (a decision tree).
        dimensions: the number of an input's dimensions.
        sparsity: how many coefficients of a sparse function are not zero.
        depth: the depth of a decision tree.
        examples: the most examples before a query in training.
        longest: the most examples before a query in tests.
        layers, width, heads: the sizes of the GPT-2.
        batch_size: how many functions a step has.
        learning_rate: Adam's, which is constant.
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
        InputError: a value is outside its range, or two do not fit together.
    """

    function: Literal["linear", "sparse", "tree"] = "linear"
    dimensions: Positive = 20
    sparsity: Positive = 3
    depth: Positive = 4
    examples: Positive = 40
    longest: Positive = 100
    layers: Positive = 12
    width: Positive = 256
    heads: Positive = 8
    batch_size: Positive = 64
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    steps: Positive = 200_000
    early: Positive = 50_000
    keep_every: Positive = 10_000
    first_dimensions: Positive = 5
    first_points: Positive = 11
    points_step: Positive = 2
    interval: Positive = 2000
    lengths: Positive = 4
    tested: Positive = 1280
    stride: Positive = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most, other in (
            ("first_dimensions", self.dimensions, "dimensions"),
            ("sparsity", self.dimensions, "dimensions"),
            ("first_points", self.examples + 1, "examples + 1"),
            ("examples", self.longest, "longest"),
            ("early", self.steps, "steps"),
        ):
            if getattr(self, name) > most:
                raise InputError(
                    f"{name}={getattr(self, name)}: must be at most {other}, which is {most}."
                )
        for name, other in (("width", "heads"), ("batch_size", "lengths")):
            if getattr(self, name) % getattr(self, other):
                raise InputError(
                    f"{name}={getattr(self, name)}: must be a multiple of {other}={getattr(self, other)}."
                )

    def stage(self, step: int) -> tuple[int, int]:
        """The curriculum: how many coordinates are not zero in the update after `step` updates, and how many points a
        prompt has."""
        passed = step // self.interval
        points = min(self.examples + 1, self.first_points + passed * self.points_step)
        return min(self.dimensions, self.first_dimensions + passed), points

    @property
    def kept(self) -> list[int]:
        """The steps after which the weights are kept."""
        return sorted(
            {*range(self.keep_every, self.steps + 1, self.keep_every), self.early, self.steps}
        )

    @property
    def shown(self) -> list[int]:
        """The steps at which Figures 3 and 7 show the models."""
        return sorted({self.early, self.steps})

    @property
    def numbers(self) -> list[int]:
        """The numbers of examples that the models are tested with."""
        return sorted({*range(0, self.longest + 1, self.stride), self.examples, self.longest})

    @property
    def probed(self) -> list[int]:
        """The layers whose hidden states are probed: a quarter, half, three quarters and all (Figure 10)."""
        return sorted({max(1, round(self.layers * part / 4)) for part in (1, 2, 3, 4)})


CONFIGURATIONS = {
    "linear": Configuration(),  # Figures 3, 7, 8, 9 and 10
    "sparse": Configuration(function="sparse"),  # Figure 6, left
    "tree": Configuration(  # Figure 6, right
        function="tree",
        examples=100,
        longest=200,
        first_points=26,
        points_step=5,
        keep_every=50_000,
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
        values: the settings that are replaced, each KEY=VALUE.

    Raises:
        InputError: there is no such configuration or key, or a value cannot be used.
    """
    if name not in CONFIGURATIONS:
        raise InputError(
            f"--config {name}: there is none of this name: give one of {', '.join(CONFIGURATIONS)}."
        )
    replaced: dict[str, Any] = {}
    for setting in values:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting}: must be KEY=VALUE.")
        replaced[key] = value
    return read_into(Configuration, CONFIGURATIONS[name].arguments | replaced)
