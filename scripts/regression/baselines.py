"""The estimators with which models are compared, each made for a kind of function (Garg et al., 2022; InvICL, B.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lm_eval_icl.errors import InputError
from scripts.regression.configuration import Configuration

NEIGHBOURS, ALPHA = (
    3,
    0.01,
)  # of nearest neighbours; of Lasso's penalty: one of those that Garg et al. try
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
    near = (
        (x - query[:, None])
        .square()
        .sum(dim=2)
        .topk(min(NEIGHBOURS, x.shape[1]), largest=False)
        .indices
    )
    return y.gather(1, near).mean(dim=1)


def lasso(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """Least squares with a penalty on the absolute values of the coefficients."""
    from sklearn.linear_model import Lasso

    return _one_by_one(
        lambda: Lasso(alpha=ALPHA, fit_intercept=False, max_iter=100_000), x, y, query
    )


def greedy_tree(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """A decision tree that is split greedily until it fits the examples."""
    from sklearn.tree import DecisionTreeRegressor

    return _one_by_one(lambda: DecisionTreeRegressor(random_state=0), x, y, query)


def boosted_trees(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """Gradient-boosted trees (scikit-learn's, where Garg et al. take XGBoost's)."""
    from sklearn.ensemble import GradientBoostingRegressor

    return _one_by_one(lambda: GradientBoostingRegressor(random_state=0), x, y, query)


def _one_by_one(make: Callable[[], Any], x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    predicted = []
    for x_i, y_i, query_i in zip(
        x[:FITTED].numpy(), y[:FITTED].numpy(), query[:FITTED].numpy(), strict=True
    ):
        predicted.append(make().fit(x_i, y_i).predict(query_i[None])[0])
    return torch.from_numpy(np.array(predicted))


_OF_ALL: dict[str, Estimator] = {"averaging": averaging, "3 nearest neighbours": nearest_neighbours}
_BASELINES: dict[str, dict[str, Estimator]] = {
    "linear": {"least squares": least_squares, **_OF_ALL},
    "sparse": {"least squares": least_squares, "Lasso": lasso, **_OF_ALL},
    "tree": {"greedy tree": greedy_tree, "boosted trees": boosted_trees, **_OF_ALL},
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

    Raises:
        InputError: scikit-learn is not installed.
    """
    x, y = x.double(), y.double()
    by_name = {}
    for name, estimator in _BASELINES[configuration.function].items():
        errors = []
        for n in tqdm(numbers, desc=name, leave=False):
            try:
                predicted = (
                    estimator(x[:, :n], y[:, :n], x[:, n])
                    if n
                    else torch.zeros(len(y), dtype=y.dtype)
                )
            except ImportError as error:
                raise InputError(
                    f"{name}: needs scikit-learn: pip install scikit-learn."
                ) from error
            errors.append((predicted - y[: len(predicted), n]).square())
        fitted = min(len(column) for column in errors)
        by_name[name] = torch.stack([column[:fitted] for column in errors], dim=1)
    return by_name
