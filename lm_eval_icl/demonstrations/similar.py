"""The settings by which demonstrations are retrieved for each document, and the picking from a ranking of the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from lm_eval_icl.demonstrations.select import near
from lm_eval_icl.errors import InputError, refusal

Count = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True)
class Similar:
    """How demonstrations are retrieved. Only the fixed demonstrations and `order=random` depend on the seed.

    Args:
        by: the similarity. "bm25" compares the words of the documents' queries (`retrieve.BM25`). "features" is the
            cosine of the evaluated model's last hidden states of the queries, without demonstrations. Any other text
            names a model of sentence-transformers, and the similarity is the cosine of its vectors.
        order: the place of the most similar demonstration: "last" (next to the query), "first" or "random".
        per_label: how many demonstrations are retrieved of each label; 0 for the most similar ones of any label.
        diverse: "dpp" picks demonstrations that also differ from each other (`retrieve.dpp`).
        fixed: how many demonstrations come before the retrieved ones. They are the same for all documents: a stratified
            draw by the seed.
        pool: how many rows of the pool can be retrieved, the same rows for all seeds; 0 for all rows.
    """

    by: Annotated[str, Field(min_length=1)] = "bm25"
    order: Literal["last", "first", "random"] = "last"
    per_label: Count = 0
    diverse: Literal["", "dpp"] = ""
    fixed: Count = 0
    pool: Count = 0

    def __str__(self) -> str:
        """The settings as a text, which does not depend on the order in which they were given."""
        settings = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return ":".join(
            ["similar", *(f"{name}={value}" for name, value in sorted(settings.items()))]
        )

    def most(self, n: int) -> int:
        """How many rows (of each label, if `per_label` is set) are ranked for a document with n demonstrations. Most
        values of n have the same number, and so one ranking."""
        return max(16 if self.per_label else 128, 1 << (n - 1).bit_length())

    def pick(
        self, ranking: Mapping[int, float], labels: Sequence[int], n: int, closed: Collection[int]
    ) -> list[int]:
        """The n rows that are retrieved for a document, the most similar row first. An `InputError` says if there are
        fewer rows.

        Args:
            ranking: rows in the order in which they are to be picked -> their similarities.
            labels: the label of each row of the pool.
            closed: rows that are not picked.
        """
        if self.per_label and n != (needed := self.per_label * len(set(labels))):
            raise InputError(
                f"per_label={self.per_label}: this needs --num_fewshot {needed + self.fixed}."
            )
        picked, counts = list[int](), Counter[int]()  # counts: how many picked rows have each label
        for row in ranking:
            if row not in closed and not (self.per_label and counts[labels[row]] == self.per_label):
                picked.append(row)
                counts[labels[row]] += 1
            if len(picked) == n:
                return sorted(picked, key=lambda row: (-ranking[row], row))
        raise InputError(
            f"{n} demonstrations are asked for, and the pool has {len(picked)}: lower --num_fewshot."
        )

    def in_prompt_order(self, picked: Sequence[int], seed: str) -> list[int]:
        """The order of the prompt, for retrieved rows of which the most similar comes first."""
        if self.order == "random":
            return Random(f"order {seed}").sample(picked, len(picked))
        return list(picked if self.order == "first" else picked[::-1])


def make(arguments: Mapping[str, Any]) -> Similar:
    """Retrieval with these arguments, or an `InputError` if there is no such argument or its value cannot be used."""
    for name in arguments.keys() - (known := {f.name for f in fields(Similar)}):
        raise InputError(f"similar: unknown argument {name!r}: {near(name, sorted(known))}")
    try:
        similar = TypeAdapter(Similar).validate_python(dict(arguments))
    except ValidationError as error:
        raise InputError("similar: {}={!r}: {}.".format(*refusal(error))) from error
    if similar.diverse and similar.per_label:
        raise InputError("similar: diverse and per_label cannot be combined: give one of the two.")
    return similar
