"""The selectors, one class for each published method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated

import numpy as np
from pydantic import Field

from lm_eval_icl.declared import Positive
from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool
from lm_eval_icl.demonstrations.selector import Selector

Weight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Herding(Selector):
    """Herding (Welling 2009; Chen, Welling and Smola 2010).

    After t picks, the row nearest to (t + 1) times the mean of the pool less the sum of the picks
    is picked. The mean of the picks is then near the mean of the pool.

    Args:
        unit: scale features to length 1, which makes this kernel herding without replacement.
    """

    name = "herding"

    unit: bool = False

    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        vectors = pool.vectors(self.unit)
        mean = vectors.mean(axis=0)
        target = np.zeros_like(mean)
        picks = Picks(pool)
        for _ in range(n):
            target = target + mean
            row = picks.best(-np.linalg.norm(target - vectors, axis=1))
            target = target - vectors[row]
        return picks.rows


@dataclass(frozen=True)
class KCenter(Selector):
    """K-center greedy (Sener and Savarese 2018, Algorithm 1).

    The first row is random. Each further row is the farthest from all picks. Every row of the pool
    is then near a pick. (The paper begins with rows that are labelled already. Here, there are no
    such rows.)

    Args:
        unit: scale features to length 1.
    """

    name = "k_center"

    unit: bool = False

    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        vectors = pool.vectors(self.unit)
        row = generator.randrange(len(vectors))
        picks = Picks(pool)
        picks.take(row)
        nearest = np.linalg.norm(vectors - vectors[row], axis=1)
        while len(picks.rows) < n:
            row = picks.best(nearest)
            nearest = np.minimum(nearest, np.linalg.norm(vectors - vectors[row], axis=1))
        return picks.rows


class ByScore(Selector):
    """A selector that picks the rows with the highest scores."""

    @abstractmethod
    def scores(self, pool: Pool) -> np.ndarray:
        """The score of each row, (N,)."""

    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        picks = Picks(pool)
        picks.best(self.scores(pool), n)
        return picks.rows


# Rows for whose label the model is least certain, by three measures (Coleman et al. 2019). With two
# labels, all three measures put rows into the same order.


class Entropy(ByScore):
    """The rows with the largest entropy of the labels' probabilities."""

    name = "entropy"

    def scores(self, pool: Pool) -> np.ndarray:
        probabilities = pool.distributions()
        logs = np.log(np.where(probabilities > 0, probabilities, 1))
        return -(probabilities * logs).sum(1)


class LeastConfidence(ByScore):
    """The rows with the smallest probability of the most probable label."""

    name = "least_confidence"

    def scores(self, pool: Pool) -> np.ndarray:
        return -pool.distributions().max(1)


class Margin(ByScore):
    """The rows with the smallest difference between the two most probable labels' probabilities."""

    name = "margin"

    def scores(self, pool: Pool) -> np.ndarray:
        second, highest = np.sort(pool.distributions(), axis=1)[:, -2:].T
        return second - highest


@dataclass(frozen=True)
class CAL(ByScore):
    """CAL (Margatina et al. 2021): rows for which the model predicts other labels than nearby.

    A row's score is the mean KL(neighbour || row) over its k nearest neighbours by features of
    length 1. (In the paper, neighbours are labelled rows, and candidates are not labelled. Here
    every row is both.)

    Args:
        k: the number of neighbours.
    """

    name = "cal"

    k: Positive = 10

    def scores(self, pool: Pool) -> np.ndarray:
        probabilities = np.maximum(pool.distributions(), 1e-12)
        logs = np.log(probabilities)
        vectors = pool.vectors(unit=True)
        size = len(vectors)
        k = min(self.k, size - 1)
        scores = np.zeros(size)
        for part in gradients.parts(size) if k else []:
            distances = np.sqrt(np.maximum(2 - 2 * vectors[part] @ vectors.T, 0))
            distances[np.arange(len(distances)), np.arange(size)[part]] = np.inf
            last = np.partition(distances, k - 1, axis=1)[:, k - 1]
            for at, row in enumerate(range(size)[part]):
                near = np.flatnonzero(distances[at] <= last[at])
                by_distance = np.argsort(distances[at, near], kind="stable")
                near = near[by_distance][:k]  # the lowest rows, if some are equally near
                scores[row] = (probabilities[near] * (logs[near] - logs[row])).sum(1).mean()
        return scores


# Selectors by the gradients of the loss (`gradients`).


class CRAIG(Selector):
    """CRAIG (Mirzasoleiman, Bilmes and Leskovec 2020): every row's gradient is near that of a pick.

    The row is picked that most lowers the sum, over all rows, of the distance of gradients to the
    nearest pick. This is the greedy maximization of a facility location function whose similarity
    is a constant less the distance. The weights that the paper gives to the picks are not used,
    since demonstrations have no weights.
    """

    name = "craig"

    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        distances = gradients.distances(pool)
        return gradients.cover(pool, n, np.negative(distances, out=distances))


@dataclass(frozen=True)
class GradMatch(Selector):
    """GradMatch (Killamsetty et al. 2021), by orthogonal matching pursuit.

    The row is picked whose gradient has the largest inner product with the residual. The residual
    is the mean gradient b less the weighted sum of the picks' gradients g. The weights w minimize
    |b - sum w g|^2 + lam |w|^2. All n picks are kept, whatever their weights. (The paper's authors
    drop picks with negative weights.)

    Args:
        lam: the strength of the regularization of the weights.
    """

    name = "gradmatch"

    lam: Weight = 1.0

    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        products = gradients.gram(pool)
        with_mean = products.mean(1)
        residual = with_mean
        picks = Picks(pool)
        while True:
            picks.best(residual)
            rows = picks.rows
            if len(rows) == n:
                return rows
            among = products[np.ix_(rows, rows)] + self.lam * np.eye(len(rows))
            # `lstsq` also has a solution if gradients are linearly dependent and lam is 0.
            weights = np.linalg.lstsq(among, with_mean[rows], rcond=None)[0]
            residual = with_mean - products[:, rows] @ weights


# Two submodular functions of the picks, each maximized greedily (Iyer and Bilmes 2013; Iyer et al.
# 2021). The similarity of two rows is the cosine of their gradients. Inside one of two labels, this
# is the cosine of their features [1; h].


class FacilityLocation(Selector):
    """Maximize the sum, over the rows of the pool, of the similarity to the most similar pick."""

    name = "facility_location"

    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        return gradients.cover(pool, n, gradients.cosines(pool))


@dataclass(frozen=True)
class GraphCut(Selector):
    """Maximize lam times the similarities of picks and pool, less the similarities between picks.

    The first sum has N similarities for each pick, and the second at most 2 n. With a large pool,
    the picks are therefore nearly the n most central rows.

    Args:
        lam: the weight of the similarity to the pool.
    """

    name = "graph_cut"

    lam: Weight = 1.0

    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        similarities = gradients.cosines(pool)
        scores = self.lam * similarities.sum(0)
        picks = Picks(pool)
        for _ in range(n):
            scores = scores - 2 * similarities[picks.best(scores)]
        return picks.rows


SELECTORS: Mapping[str, type[Selector]] = {
    selector.name: selector
    for selector in (
        Herding,
        KCenter,
        Entropy,
        LeastConfidence,
        Margin,
        CAL,
        CRAIG,
        GradMatch,
        FacilityLocation,
        GraphCut,
    )
}
