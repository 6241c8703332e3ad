"""In-context regression: predictions by their definitions, training, baselines, commands."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.caches import cache_arguments
from scripts.regression import evaluation, training
from scripts.regression.__main__ import FIGURES, main
from scripts.regression.baselines import baselines
from scripts.regression.configuration import METHODS, Configuration, configured
from scripts.regression.evaluation import interval
from scripts.regression.functions import SHIFTS, draw_functions, generator, mean_square
from scripts.regression.model import Regressor
from scripts.regression.training import method_of

SIZES = """
dimensions: 3
sparsity: 1
depth: 2
examples: 5
longest: 8
layers: 4
width: 16
heads: 2
batch_size: 8
learning_rate: 0.003
steps: 12
early: 6
keep_every: 6
first_dimensions: 2
first_points: 4
interval: 3
lengths: 2
tested: 6
"""
SMALL = Configuration(**yaml.safe_load(SIZES))


def regressor(method: str) -> Regressor:
    """A model with random weights in float64; those of the positions are as large as the others."""
    torch.manual_seed(0)
    model = Regressor(SMALL, method_of(method)).double().eval()
    for name, weight in model.named_parameters():
        if weight.requires_grad and "ln_" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def prompt(points: int, count: int = 1) -> tuple[Tensor, Tensor]:
    x, y = draw_functions(SMALL, generator("a test"), count, points)
    return x.double(), y.double()


# Predictions without masks: one example at a time.


class Literal:
    """Runs one prompt through a regressor, by plain passes over a few tokens, without any mask."""

    def __init__(self, model: Regressor, x: Tensor, y: Tensor) -> None:
        self.model = model
        self.n = y.shape[1] - 1
        values = pad(y[:, :, None], (0, x.shape[2] - 1))
        tokens = torch.stack([x, values], dim=2)  # [1, points, 2, d]
        self.x = model.read_in(tokens[:, :, :1])[0]
        self.example = model.read_in(tokens)[0]

    def run(
        self, tokens: Tensor, start: int, memory: list[DynamicCache] = ()
    ) -> tuple[DynamicCache, Tensor]:
        """Tokens after others' keys and values: their own, and the value read at the first."""
        cache = DynamicCache()
        for layer in range(SMALL.layers if memory else 0):
            keys = [entries.layers[layer].keys for entries in memory]
            values = [entries.layers[layer].values for entries in memory]
            cache.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), layer)
        before = cache.get_seq_length()
        positions = torch.arange(start, start + len(tokens))[None]
        past = cache_arguments(self.model.transformer, cache)
        output = self.model.transformer(inputs_embeds=tokens[None], position_ids=positions, **past)
        own = DynamicCache()
        for layer, entries in enumerate(cache.layers):
            own.update(entries.keys[:, :, before:], entries.values[:, :, before:], layer)
        return own, self.model.read_out(output.last_hidden_state[0, 0])

    def both_ways(self, tokens: Tensor, positions: Tensor) -> DynamicCache:
        """The keys and values of tokens that all see each other, computed from the weights."""
        model = self.model.transformer
        own = DynamicCache()
        heads = SMALL.heads
        stream = tokens[None] + model.wpe(positions)
        for number, block in enumerate(model.h):
            projected = block.attn.c_attn(block.ln_1(stream)).unflatten(2, (3, heads, -1))
            query, key, value = projected.permute(2, 0, 3, 1, 4)
            own.update(key, value, number)
            scores = query @ key.mT / query.shape[3] ** 0.5
            read = scores.softmax(dim=3) @ value
            stream = stream + block.attn.c_proj(read.transpose(1, 2).flatten(2))
            stream = stream + block.mlp(block.ln_2(stream))
        return own

    def icl(self) -> list[Tensor]:
        """Every point as the query after those before it, each in its own pass over the tokens."""
        found = []
        for n in range(self.n + 1):
            tokens = torch.cat([*self.example[:n], self.x[n]])
            output = self.model.transformer(inputs_embeds=tokens[None]).last_hidden_state
            found.append(self.model.read_out(output[0, -1]))
        return found

    nope = icl  # the table of positions is zeros

    def pcw(self) -> list[Tensor]:
        memory = [self.run(example, 0)[0] for example in self.example[: self.n]]
        return [self.run(self.x[self.n], 2, memory)[1]]

    def prefixicl(self) -> list[Tensor]:
        tokens = self.example[: self.n].flatten(0, 1)
        memory = self.both_ways(tokens, torch.arange(2).repeat(self.n))
        return [self.run(self.x[self.n], 2, [memory])[1]]

    def invicl(self) -> list[Tensor]:
        """Algorithm 1: every example alone; each again after all others; the query after these."""
        alone = [self.run(example, 0)[0] for example in self.example[: self.n]]
        second = []
        predictions = []
        for i in range(self.n):
            memory, prediction = self.run(self.example[i], 0, alone[:i] + alone[i + 1 :])
            second.append(memory)
            predictions.append(prediction)
        predictions.append(self.run(self.x[self.n], 2, second)[1])
        return predictions


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_predictions_are_those_of_the_definition(name):
    model = regressor(name)
    x, y = prompt(6)
    got = model(x, y[:, :-1])[0]
    literal = Literal(model, x, y)
    want = torch.cat(getattr(literal, name)())
    points = 6 if name in ("icl", "nope", "invicl") else 1
    assert len(got) == len(want) == points
    assert torch.allclose(got, want, rtol=0, atol=1e-10)
    assert (want - y.mean()).abs().max() > 1e-3


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_every_number_of_examples_is_a_prompt_of_its_own(name):
    """Predictions of one row or of many are those of queries after the first n examples."""
    model = regressor(name)
    x, y = prompt(6, count=3)
    got = model.predict([0, 2, 5], x, y)
    for column, n in enumerate((0, 2, 5)):
        alone = model(x[:, : n + 1], y[:, :n])[:, -1]
        assert torch.allclose(got[:, column], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_order_changes_no_bit_of_invariant_methods(name):
    model = regressor(name)
    x, y = prompt(8, count=4)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4, 7])  # the query stays where it is
    # In real numbers, without canonical order.
    apart = model(x, y[:, :-1]) - model(x[:, order], y[:, order[:-1]])
    model = model.float()
    x = x.float()
    y = y.float()
    reordered = model.predict([7], x[:, order], y[:, order])
    plain = model.predict([7], x, y)
    same = torch.equal(plain, reordered)
    assert same == (name in ("prefixicl", "pcw", "invicl"))
    assert (apart[:, -1].abs().max() < 1e-10) == same


# Functions and baselines.


def fitted(x: Tensor, y: Tensor) -> Tensor:
    """The weights of least squares, of each function."""
    return torch.linalg.lstsq(x.double(), y.double()[:, :, None]).solution[:, :, 0]


@pytest.mark.parametrize("shift", SHIFTS)
def test_shifts_have_the_mean_square_that_errors_are_divided_by(shift):
    configuration = replace(SMALL, dimensions=4)
    x, y = draw_functions(configuration, generator("shift"), 4000, 5, shift=shift)
    assert y.square().mean() == pytest.approx(mean_square(configuration, shift), rel=0.05)
    length = 36 if shift == "scale" else 4
    assert x.square().sum(2).mean() == pytest.approx(length, rel=0.05)
    rank = torch.linalg.matrix_rank(x[:50].double(), rtol=1e-4)
    dimensions = 2 if shift == "subspace" else 4
    assert set(rank.tolist()) == {dimensions}
    if shift != "subspace":
        residual = (x.double() @ fitted(x, y)[:, :, None])[:, :, 0] - y
        assert (residual.abs().max() < 1e-3) == (shift in ("none", "scale"))


def test_sparse_functions_have_few_weights():
    sparse = replace(SMALL, function="sparse", dimensions=6, sparsity=2)
    x, y = draw_functions(sparse, generator("sparse"), 50, 12, dimensions=4)
    assert not x[:, :, 4:].any()
    weights = fitted(x[:, :, :4], y)
    assert ((weights.abs() > 1e-4).sum(1) == 2).all()


def test_trees_depend_on_signs_alone():
    tree = replace(SMALL, function="tree")
    x, y = draw_functions(tree, generator("tree"), 50, 200)
    for signs, values in zip((x > 0).tolist(), y.tolist(), strict=True):
        assert len(set(values)) <= 2**tree.depth
        value_at: dict[tuple[bool, ...], float] = {}
        for sign, value in zip(signs, values, strict=True):
            assert value_at.setdefault(tuple(sign), value) == value
    _, y = draw_functions(tree, generator("tree"), 2000, 5)
    assert y.square().mean() == pytest.approx(1, rel=0.1)


def test_least_squares_has_no_error_from_as_many_examples_as_dimensions():
    x, y = draw_functions(SMALL, generator("least squares"), 20, 8)
    found = baselines(SMALL, [0, 1, 2, 3, 7], x, y)["least squares"]
    assert (found[:, :3].mean(0) > 0.1).all()
    assert found[:, 3:].max() < 1e-6
    assert torch.equal(found[:, 0], y[:, 0].double().square())


# Training and its measurement.


def test_methods_get_the_same_functions_and_every_seed_others(monkeypatch):
    seen: list[Tensor] = []

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        drawn = draw_functions(*arguments)
        seen.append(drawn[1])
        return drawn

    monkeypatch.setattr(training, "draw_functions", watched)
    for name, seed in (("icl", 0), ("pcw", 0), ("icl", 1)):
        training.step_loss(Regressor(SMALL, method_of(name)), seed, 5)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_the_curriculum():
    full = configured("linear")
    assert full.stage(0) == full.stage(1999) == (5, 11)
    assert full.stage(2000) == (6, 13)
    assert full.stage(29_999) == (19, 39)
    assert full.stage(30_000) == full.stage(199_999) == (20, 41)
    assert configured("tree").stage(30_000) == (20, 101)
    assert full.probed == [3, 6, 9, 12]
    assert full.kept[:2] == [10_000, 20_000]
    assert set(full.shown) <= set(full.kept)


def test_the_interval_is_of_seeds_and_functions():
    apart = [torch.full((50, 2), value, dtype=torch.float64) for value in (1.0, 2.0, 3.0)]
    mean, low, high = interval(apart)
    # Of 27 draws of three seeds one is the lowest seed three times, one the highest: more than 2.5
    # percent.
    assert mean.tolist() == pytest.approx([2, 2])
    assert low.tolist() == pytest.approx([1, 1])
    assert high.tolist() == pytest.approx([3, 3])
    values = torch.randn(400, 1, generator=generator("interval")).double()
    _, low, high = interval([values])
    half = 1.96 * float(values.std()) / 20
    assert (high - low).item() == pytest.approx(2 * half, rel=0.15)


# Commands.


SETTINGS = ["stride=4"]
for setting, value in SMALL.arguments.items():
    if setting not in ("function", "stride"):
        SETTINGS.append(f"{setting}={value}")
TRAIN = "train --config tiny --device cpu".split()


def table(folder: Path) -> str:
    """What `evaluate` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["evaluate", "--output", str(folder), "--device", "cpu"])
    return printed.getvalue()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """Two trainings, on linear functions with two seeds and on sparse ones; and their tables."""
    folder = tmp_path_factory.mktemp("trained")
    linear = folder / "linear"
    sparse = folder / "sparse"
    line = [*TRAIN, "--methods", "icl,invicl", "--set", *SETTINGS]
    main([*line, "--seeds", "0,1", "--output", str(linear)])
    main([*line, "function=sparse", "--seeds", "0", "--output", str(sparse)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluation, "PROBES_FITTED_ON", 32)
        return {linear: table(linear), sparse: table(sparse)}


def test_tables(tables):
    """A second evaluation reads what the first one measured."""
    linear, sparse = tables
    assert table(linear) == tables[linear]
    assert tables[linear].count("| `invicl` |") == 6
    assert tables[sparse].count("| `invicl` |") == 3
    cells = re.findall(r"(\d\.\d+) \((\d\.\d+) to (\d\.\d+)\)", tables[linear])
    assert len(cells) > 40
    for mean, low, high in cells:
        assert float(low) <= float(mean) <= float(high)


@pytest.mark.parametrize("figure", FIGURES)
def test_figures(figure, tables, tmp_path):
    to = tmp_path / f"{figure}.svg"
    linear, sparse = map(str, tables)
    folders = [linear, sparse] if figure == "figure6" else [linear]
    main(["plot", figure, *folders, "--to", str(to)])
    drawn = to.read_text(encoding="utf-8")
    assert 5_000 < len(drawn) < 300_000
    assert "invicl" in drawn


def refused(*arguments: str) -> str:
    with pytest.raises(InputError) as refusal:
        main([*arguments])
    return refusal.value.message


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--methods saicl", "--methods saicl: there is no such method here"),
        ("--set width=30", "width=30: must be a multiple of heads=4"),
    ],
)
def test_arguments_that_cannot_be_are_one_line(arguments, says, tmp_path):
    line = [*TRAIN, "--output", str(tmp_path / "new"), *arguments.split()]
    assert says in refused(*line)
    assert not (tmp_path / "new").exists()
