"""The estimators with which models are compared, each made for a kind of function (Garg et al., 2022; InvICL, B.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import Lasso
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor
from tqdm import tqdm

from scripts.regression.configuration import Configuration

ALPHA = 0.01  # of Lasso's penalty: one of those that Garg et al. try
FITTED = 128  # for how many functions the estimators are fitted that scikit-learn fits one by one

# The values predicted for queries [b, d] from examples [b, n, d] with values [b, n].
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


def least_squares(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """The linear function with the least squared error, and of these the one with the smallest coefficients."""
    w = torch.linalg.lstsq(x, y[:, :, None], driver="gelsd").solution
    return (query[:, None] @ w)[:, 0, 0]


def averaging(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """The linear function whose coefficients are the mean of y x: one step of gradient descent."""
    return ((x * y[:, :, None]).mean(dim=1) * query).sum(dim=1)


def nearest_neighbours(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """The mean of the values at the three nearest points."""
    distances = (x - query[:, None]).square().sum(dim=2)
    near = distances.topk(min(3, x.shape[1]), largest=False).indices
    return y.gather(1, near).mean(dim=1)


def one_by_one(model: Any, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """The predictions of a model of scikit-learn, which is fitted to each function anew."""
    predicted = []
    for x_i, y_i, query_i in zip(x[:FITTED], y[:FITTED], query[:FITTED], strict=True):
        model.fit(x_i.numpy(), y_i.numpy())
        predicted.append(model.predict(query_i[None].numpy())[0])
    return torch.from_numpy(np.array(predicted))


LASSO = partial(one_by_one, Lasso(alpha=ALPHA, fit_intercept=False, max_iter=100_000))
# Split greedily until it fits the examples.
TREE = partial(one_by_one, DecisionTreeRegressor(random_state=0))
# Gradient-boosted trees: scikit-learn's, where Garg et al. take XGBoost's.
TREES = partial(one_by_one, GradientBoostingRegressor(random_state=0))
OF_ALL: dict[str, Estimator] = {"averaging": averaging, "3 nearest neighbours": nearest_neighbours}
BASELINES: dict[str, dict[str, Estimator]] = {
    "linear": {"least squares": least_squares, **OF_ALL},
    "sparse": {"least squares": least_squares, "Lasso": LASSO, **OF_ALL},
    "tree": {"greedy tree": TREE, "boosted trees": TREES, **OF_ALL},
}


def baselines(
    configuration: Configuration, numbers: Sequence[int], x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """The squared errors of the estimators that belong to the configuration's functions.

    Args:
        numbers: how many examples there are; with none, 0 is predicted.
        x: [b, points, d]. y: [b, points].

    Returns:
        By name, [b, numbers] in float64; of estimators that are fitted one by one, for the first `FITTED` functions.
    """
    x = x.double()
    y = y.double()
    by_name = {}
    for name, estimator in BASELINES[configuration.function].items():
        errors = []
        for n in tqdm(numbers, desc=name, leave=False):
            predicted = estimator(x[:, :n], y[:, :n], x[:, n]) if n else torch.zeros_like(y[:, 0])
            errors.append((predicted - y[: len(predicted), n]).square())
        fitted = min(len(column) for column in errors)
        by_name[name] = torch.stack([column[:fitted] for column in errors], dim=1)
    return by_name
