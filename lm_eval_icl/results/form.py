"""The form of strangers' files, as far as it is read: lm-eval's results and samples, and what `collect` adds to them.

Types are strict, and keys that are not named here may be there. What only describes a run is as if it were missing
where it is damaged (`Tolerant`, `Mapped`); what would be taken for another number is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from lm_eval_icl.errors import one_line

DEPTH = 64
DOCUMENTS = 1_000_000


class Unusable(ValueError):
    """Something in a file that cannot be used; the message is a sentence that says why."""


def refusal(error: ValidationError) -> str:
    """The first thing that is wrong: where, what is there, and what should be."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    value = "" if first["type"] in ("missing", "value_error") else f" is {first['input']!r:.40}"
    return f"{'.'.join(map(str, first['loc'])) or 'it'}{value}: {message[0].lower()}{message[1:]}"


def parse(data: bytes) -> Any:
    """JSON in which no object has a key twice: Python would take the last value, other readers the first.

    Raises:
        Unusable: it is damaged.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise Unusable(f"has the key {twice!r} twice in one object")
        return values

    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    except Unusable:  # a ValueError too
        raise
    except RecursionError:
        raise Unusable(f"is nested more than {DEPTH} deep") from None
    except ValueError as error:
        raise Unusable(f"is damaged, half-written or no JSON ({one_line(error)})") from error


# ---------------------------------------------------------------------------------------------------------------
# Types.

Kind = TypeVar("Kind")


def _or_none(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


Tolerant = Annotated[Kind | None, WrapValidator(_or_none)]
IfMapping = BeforeValidator(lambda value: value if isinstance(value, dict) else {})
Mapped = Annotated[dict[str, Any], IfMapping]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]

_STRICT = ConfigDict(strict=True)
_NUMBER: TypeAdapter[float | None] = TypeAdapter(Tolerant[Number], config=_STRICT)
_COUNT: TypeAdapter[int | None] = TypeAdapter(Tolerant[Count], config=_STRICT)


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return _NUMBER.validate_python(value)


def at(value: Any, *keys: str) -> Any:
    """What is at these keys of a file; None if it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


class Form(BaseModel):
    """An object of JSON. Every key may be missing that has a default."""

    model_config = _STRICT


# ---------------------------------------------------------------------------------------------------------------
# lm-eval's results.


class Shared(Form):
    """How many cells of a study were scored together, of how many orders, and how long that took."""

    cells: Tolerant[Annotated[int, Field(gt=0, lt=2**53)]] = None
    orders: Tolerant[Annotated[int, Field(gt=0)]] = None
    seconds: Tolerant[Number] = None


class Point(Form):
    """The score of some arguments on a study's dev set."""

    arguments: dict[str, Any]
    score: Number


class StudyFacts(Form):
    """What a study of this package says of its cell (`config.icl.study`)."""

    split: Tolerant[str] = None
    metric: Tolerant[str] = None
    order: Tolerant[int] = None
    demonstrations: Tolerant[str] = None
    model: Tolerant[str] = None
    training: Tolerant[str] = None
    weights: Any = None
    changes: Any = None
    arguments: Mapped = {}
    chosen: Tolerant[list[Tolerant[str]]] = None
    expected: Mapped = {}
    curve: Tolerant[list[Tolerant[Point]]] = None
    shared: Tolerant[Shared] = None


class RuleFacts(Form):
    """What a run says of a decision rule of one of its tasks (`config.icl.decided`).

    Attributes:
        name: of the filter that has its values: "batch:m=64:of=pool".
        arguments: all of the rule's, those with their default too.
        transductive: a document's decision depends on the other documents that are evaluated.
        labels: how many labels the rule uses beside those of the demonstrations.
        corpus: of how many documents it takes words.
    """

    name: str
    arguments: Mapped = {}
    transductive: bool
    labels: Count | None = None
    corpus: Count | None = None


def reads_in_words(rules: Iterable[RuleFacts]) -> tuple[str, ...]:
    """What a rule reads beside the document and the demonstrations, in several runs and tasks: "transductive",
    "pool: 64", "labels: 500 to 2016"."""
    numbers: dict[str, set[int]] = {}
    for rule in rules:
        if rule.transductive:
            numbers.setdefault("transductive", set())
        if rule.labels is not None:
            numbers.setdefault("labels", set()).add(rule.labels)
        if rule.arguments.get("of") == "pool":
            m = rule.arguments.get("m", rule.corpus)
            numbers.setdefault("pool", set()).update([m] if type(m) is int else [])
    ends = {name: sorted({min(of_name), max(of_name)}) if of_name else [] for name, of_name in numbers.items()}
    return tuple(f"{name}: {' to '.join(map(str, of_name))}" if of_name else name for name, of_name in ends.items())


class Icl(Form):
    """What a model of this package says of its run (`config.icl`)."""

    study: Annotated[StudyFacts, IfMapping] = StudyFacts()
    trained: Any = None
    decided: Mapped = {}
    tokens_run: Tolerant[Number] = None


class Config(Form):
    """Which model it was, and how it was run."""

    model: Tolerant[str] = None
    model_args: Tolerant[str | dict[str, Any]] = None
    model_dtype: Tolerant[str] = None
    model_revision: Tolerant[str] = None
    model_sha: Tolerant[str] = None
    fewshot_seed: Tolerant[int] = None
    limit: Tolerant[Number] = None
    icl: Annotated[Icl, IfMapping] = Icl()


class Results(Form):
    """A results file. What it says of single tasks is a `ReportedTask`."""

    results: dict[str, Mapped]
    configs: dict[str, Mapped]
    config: Config
    groups: Annotated[dict[str, Mapped], IfMapping] = {}
    group_subtasks: Annotated[dict[str, Tolerant[list[str]]], IfMapping] = {}
    model_name: Tolerant[str] = None
    date: Tolerant[Annotated[float, Field(ge=0, lt=253_402_300_800)]] = None  # before the year 10000
    # lm-eval writes it as text.
    total_evaluation_time_seconds: Tolerant[Annotated[Number, Field(strict=False)]] = None


class TaskConfig(Form):
    """A task's configuration."""

    num_fewshot: Count | None = None
    output_type: Tolerant[str] = None
    description: Tolerant[str] = None
    fewshot_delimiter: Tolerant[str] = "\n\n"
    metric_list: Tolerant[list[Mapped]] = None
    fewshot_config: Mapped = {}
    metadata: Mapped = {}


class SampleCounts(Form):
    effective: Tolerant[Count] = None


def _no_error_is_negative(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if "_stderr," in name and (number(value) or 0) < 0:
            raise ValueError(f"{name.partition(',')[0]} is {value:g}, and no standard error is negative")
    return values


class ReportedTask(Form):
    """What a results file says of one task, under several of its keys, each of which is a mapping by task."""

    values: Annotated[Mapped, AfterValidator(_no_error_is_negative)] = Field({}, alias="results")
    config: Annotated[TaskConfig, IfMapping] = Field(TaskConfig(), alias="configs")
    shots: Count | None = Field(None, alias="n-shot")
    version: Any = Field(None, alias="versions")
    higher_is_better: Mapped = {}
    sizes: Annotated[SampleCounts, IfMapping] = Field(SampleCounts(), alias="n-samples")
    packed: Any = Field(None, alias="icl_scores")

    @property
    def sample_len(self) -> int | None:
        """How many documents were scored, as lm-eval counts them for groups."""
        return _COUNT.validate_python(self.values.get("sample_len"))

    @classmethod
    def of(cls, results: dict[str, Any], task: str) -> ReportedTask:
        """
        Raises:
            Unusable: a number is impossible.
        """
        try:
            return cls.model_validate({key: by.get(task) for key, by in results.items() if isinstance(by, dict)})
        except ValidationError as error:
            raise Unusable(f"of task {task!r}, {refusal(error)}") from None


# ---------------------------------------------------------------------------------------------------------------
# lm-eval's samples, and what `collect` keeps of them.


class Sample(Form):
    """A line of a samples file: one document's requests, responses and scores under one filter.

    What says which document it is must be right. A line stays a dictionary; the rest is read as the task needs it.
    """

    doc_id: Count
    filter: str | None = None
    metrics: list[str] | None = None  # older versions of lm-eval do not list them


class Numbers(Form):
    """Numbers of documents, as bytes in base64."""

    dtype: Literal["bit", "|u1", "<u2", "<u4", "<f4", "<f8"]
    base64: str


class Packed(Form):
    """What `collect` keeps of a task's samples, see there; without `items`, there are marks alone."""

    marks: Annotated[list[Annotated[str, Field(max_length=999)]], Field(max_length=10)] = []


class PackedAnswers(Packed):
    metric: str
    documents: Digest
    prompts: Digest
    demonstrations: Digest | None = None
    n: Annotated[int, Field(gt=0, le=DOCUMENTS)]
    doc_ids: Numbers | None = None
    pairs: bool = False
    items: Numbers
    predictions: Numbers | None = None
    golds: Numbers | None = None
    chance: Annotated[float, Field(gt=0, le=1)] | None = None
