"""A study's file: the grid of models, methods, tasks, numbers of demonstrations, seeds and orders."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from lm_eval.utils import simple_parse_args_string

from lm_eval_icl import methods
from lm_eval_icl.demonstrations import how
from lm_eval_icl.errors import InputError, is_number, is_whole
from lm_eval_icl.results.board import AVERAGE
from lm_eval_icl.training.train import with_numbers

_NAMED = "named"
FIGURES = ("T", "shots", "seeds", "orders", "sensitivity", "dev")
HF = "hf"
_DEV = ("size", "choose", "metric")
# Options of `lm-eval-icl train` that a study gives itself.
_GIVEN = ("method", "model_args", "output", "resume", "device", "include_path", "metadata")


@dataclass(frozen=True)
class Variant:
    """A method with one value for each of its arguments.

    Attributes:
        method: its name; "hf" is lm-eval's own model.
        arguments: those that the study gives.
        entry: which entry of `methods` it comes from. Among the variants of one entry, `dev` chooses.
    """

    method: str
    arguments: Mapping[str, Any]
    entry: int

    @property
    def name(self) -> str:
        """The method and its arguments, as `--model` and `--model_args` take them."""
        return ",".join([self.method, *(f"{name}={value}" for name, value in self.arguments.items())])


@dataclass(frozen=True)
class Dev:
    """On which documents values are chosen, and which values.

    Attributes:
        size: how many documents; None for as many as the test set has.
        choose: arguments of methods, and "seeds".
        metric: by which metric.
    """

    size: int | None
    choose: tuple[str, ...]
    metric: str


@dataclass(frozen=True)
class Training:
    """How the models of a study are trained under each method before they are evaluated.

    Attributes:
        name: tells the trainings of a study apart.
        options: those of `lm-eval-icl train`.
        targets: the names in the study's `tasks` that the trained models are evaluated on.
    """

    name: str
    options: Mapping[str, Any]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """A study, every range and list of its file expanded.

    Attributes:
        models: the arguments of each model.
        tasks: names of tasks or groups, or overrides of a task's configuration.
        num_fewshot: None for the task's own.
        demonstrations: how they are drawn, given or chosen; None for the task's own way.
        trainings: empty if the models are evaluated as they are.
        metadata: of the tasks, as for `lm_eval`.
        columns: tasks and groups, in parts of which each has a name and an average of its own; one part without a name
            if the file has a list.
        expected: the paper's numbers.
    """

    models: tuple[Mapping[str, Any], ...]
    variants: tuple[Variant, ...]
    tasks: tuple[str | Mapping[str, Any], ...]
    num_fewshot: tuple[int | None, ...] = (None,)
    seeds: tuple[int, ...] = (1234,)
    orders: int = 1
    demonstrations: tuple[str | None, ...] = (None,)
    dev: Dev | None = None
    metric: str = "acc"
    title: str = ""
    paper: str = ""
    deviates: tuple[str, ...] = ()
    trainings: tuple[Training, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    figures: tuple[str, ...] | None = None
    expected: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    def chooses(self, variant: Variant) -> bool:
        """Whether the variant is one of several among which `dev` chooses."""
        if self.dev is None or not self.dev.choose:
            return False
        others = [other for other in self.variants if other.entry == variant.entry]
        several = any(len({str(each.arguments.get(name)) for each in others}) > 1 for name in self.dev.choose)
        return several or ("seeds" in self.dev.choose and len(self.seeds) > 1)


KEYS = (
    *("models", "methods", "tasks", "num_fewshot", "seeds", "orders", "demonstrations", "train", "dev", "metric"),
    "metadata",
    *("title", "paper", "deviates", "columns", "figures", "expected"),
)


def named() -> dict[str, str]:
    """The studies that ship with the package: name -> the paper's table or figure."""
    found = {}
    for file in sorted((resources.files(__package__) / _NAMED).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            found[file.name.removesuffix(".yaml")] = yaml.safe_load(file.read_text(encoding="utf-8")).get("paper", "")
    return found


def read(source: str, overrides: Mapping[str, Any]) -> Study:
    """Read the study of this file or name.

    Args:
        overrides: values by key, which replace those of the file. `model_args` with `pretrained` replaces the models,
            without it is added to each. `train` and `metadata` are added to those of the file. With other `tasks`,
            those of the file's columns stay that are among them, and averages of the paper go.

    Raises:
        InputError: there is no such study, or it cannot be run; the message names the key.
    """
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{source}: cannot be read ({error}).") from error
    elif source in (there := named()):
        text = (resources.files(__package__) / _NAMED / f"{source}.yaml").read_text(encoding="utf-8")
    else:
        near = difflib.get_close_matches(source, list(there), n=1)
        what = f"did you mean {near[0]!r}?" if near else "`lm-eval-icl study --list` lists those there are."
        raise InputError(f"{source}: neither a file nor a named study: {what}")
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(given, dict):
        raise InputError(f"{source}: must be keys and values, such as `methods: [icl, invicl]`.")
    try:
        return _study(given, overrides)
    except InputError as error:
        raise InputError(f"{source}: {error.message}") from error


def _study(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> Study:
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            what = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(KEYS)}."
            raise InputError(f"unknown key {key!r}: {what}")
    added = ("model_args", "train", "metadata")
    given = {**given, **{key: value for key, value in overrides.items() if key not in added}}
    models = [_model(each) for each in expanded("models", given.get("models"), needed="model_args" not in overrides)]
    if "model_args" in overrides:
        more = _model(overrides["model_args"])
        models = [more] if "pretrained" in more or not models else [{**each, **more} for each in models]
    if any("pretrained" not in each for each in models):
        raise InputError("models: each must say pretrained=..., as --model_args does.")
    seeds = expanded("seeds", given.get("seeds", 1234))
    shots = expanded("num_fewshot", given.get("num_fewshot", [None]))
    for name, values in (("seeds", seeds), ("num_fewshot", shots)):
        for value in values:
            if not ((is_whole(value) and value >= 0) or (name == "num_fewshot" and value is None)):
                raise InputError(f"{name}: {value!r}: must be a whole number, 0 or more.")
    orders = given.get("orders", 1)
    if not is_whole(orders) or orders < 1:
        raise InputError(f"orders: {orders!r}: must be a whole number, 1 or more.")
    metric = str(given.get("metric", "acc"))
    metadata = given.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise InputError(f"metadata: {metadata!r}: must be a mapping, such as {{metaicl: DIR}}.")
    metadata = {**metadata, **overrides.get("metadata", {})}
    if (drawn := metadata.get("demonstrations")) is not None and how.read(drawn) is not None:
        raise InputError(
            f"metadata: demonstrations={drawn}: a method by which the model chooses is a key of the study itself: give "
            f"demonstrations: [{drawn}] in the file, or --demonstrations {drawn}."
        )
    tasks = [_task(each) for each in expanded("tasks", given.get("tasks"))]
    columns = _columns(given.get("columns"))
    if "tasks" in overrides:
        some = {part: tuple(each for each in of if each in overrides["tasks"]) for part, of in columns.items()}
        columns = {part: of for part, of in some.items() if of}
    study = Study(
        models=tuple(models),
        variants=tuple(_variants(expanded("methods", given.get("methods")))),
        tasks=tuple(tasks),
        num_fewshot=tuple(None if each is None else int(each) for each in shots),
        seeds=tuple(map(int, seeds)),  # 1.0 is 1
        orders=int(orders),
        demonstrations=tuple(_demonstrations(given.get("demonstrations", [None]))),
        dev=_dev(given.get("dev"), metric),
        metric=metric,
        title=str(given.get("title", "")),
        paper=str(given.get("paper", "")),
        deviates=tuple(map(str, expanded("deviates", given.get("deviates"), needed=False))),
        trainings=tuple(_trainings(given.get("train"), overrides.get("train"), tasks, "tasks" in overrides)),
        metadata=metadata,
        columns=columns,
        figures=None if given.get("figures") is None else tuple(expanded("figures", given["figures"])),
        expected=tuple(expanded("expected", given.get("expected"), needed=False)),
    )
    _check(study)
    return study if "tasks" not in overrides else replace(study, expected=tuple(map(_no_average, study.expected)))


def _no_average(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The paper's numbers without averages, which are those of the file's columns."""
    return {**entry, "values": {name: v for name, v in entry["values"].items() if not name.startswith(AVERAGE)}}


def expanded(key: str, given: Any, needed: bool = True) -> list[Any]:
    """The values of a key: a list, a single one, or ranges such as 0..9, both ends included."""
    if given is None and not needed:
        return []
    values = given if isinstance(given, list) else [given]
    if not values and not needed:
        return []
    found: list[Any] = []
    for value in values:
        if isinstance(value, str) and (ends := re.fullmatch(r"\s*(-?\d+)\s*\.\.\s*(-?\d+)\s*", value)):
            first, last = int(ends[1]), int(ends[2])
            if last < first:
                raise InputError(f"{key}: the range {value} is empty.")
            found += range(first, last + 1)
        elif isinstance(value, str) and re.fullmatch(r"[\s\d-]+\.{2,}[\s\d.-]*|\.{2,}[\s\d-]+", value):
            raise InputError(f"{key}: {value!r}: a range has two dots between its ends: 0..2 is 0, 1 and 2.")
        else:
            found.append(value)
    if not found or (given is None and needed):
        raise InputError(f"{key}: names none: give one or several.")
    return found


def _model(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return dict(given)
    if not isinstance(given, str) or not all("=" in each for each in given.split(",")):
        raise InputError(f"models: {given!r}: must be arguments as --model_args takes them, such as pretrained=gpt2.")
    return dict(simple_parse_args_string(given))


def _task(given: Any) -> str | Mapping[str, Any]:
    if isinstance(given, Mapping) and isinstance(given.get("task"), str):
        return dict(given)
    if not isinstance(given, str):
        raise InputError(f"tasks: {given!r}: must be a name, or a mapping with `task` and what is changed of it.")
    return given


def _demonstrations(given: Any) -> Iterator[str | None]:
    """The ways in which demonstrations are chosen, each as a text."""
    for entry in expanded("demonstrations", given):
        if not isinstance(entry, Mapping):
            found = how.read(entry) if isinstance(entry, str) else None
            yield None if entry is None else str(found or entry)
            continue
        name, arguments = next(iter(entry.items()), ("", None))
        if len(entry) != 1 or not isinstance(arguments, Mapping):
            yield str(how.read(entry))  # which refuses what is no method with its arguments
            continue
        lists = {key: expanded(f"demonstrations: {name}: {key}", each) for key, each in arguments.items()}
        for values in itertools.product(*lists.values()):
            yield str(how.read({name: dict(zip(lists, values, strict=True))}))


def _columns(given: Any) -> dict[str, tuple[str, ...]]:
    """The columns of each part of the table."""
    if isinstance(given, Mapping):
        return {str(name): tuple(map(str, expanded(f"columns: {name}", some))) for name, some in given.items()}
    some = expanded("columns", given, needed=False)
    return {"": tuple(map(str, some))} if some else {}


def _trainings(
    given: Any, more: Mapping[str, Any] | None, tasks: Sequence[str | Mapping[str, Any]], others: bool
) -> Iterator[Training]:
    """The trainings of a study: one, or several, each with a name.

    Args:
        more: options of all trainings, which replace those of the file.
        others: whether the tasks are others than the file's, so that trainings without targets among them are left out.
    """
    if given is None and not more:
        return
    if not isinstance(given, Mapping | None):
        raise InputError(f"train: {given!r}: must be options of `lm-eval-icl train`, such as {{steps: 100}}.")
    names = list(dict.fromkeys(each if isinstance(each, str) else str(each["task"]) for each in tasks))
    common: dict[str, Any] = {}
    several: dict[str, Mapping[str, Any]] = {}
    for key, value in (given or {}).items():
        (several if isinstance(value, Mapping) else common)[str(key)] = value
    found = []
    for name, own in (several or {"": {}}).items():
        where = f"train: {name}" if name else "train"
        options = {**common, **own, **(more or {})}
        targets = [str(each) for each in expanded(f"{where}: targets", options.pop("targets", names))]
        for option in options:
            if option in _GIVEN:
                raise InputError(f"{where}: {option}: the study gives this itself: leave it out.")
        for target in targets:
            if target not in names and not others:
                raise InputError(f"{where}: targets: {target!r} is none of the study's tasks: {', '.join(names)}.")
        try:
            options = with_numbers({key: value for key, value in options.items() if value is not None})
        except InputError as error:
            raise InputError(f"{where}: {error.message}") from error
        what = next((str(options[key]) for key in ("metaicl", "tasks", "episodes") if key in options), "trained")
        if there := tuple(target for target in targets if target in names):
            found.append(Training(name or what, options, there))
    for name in names:
        if not any(name in each.targets for each in found):
            raise InputError(f"train: no training has {name!r} among its targets, so that nothing would run it.")
    yield from found


def trained_under(variant: Variant) -> Variant:
    """The method that the model of a variant is trained under, with those arguments that are not its defaults.

    It is the method itself, with all its arguments, if it is one forward pass over one layout. The others (`hf`,
    `deepthink` and `batchicl`) run on a model trained under `icl`, with those of their arguments that `icl` has too.
    """
    if variant.method == HF:
        return Variant("icl", {}, 0)
    method = methods.make(variant.method, dict(variant.arguments))
    name = variant.method
    if not method.one_pass:
        name = "icl"
    trained = methods.make(name)
    own = {field.name: getattr(method, field.name) for field in fields(trained)}
    return Variant(name, {key: value for key, value in own.items() if value != getattr(trained, key)}, 0)


def _variants(entries: Sequence[Any]) -> Iterator[Variant]:
    for number, entry in enumerate(entries):
        if isinstance(entry, str):
            entry = {entry: {}}
        if not isinstance(entry, Mapping) or len(entry) != 1:
            raise InputError(f"methods: {entry!r}: must be a name, or a name with its arguments: {{invicl: {{...}}}}.")
        ((name, arguments),) = entry.items()
        if not isinstance(arguments, Mapping | None) or not all(isinstance(key, str) for key in arguments or ()):
            raise InputError(f"methods: {name}: {arguments!r}: must be arguments and values.")
        lists = {key: expanded(f"methods: {name}: {key}", value) for key, value in (arguments or {}).items()}
        for values in itertools.product(*lists.values()):
            variant = Variant(str(name), dict(zip(lists, values, strict=True)), number)
            _check_variant(variant)
            yield variant


def _check_variant(variant: Variant) -> None:
    if variant.method == HF:
        if variant.arguments:
            raise InputError("methods: hf has no arguments of its own: give them in `models`.")
        return
    try:
        known = methods.arguments_of(methods.find(variant.method))
        for name in sorted(variant.arguments.keys() - known):
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)
            what = f"did you mean {near[0]!r}?" if near else f"its arguments are {', '.join(sorted(known))}."
            raise InputError(f"{variant.method} has no argument {name!r}: {what}")
        methods.make(variant.method, dict(variant.arguments))
    except InputError as error:
        raise InputError(f"methods: {error.message}") from error


def _dev(given: Any, metric: str) -> Dev | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InputError(f"dev: {given!r}: must be a mapping, such as {{size: test, choose: [T, eta]}}.")
    for key in given:
        if key not in _DEV:
            near = difflib.get_close_matches(str(key), _DEV, n=1)
            what = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_DEV)}."
            raise InputError(f"dev: unknown key {key!r}: {what}")
    size = given.get("size", "test")
    if size != "test" and not (is_whole(size) and size >= 1):
        raise InputError(f"dev: size: {size!r}: must be test, or a whole number, 1 or more.")
    choose = expanded("dev: choose", given.get("choose"), needed=False)
    return Dev(None if size == "test" else int(size), tuple(map(str, choose)), str(given.get("metric") or metric))


def _check(study: Study) -> None:
    """Refuse what would be run twice, and what cannot be chosen or drawn."""
    for name, values in (
        ("models", [str(sorted(each.items())) for each in study.models]),
        ("methods", [each.name for each in study.variants]),
        ("tasks", [str(each) for each in study.tasks]),
        ("num_fewshot", study.num_fewshot),
        ("seeds", study.seeds),
        ("demonstrations", study.demonstrations),
    ):
        twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
        if twice is not None:
            raise InputError(f"{name}: {twice} is there twice: two cells would write one file.")
    for name in study.dev.choose if study.dev else ():
        if name != "seeds" and not any(name in each.arguments for each in study.variants):
            raise InputError(f"dev: choose: no method of this study has the argument {name!r}.")
        alike: dict[str, Variant] = {}
        for variant in study.variants if study.trainings else ():
            others = {key: value for key, value in variant.arguments.items() if key != name}
            trained = trained_under(variant)
            if alike.setdefault(f"{variant.entry} {others}", trained) != trained:
                raise InputError(f"dev: choose: {name!r}: `train` trains a model for each value: give each by itself.")
    for entry in study.expected:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("values"), Mapping):
            raise InputError(f"expected: {entry!r}: must be a mapping with `values`, numbers by column.")
        if not isinstance(entry.get("arguments"), Mapping | None):
            raise InputError(f"expected: arguments: {entry['arguments']!r}: must be arguments and values.")
        for column, value in entry["values"].items():
            if not is_number(value):
                raise InputError(f"expected: {column}: {value!r}: must be a number.")
    for name in study.figures or ():
        if name not in FIGURES:
            raise InputError(f"figures: {name!r}: must be {', '.join(FIGURES)}.")
