"""Reads and validates a study's file, and expands its ranges and lists."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

import yaml
from lm_eval.utils import simple_parse_args_string
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    ValidationError,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from lm_eval_icl import methods
from lm_eval_icl.decisions.rule import Rule
from lm_eval_icl.decisions.rules import NEIGHBORS
from lm_eval_icl.decisions.rules import read as read_rules
from lm_eval_icl.declared import NotNegative, Positive, as_argument
from lm_eval_icl.demonstrations import how, wrong_labels
from lm_eval_icl.errors import InputError, did_you_mean, naming, refusing
from lm_eval_icl.harness.arguments import CommonArguments, read_arguments
from lm_eval_icl.training.settings import with_numbers

if TYPE_CHECKING:  # which imports torch
    from lm_eval_icl.methods.base import Method

_NAMED = Path(__file__).parent / "named"
HF = "hf"
_OVER_TASKS = ("average", "order flips")  # the paper's numbers over all its tasks begin like this
# The only argument of `CommonArguments` that a study may give to a method.
CANONICAL = "canonical_order"

# How a model chooses demonstrations, or how they are retrieved; or the text "stratified", "random",
# "first" or a file.
Demonstrations = how.SelectionMethod | how.Similar | str


@dataclass(frozen=True)
class Variant:
    """A method with one value for each of its arguments."""

    method: str  # "hf" is lm-eval's own model
    arguments: Mapping[str, Any]  # the arguments that the study gives
    # The number of the entry of `methods` that it comes from. `dev` chooses among the variants of
    # an entry.
    entry: int

    @property
    def name(self) -> str:
        """The method and its arguments, as `--model` and `--model_args` take them."""
        return ",".join(
            [self.method, *(f"{name}={value}" for name, value in self.arguments.items())]
        )

    def make(self) -> Method:
        """The method with its arguments, without `canonical_order`, an argument of models."""
        return methods.make(
            self.method,
            {name: value for name, value in self.arguments.items() if name != CANONICAL},
        )


@dataclass(frozen=True)
class Training:
    """How the models of a study are trained under each method before they are evaluated."""

    name: str
    options: Mapping[str, Any]  # the options of `lm-eval-icl train`
    # The names in the study's `tasks` on which these models are evaluated; empty for all.
    targets: tuple[str, ...]

    @property
    def weight_options(self) -> dict[str, Any]:
        """The options on which the weights depend."""
        return {
            name: value
            for name, value in self.options.items()
            if name not in ("save_steps", "data")
        }


def expanded(given: Any) -> list[Any]:
    """The different values of a key, which is a list or a single value. A range such as 0..9 stands
    for its whole numbers, both ends included."""
    values: list[Any] = []
    for value in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        if isinstance(value, str) and (
            ends := re.fullmatch(r"\s*(-?\d+)\s*\.\.\s*(-?\d+)\s*", value)
        ):
            first = int(ends[1])
            last = int(ends[2])
            if last < first:
                raise InputError(f"the range {value} is empty.")
            values += range(first, last + 1)
        else:
            values.append(value)
    return list({str(value): value for value in values}.values())


def _model(given: Any, base: bool = True) -> dict[str, Any]:
    """The arguments of a model; with `base`, they must have `pretrained`."""
    if isinstance(given, str) and all("=" in part for part in given.split(",")):
        given = simple_parse_args_string(given)
    if not isinstance(given, Mapping) or (base and "pretrained" not in given):
        raise InputError(
            f"models: {given!r}: must be arguments as --model_args takes them, such as "
            "pretrained=gpt2."
        )
    if base:
        with naming("models"):
            read_arguments(methods.find("icl"), given)
    return dict(given)


def _variants(given: Any) -> list[Variant]:
    variants = []
    for number, entry in enumerate(expanded(given)):
        name, arguments = (
            next(iter(entry.items()), ("", {})) if isinstance(entry, Mapping) else (entry, {})
        )
        if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
            raise InputError(
                f"methods: {entry!r}: must be a name, or a name with arguments: "
                "{invicl: {...}}."
            )
        if name == HF and arguments:
            raise InputError("methods: hf has no arguments of its own: give them in `models`.")
        with naming(f"methods: {name}"):
            lists = {key: expanded(value) for key, value in (arguments or {}).items()}
            for values in itertools.product(*lists.values()):
                variants.append(Variant(name, dict(zip(lists, values, strict=True)), number))
                if name != HF:
                    variants[-1].make()
                    CommonArguments(canonical_order=variants[-1].arguments.get(CANONICAL))
    return variants


def _demonstrations(given: Any) -> list[Demonstrations | None]:
    return expanded([None if way is None else how.read(way) or str(way) for way in expanded(given)])


def _rules(given: Any) -> list[Rule | None]:
    rules: list[Rule | None] = []
    for entry in expanded(given):
        rules += [None] if entry in (None, "none") else read_rules(entry)
    if reads := [str(rule) for rule in rules if rule is not None and rule.name in NEIGHBORS]:
        raise InputError(
            f"decide: {reads[0]} needs more than a study keeps: run lm_eval --metadata "
            f"decide={reads[0]}."
        )
    return rules


def _labels(given: Any) -> list[str | None]:
    written = [None if entry in (None, "none") else str(entry) for entry in expanded(given)]
    for entry in filter(None, written):
        wrong_labels.read(entry)
    return written


def _trainings(given: Any) -> list[Training]:
    if not isinstance(given, Mapping):
        raise InputError(
            f"train: {given!r}: must be options of `lm-eval-icl train`, such as {{steps: 100}}."
        )
    common = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
    several = {str(key): value for key, value in given.items() if isinstance(value, Mapping)}
    trainings = []
    for name, more in (several or {"": {}}).items():
        options = {key: value for key, value in {**common, **more}.items() if value is not None}
        targets = tuple(map(str, expanded(options.pop("targets", None))))
        with naming(f"train: {name}" if name else "train"):
            options = with_numbers(options)
        what = next(
            (str(options[key]) for key in ("metaicl", "tasks", "episodes") if key in options),
            "trained",
        )
        trainings.append(Training(name or what, options, targets))
    return trainings


def _columns(given: Any) -> dict[str, list[str]]:
    """The names of the columns of each part; a list in the file is one part without a name."""
    parts = given if isinstance(given, Mapping) else {"": given}
    return {str(part): columns for part, names in parts.items() if (columns := expanded(names))}


Listed = BeforeValidator(expanded)
Number = Annotated[int, as_argument(NotNegative)]
Count = Annotated[int, as_argument(Positive)]
Figure = Literal["card", "T", "shots", "seeds", "orders", "sensitivity"]
Resources = Mapping[Annotated[str, Field(pattern="^(num_cpus|num_gpus|memory)$")], NonNegativeFloat]


@with_config(ConfigDict(extra="allow"))
class ModelArguments(TypedDict):
    """The arguments of a model, as for `--model_args`, and the `resources` of this model, if it
    needs others."""

    resources: NotRequired[Resources]


@with_config(ConfigDict(extra="forbid"))
class Expected(TypedDict, total=False):
    """The paper's numbers by column (`values`), of the cells that agree with the other keys."""

    model: str
    training: str
    method: str
    num_fewshot: int
    demonstrations: str
    chosen: bool
    arguments: Mapping[str, Any]
    values: dict[str, float]


class Dev(BaseModel):
    """The dev set. If nothing is chosen on it, it is measured, with columns of its own.

    Attributes:
        size: its number of documents; None for as many as the test set has.
        choose: the settings that are chosen on it: names of arguments, "seeds", "decide".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: Annotated[
        Count | None, BeforeValidator(lambda size: None if size == "test" else size)
    ] = None
    choose: Annotated[tuple[str, ...], Listed] = ()


class Study(BaseModel):
    """A study. Its fields are the keys of its file (docs/studies.md), where `variants` and
    `trainings` are called `methods` and `train`. None stands for the task's own number, way or
    labels of demonstrations, and in `decide` for no rule. With `one_at_a_time`, a cell has the
    first number of demonstrations, labels, format and order, except for at most one of these.

    A new key reaches a cell in one of two ways. An axis is a field of `Cell`: `Grid._first_orders`
    runs over its values, `Cell.path` names it, and `cell_tasks.prepare` or `UnitRunner` obeys it.
    Any other key is read from `Grid.study`; if a cell's numbers depend on it, `cell_tasks._data`
    adds it to the digest in the path, so that another value makes other cells. In both cases,
    `UnitRunner._facts` writes it into the cell's results file, under `config.icl.study`. Tables
    tell cells apart by it only if `results.compared` has a line for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    models: Annotated[
        tuple[Annotated[ModelArguments, BeforeValidator(_model)], ...], Listed, Field(min_length=1)
    ]
    variants: Annotated[
        tuple[Variant, ...], BeforeValidator(_variants), Field(alias="methods", min_length=1)
    ]
    tasks: Annotated[tuple[str | Mapping[str, Any], ...], Listed, Field(min_length=1)]
    num_fewshot: Annotated[tuple[Number | None, ...], Listed, Field(min_length=1)] = (None,)
    seeds: Annotated[tuple[Number, ...], Listed, Field(min_length=1)] = (1234,)
    orders: Count = 1
    demonstrations: Annotated[
        tuple[Demonstrations | None, ...], BeforeValidator(_demonstrations)
    ] = (None,)
    labels: Annotated[tuple[str | None, ...], BeforeValidator(_labels), Field(min_length=1)] = (
        None,
    )
    formats: Annotated[tuple[Number, ...], Listed, Field(min_length=1)] = (0,)
    one_at_a_time: bool = False
    decide: Annotated[tuple[Rule | None, ...], BeforeValidator(_rules)] = (None,)
    dev: Dev | None = None
    metric: str = "acc"
    title: str = ""
    paper: str = ""
    deviates: Annotated[tuple[str, ...], Listed] = ()
    trainings: Annotated[
        tuple[Training, ...], BeforeValidator(_trainings), Field(alias="train")
    ] = ()
    before: bool = False
    metadata: Mapping[str, Any] = {}
    resources: Resources = {}
    columns: Annotated[Mapping[str, tuple[str, ...]], BeforeValidator(_columns)] = {}
    figures: Annotated[tuple[Figure, ...], Listed] | None = None
    fits: Annotated[tuple[Variant, ...], BeforeValidator(_variants)] = ()
    expected: Annotated[tuple[Expected, ...], Listed] = ()

    @property
    def stages(self) -> list[Training | None]:
        """The trainings. None comes first if the models are evaluated as they are, too."""
        as_they_are = [None] if self.before or not self.trainings else []
        return [*as_they_are, *self.trainings]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The decision rules. Every cell has all of them as filters."""
        return tuple(rule for rule in self.decide if rule is not None)

    @model_validator(mode="after")
    def _check(self) -> Study:
        if twice := sorted({"decide", "demonstrations", "labels", "format"} & self.metadata.keys()):
            raise InputError(f"metadata: {twice[0]}: is a key of the study itself: give it there.")
        if self.fits and any(variant.method == HF for variant in (*self.variants, *self.fits)):
            raise InputError(
                "fits: hf cuts long prompts in its own way: leave hf out of the study."
            )
        tasks = {str(task if isinstance(task, str) else task.get("task")) for task in self.tasks}
        if foreign := sorted(
            {target for training in self.trainings for target in training.targets} - tasks
        ):
            raise InputError(f"train: targets: {foreign[0]!r} is none of the study's tasks.")
        if self.dev:
            self._check_choices(self.dev.choose)
        return self

    def _check_choices(self, names: tuple[str, ...]) -> None:
        """Refuse what the dev set cannot choose; and two entries of a method that differ in chosen
        values alone, since what each chooses would be one row."""
        entry_of = dict[str, int]()
        for variant in self.variants:
            alike = [other.arguments for other in self.variants if other.entry == variant.entry]
            rest = dict(sorted(variant.arguments.items()))
            chosen = []
            for name in names:
                if len({str(arguments.get(name)) for arguments in alike}) > 1:
                    chosen.append(name)
                    rest.pop(name, None)
            row = str([variant.method, chosen, rest])
            if chosen and entry_of.setdefault(row, variant.entry) != variant.entry:
                raise InputError(
                    f"dev: choose: {chosen[0]!r}: {variant.method} is listed twice with several "
                    "values: list them once."
                )
        for name in names:
            if name not in ("seeds", "decide") and not any(
                name in variant.arguments for variant in self.variants
            ):
                raise InputError(f"dev: choose: no method of this study has the argument {name!r}.")
            if self.trainings and any(
                name in trained_under(variant).arguments for variant in self.variants
            ):
                raise InputError(
                    f"dev: choose: {name!r}: `train` trains a model for each value: list each "
                    "value as a method of its own."
                )


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        written = [key.value for key, _ in node.value]
        for name in written:
            if written.count(name) > 1:
                raise yaml.YAMLError(f"{name} is given twice")
        return super().construct_mapping(node, deep)


@functools.cache
def named() -> dict[str, str]:
    """The studies that ship with the package: name -> the paper's table or figure, or a title."""
    files = sorted(_NAMED.glob("*.yaml"))
    studies = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in files}
    return {name: study.get("paper", study["title"]) for name, study in studies.items()}


def read(source: str, overrides: Mapping[str, Any]) -> Study:
    """The study of a file or name, with other values for some keys (`_merged`).

    Raises:
        InputError: there is no such study, or it cannot be run; the message names the key.
    """
    file = Path(source) if Path(source).is_file() else _NAMED / f"{source}.yaml"
    if not file.is_file():
        what = did_you_mean(source, named()) or "`lm-eval-icl study --list` lists all studies."
        raise InputError(f"{source}: is neither a file nor a named study: {what}")
    with refusing(f"{source}: cannot be read as YAML"):
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    if not isinstance(content, dict):
        raise InputError(f"{source}: must be keys and values, such as `methods: [icl, invicl]`.")
    try:
        merged = _merged(content, overrides)
        return Study.model_validate(
            {key: value for key, value in merged.items() if value is not None}
        )
    except ValidationError as error:
        fault = min(
            error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"
        )
        if isinstance(cause := fault.get("ctx", {}).get("error"), InputError):
            raise InputError(f"{source}: {cause.message}") from error
        where = ": ".join(part for part in fault["loc"] if isinstance(part, str))
        if fault["type"] == "missing":
            option = "--model_args pretrained=..." if where == "models" else f"--{where}"
            raise InputError(f"{source}: {where}: give it in the file, or {option}.") from error
        keys = () if ": " in where else Study.model_fields
        near = did_you_mean(where, keys) or "docs/studies.md has all keys."
        why = (
            f"there is no such key; {near}"
            if fault["type"] == "extra_forbidden"
            else f"{cause or fault['msg']}."
        )
        raise InputError(f"{source}: {where}: {fault['input']!r}: {why}") from error


def _merged(content: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A file's content with other values for some keys.

    Names in `methods` keep the arguments that the file gives them. Of `model_args`, each method
    gets the arguments that it has. The others replace the models if `pretrained` is among them, or
    else are added to each model. `train` and `metadata` are added. Other `tasks` remove columns and
    targets that are not among them, and the paper's averages.
    """
    merged = {**content, **overrides}
    entries = [
        entry if isinstance(entry, dict) else {entry: {}}
        for entry in expanded(content.get("methods"))
    ]
    if "methods" in overrides:
        by_name = {
            name: [entry for entry in entries if name in entry] or [{name: {}}]
            for name in overrides["methods"]
        }
        entries = [*itertools.chain(*by_name.values())]
    if "model_args" in overrides:
        more = given = _model(merged.pop("model_args"), base=False)
        names = {str(name) for entry in entries for name in entry} - {HF}
        for name in sorted(names):
            known = methods.arguments_of(methods.find(name))
            taken = {key: value for key, value in given.items() if key in known}
            for entry in entries:
                if taken and name in entry:
                    entry[name] = {**(entry[name] or {}), **taken}
            more = {key: value for key, value in more.items() if key not in taken}
        models = [_model(model) for model in expanded(content.get("models"))]
        merged["models"] = (
            [more] if "pretrained" in more else [{**model, **more} for model in models]
        )
    if entries:
        merged["methods"] = entries
    if "metadata" in overrides:
        merged["metadata"] = {**(content.get("metadata") or {}), **overrides["metadata"]}
    if "train" in overrides:
        options = content.get("train") or {}
        more = overrides["train"]
        merged["train"] = {
            k: {**v, **more} if isinstance(v, dict) else v for k, v in options.items()
        } | more
    if "tasks" in overrides:
        tasks = overrides["tasks"]
        parts = _columns(content.get("columns"))
        merged["columns"] = {
            part: [name for name in names if name in tasks] for part, names in parts.items()
        }
        for name, options in (merged.get("train") or {}).copy().items():
            if isinstance(options, dict) and "targets" in options:
                merged["train"][name] = {
                    **options,
                    "targets": [t for t in expanded(options["targets"]) if t in tasks],
                }
                if not merged["train"][name]["targets"]:
                    del merged["train"][name]
        merged["expected"] = [
            {
                **entry,
                "values": {
                    k: v
                    for k, v in entry.get("values", {}).items()
                    if not k.startswith(_OVER_TASKS)
                },
            }
            for entry in expanded(content.get("expected"))
        ]
    return merged


def trained_under(variant: Variant) -> Variant:
    """The method under which the model of a variant is trained, with the arguments that differ from
    the defaults. A method of one pass over one layout is trained under itself. Other methods are
    trained under another method (`hf` and `deepthink` under `icl`), with the arguments that both
    have."""
    if variant.method == HF:
        return Variant("icl", {}, 0)
    method = variant.make()
    name = variant.method if method.one_pass else method.trained_under
    trained = methods.make(name)
    shared = {field.name: getattr(method, field.name, field.default) for field in fields(trained)}
    return Variant(
        name, {key: value for key, value in shared.items() if value != getattr(trained, key)}, 0
    )
