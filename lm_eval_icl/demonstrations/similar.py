"""How demonstrations are retrieved for each document, and the picking from a ranking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lm_eval_icl.declared import Arguments, NotNegative
from lm_eval_icl.errors import InputError


@dataclass(frozen=True)
class Similar(Arguments):
    """How demonstrations are retrieved.

    Only the fixed demonstrations and `order=random` depend on the seed.

    Args:
        by: the similarity. "bm25" compares the words of the documents' queries (`retrieve.BM25`).
            "features" is the cosine of the evaluated model's last hidden states of the queries,
            without demonstrations. Any other text names a model of sentence-transformers, and the
            similarity is the cosine of its vectors.
        order: the place of the most similar demonstration: "last" (next to the query), "first" or
            "random".
        per_label: how many demonstrations are retrieved of each label; 0 for the most similar ones
            of any label.
        diverse: "dpp" picks demonstrations that also differ from each other (`retrieve.dpp`).
        fixed: how many demonstrations come before the retrieved ones. They are the same for all
            documents: a stratified draw by the seed.
        pool: how many rows of the pool can be retrieved, the same rows for all seeds; 0 for all
            rows.

    Raises:
        InputError: an argument is outside its range, or two cannot be combined.
    """

    name: ClassVar[str] = "similar"

    by: Annotated[str, Field(min_length=1)] = "bm25"
    order: Literal["last", "first", "random"] = "last"
    per_label: NotNegative = 0
    diverse: Literal["", "dpp"] = ""
    fixed: NotNegative = 0
    pool: NotNegative = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.diverse and self.per_label:
            raise InputError(
                "similar: diverse and per_label cannot be combined: give one of the two."
            )

    def most(self, n: int) -> int:
        """How many rows (of each label, with `per_label`) are ranked for n demonstrations.

        Most values of n have the same number, and so one ranking.
        """
        return max(16 if self.per_label else 128, 1 << (n - 1).bit_length())

    def pick(
        self, ranking: Mapping[int, float], labels: Sequence[int], n: int, closed: Collection[int]
    ) -> list[int]:
        """The n rows that are retrieved for a document, the most similar row first.

        Args:
            ranking: rows in the order in which they are to be picked -> their similarities.
            labels: the label of each row of the pool.
            closed: rows that are not picked.

        Raises:
            InputError: there are fewer rows, or n is not what `per_label` needs.
        """
        needed = self.per_label * len(set(labels))
        if self.per_label and n != needed:
            raise InputError(
                f"per_label={self.per_label}: this needs --num_fewshot {needed + self.fixed}."
            )
        picked: list[int] = []
        picked_by_label: Counter[int] = Counter()
        for row in ranking:
            is_full = self.per_label and picked_by_label[labels[row]] == self.per_label
            if row not in closed and not is_full:
                picked.append(row)
                picked_by_label[labels[row]] += 1
            if len(picked) == n:
                return sorted(picked, key=lambda row: (-ranking[row], row))
        raise InputError(
            f"{n} demonstrations are asked for, and the pool has {len(picked)}: "
            "lower --num_fewshot."
        )

    def in_prompt_order(self, picked: Sequence[int], seed: str) -> list[int]:
        """The order of the prompt, for retrieved rows of which the most similar comes first."""
        if self.order == "random":
            return Random(f"order {seed}").sample(picked, len(picked))
        return list(picked if self.order == "first" else picked[::-1])
