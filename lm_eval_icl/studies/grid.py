"""A study's file: read, validated, and every range and list of it expanded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from lm_eval.utils import simple_parse_args_string
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from lm_eval_icl import methods
from lm_eval_icl.decisions.how import NEIGHBORS, Rule, written
from lm_eval_icl.decisions.how import read as read_rules
from lm_eval_icl.demonstrations import how
from lm_eval_icl.errors import InputError, did_you_mean, naming, refusing
from lm_eval_icl.studies.parts import (
    Dev,
    Expected,
    Positive,
    Resources,
    Training,
    Variant,
    Whole,
    combinations,
    expanded,
)
from lm_eval_icl.training.settings import with_numbers

_NAMED = "named"
HF = "hf"
# Options of `lm-eval-icl train` that a study gives itself.
_GIVEN = ("method", "model_args", "output", "resume", "device", "include_path", "metadata")

# The method by which a model chooses demonstrations; or as text "stratified", "random", "first" or a file.
Demonstrations = how.How | str


class Study(BaseModel):
    """A study. Its keys are those of the file; `variants` and `trainings` are `methods` and `train` there.

    Attributes:
        models: the arguments of each model, as of `--model_args`.
        tasks: names of tasks or groups, or overrides of a task's configuration.
        num_fewshot: None for the task's own.
        demonstrations: how they are drawn or chosen; None for the task's own way.
        decide: decision rules, which share the runs of the cells; None for what the model says by itself.
        trainings: empty if the models are evaluated as they are.
        metadata: of the tasks, as for `lm_eval`.
        resources: of each model, as far as the file says; they change no number, and are not recorded.
        columns: tasks and groups, in parts of which each has a name and an average of its own; one part without a name
            if the file has a list.
        expected: the paper's numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    models: tuple[Mapping[str, Any], ...]
    variants: tuple[Variant, ...] = Field(alias="methods")
    tasks: tuple[str | Mapping[str, Any], ...]
    num_fewshot: tuple[Whole | None, ...] = (None,)
    seeds: tuple[Whole, ...] = (1234,)
    orders: Positive = 1
    demonstrations: tuple[Demonstrations | None, ...] = (None,)
    decide: tuple[Rule | None, ...] = (None,)
    dev: Dev | None = None
    metric: str = "acc"
    title: str = ""
    paper: str = ""
    deviates: tuple[str, ...] = ()
    trainings: tuple[Training, ...] = Field(None, alias="train", validate_default=True)
    metadata: Mapping[str, Any] = Field(default_factory=dict, validate_default=True)
    resources: tuple[Resources, ...] = Field((), exclude=True)
    columns: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    figures: tuple[Literal["T", "shots", "seeds", "orders", "sensitivity"], ...] | None = None
    expected: tuple[Expected, ...] = Field((), repr=False)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The decision rules, all of which every cell has as filters."""
        return tuple(rule for rule in self.decide if rule is not None)

    @model_validator(mode="before")
    @classmethod
    def _take_resources(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Take `resources` out of the models, whose other keys are arguments; those of all models are added to each."""
        models = given["models"] if isinstance(given.get("models"), list) else [given.get("models")]
        own: list[Any] = [model.get("resources", {}) if isinstance(model, Mapping) else {} for model in models]
        if "pretrained=" in str((info.context or {}).get("model_args", "")):  # another model, in place of all
            own = [{}]
        for number, mapping in enumerate(own):
            for part in (common := given.get("resources", {}), mapping):
                if not isinstance(part, Mapping):
                    raise InputError(f"resources: {part!r}: must be a mapping, such as {{num_gpus: 2}}.")
            own[number] = needs = {**common, **mapping}
            if needs.get("num_cpus") == 0 and not needs.get("num_gpus"):
                raise InputError("resources: num_cpus=0: a worker needs a core or a GPU: give num_gpus, or a core.")
        arguments = [
            {key: value for key, value in model.items() if key != "resources"} if isinstance(model, Mapping) else model
            for model in models
            if model is not None
        ]
        return {**given, "models": arguments, "resources": tuple(own)}

    @field_validator("num_fewshot", "seeds", "deviates", "figures", "expected", mode="before")
    @classmethod
    def _expand(cls, given: Any, info: ValidationInfo) -> tuple[Any, ...]:
        name = str(info.field_name)
        return tuple(expanded(name, given, needed=name not in ("deviates", "expected")))

    @field_validator("models", mode="before")
    @classmethod
    def _expand_models(cls, given: Any, info: ValidationInfo) -> tuple[dict[str, Any], ...]:
        overrides = info.context or {}
        models = [_model(model) for model in expanded("models", given, needed="model_args" not in overrides)]
        if "model_args" in overrides:
            more = _model(overrides["model_args"])
            models = [more] if "pretrained" in more or not models else [{**model, **more} for model in models]
        if any("pretrained" not in model for model in models):
            raise InputError("models: each must say pretrained=..., as --model_args does.")
        return tuple(models)

    @field_validator("variants", mode="before")
    @classmethod
    def _expand_methods(cls, given: Any) -> tuple[Variant, ...]:
        entries = [{entry: {}} if isinstance(entry, str) else entry for entry in expanded("methods", given)]
        for entry in entries:
            if not isinstance(entry, Mapping) or len(entry) != 1:
                raise InputError(f"methods: {entry!r}: must be a name, or one with its arguments: {{invicl: {{...}}}}.")
            ((name, arguments),) = entry.items()
            if not isinstance(arguments, Mapping | None) or not all(isinstance(key, str) for key in arguments or ()):
                raise InputError(f"methods: {name}: {arguments!r}: must be arguments and values.")
            if name == HF and arguments:
                raise InputError("methods: hf has no arguments of its own: give them in `models`.")
            if name != HF and not methods.is_ours(name):  # before others are imported, which takes seconds
                with naming("methods"):
                    methods.find(name)
        variants = []
        for number, entry in enumerate(entries):
            ((name, arguments),) = entry.items()
            for own in combinations(f"methods: {name}", arguments):
                if name != HF:
                    with naming("methods"):
                        methods.make(name, own)
                variants.append(Variant(name, own, number))
        return tuple(variants)

    @field_validator("tasks", mode="before")
    @classmethod
    def _expand_tasks(cls, given: Any) -> tuple[str | Mapping[str, Any], ...]:
        tasks = expanded("tasks", given)
        for task in tasks:
            if not isinstance(task["task"] if isinstance(task, Mapping) and "task" in task else task, str):
                raise InputError(f"tasks: {task!r}: must be a name, or `task` and what is changed of it.")
        return tuple(tasks)

    @field_validator("demonstrations", mode="before")
    @classmethod
    def _expand_demonstrations(cls, given: Any) -> tuple[Demonstrations | None, ...]:
        ways: list[Any] = []
        for entry in expanded("demonstrations", given):
            name, arguments = next(iter(entry.items()), ("", None)) if isinstance(entry, Mapping) else ("", None)
            several = isinstance(arguments, Mapping) and len(entry) == 1
            ways += [{name: own} for own in combinations(f"demonstrations: {name}", arguments)] if several else [entry]
        return tuple(None if way is None else how.read(way) or str(way) for way in ways)

    @field_validator("decide", mode="before")
    @classmethod
    def _expand_decide(cls, given: Any) -> tuple[Rule | None, ...]:
        rules: list[Rule | None] = []
        for entry in expanded("decide", given):
            rules += [None] if entry in (None, "none") else read_rules(entry)
        for rule in rules:
            if rule is not None and rule.name in NEIGHBORS:
                raise InputError(
                    f"decide: {rule} reads what the model says besides the options, which a study does not keep: leave "
                    f"it out, and run it by lm_eval --metadata decide={rule}."
                )
        return tuple(rules)

    @field_validator("trainings", mode="before")
    @classmethod
    def _expand_trainings(cls, given: Any, info: ValidationInfo) -> tuple[Training, ...]:
        overrides = info.context or {}
        if given is None and "train" not in overrides:
            return ()
        given = given or {}
        if not isinstance(given, Mapping):
            raise InputError(f"train: {given!r}: must be options of `lm-eval-icl train`, such as {{steps: 100}}.")
        listed = (task if isinstance(task, str) else task["task"] for task in info.data.get("tasks", ()))
        tasks = list(dict.fromkeys(listed))
        common = {str(key): value for key, value in given.items() if not isinstance(value, Mapping)}
        several = {str(key): value for key, value in given.items() if isinstance(value, Mapping)}
        trainings = []
        for name, own in (several or {"": {}}).items():
            where = f"train: {name}" if name else "train"
            options = {**common, **own, **overrides.get("train", {})}
            targets = [str(target) for target in expanded(f"{where}: targets", options.pop("targets", tasks))]
            if option := next((option for option in options if option in _GIVEN), None):
                raise InputError(f"{where}: {option}: the study gives this itself: leave it out.")
            # With other tasks than the file's, trainings without targets among them are left out.
            if "tasks" not in overrides and (foreign := set(targets) - set(tasks)):
                raise InputError(
                    f"{where}: targets: {min(foreign)!r} is none of the study's tasks: {', '.join(tasks)}."
                )
            with naming(where):
                options = with_numbers({key: value for key, value in options.items() if value is not None})
            what = next((str(options[key]) for key in ("metaicl", "tasks", "episodes") if key in options), "trained")
            if asked := tuple(target for target in targets if target in tasks):
                trainings.append(Training(name or what, options, asked))
        targets_of_all = {target for training in trainings for target in training.targets}
        if without := [task for task in tasks if task not in targets_of_all]:
            raise InputError(f"train: no training has {without[0]!r} among its targets, so that nothing would run it.")
        return tuple(trainings)

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_metadata(cls, given: Any, info: ValidationInfo) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise ValueError("must be a mapping, such as {metaicl: DIR}")
        metadata = {**given, **(info.context or {}).get("metadata", {})}
        if (rules := metadata.get("decide")) is not None:
            raise InputError(
                f"metadata: decide={rules}: decision rules are a key of the study itself: give decide: [none, {rules}] "
                "in the file, or --decide."
            )
        if (drawn := metadata.get("demonstrations")) is not None and how.read(drawn) is not None:
            raise InputError(
                f"metadata: demonstrations={drawn}: a method by which the model chooses is a key of the study itself: "
                f"give demonstrations: [{drawn}] in the file, or --demonstrations {drawn}."
            )
        return metadata

    @field_validator("columns", mode="before")
    @classmethod
    def _expand_columns(cls, given: Any, info: ValidationInfo) -> dict[str, tuple[str, ...]]:
        parts = given if isinstance(given, Mapping) else {"": given}
        asked = (info.context or {}).get("tasks")  # of the file's columns, those that are among other tasks stay
        columns = {}
        for part, listed in parts.items():
            names = map(str, expanded(f"columns: {part}", listed, needed=bool(part)))
            columns[str(part)] = tuple(name for name in names if asked is None or name in asked)
        return {part: names for part, names in columns.items() if names}

    @model_validator(mode="after")
    def _check(self) -> Study:
        """Refuse what would be run twice, and what cannot be chosen."""
        for name, values in (
            ("models", [str(sorted(model.items())) for model in self.models]),
            ("methods", [variant.name for variant in self.variants]),
            ("tasks", [str(task) for task in self.tasks]),
            ("num_fewshot", self.num_fewshot),
            ("seeds", self.seeds),
            ("demonstrations", self.demonstrations),
            ("decide", [str(rule or "none") for rule in self.decide]),
        ):
            twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
            if twice is not None:
                raise InputError(f"{name}: {twice} is there twice: two cells would write one file.")
        for name in self.dev.choose if self.dev else ():
            if name not in ("seeds", "decide") and not any(name in variant.arguments for variant in self.variants):
                raise InputError(f"dev: choose: no method of this study has the argument {name!r}.")
            alike: dict[str, Variant] = {}
            for variant in self.variants if self.trainings else ():
                others = {key: value for key, value in variant.arguments.items() if key != name}
                trained = trained_under(variant)
                if alike.setdefault(f"{variant.entry} {others}", trained) != trained:
                    raise InputError(
                        f"dev: choose: {name!r}: `train` trains a model for each value: give each by itself."
                    )
        return self

    @field_serializer("demonstrations")
    def _texts(self, demonstrations: tuple[Demonstrations | None, ...]) -> list[str | None]:
        return [None if way is None else str(way) for way in demonstrations]

    @field_serializer("decide")
    def _rules_as_written(self, decide: tuple[Rule | None, ...]) -> list[Any]:
        return ["none" if rule is None else written([rule]) for rule in decide]


_KEYS = [field.alias or name for name, field in Study.model_fields.items()]


@functools.cache
def named() -> dict[str, str]:
    """The studies that ship with the package: name -> the paper's table or figure, or a title."""
    files = (resources.files(__package__) / _NAMED).iterdir()
    texts = {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in files if file.name.endswith(".yaml")}
    studies = {name: yaml.safe_load(text) for name, text in sorted(texts.items())}
    return {name: study.get("paper", study["title"]) for name, study in studies.items()}


def read(source: str, overrides: Mapping[str, Any]) -> Study:
    """Read the study of this file or name.

    Args:
        overrides: values by key, which replace those of the file; of `methods`, names, the file's entries stay as they
            are. `model_args` with `pretrained` replaces the models, without it is added to each. `train` and `metadata`
            are added to those of the file. With other `tasks`, those of the file's columns stay that are among them,
            and averages of the paper go.

    Raises:
        InputError: there is no such study, or it cannot be run; the message names the key.
    """
    if (path := Path(source)).is_file():
        with refusing(f"{source}: cannot be read"):
            text = path.read_text(encoding="utf-8")
    elif source in (known := named()):
        text = (resources.files(__package__) / _NAMED / f"{source}.yaml").read_text(encoding="utf-8")
    else:
        what = did_you_mean(source, known) or "`lm-eval-icl study --list` lists those there are."
        raise InputError(f"{source}: neither a file nor a named study: {what}")
    with refusing(f"{source}: not YAML"):
        content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise InputError(f"{source}: must be keys and values, such as `methods: [icl, invicl]`.")
    replaced = {key: value for key, value in overrides.items() if key not in ("model_args", "train", "metadata")}
    if "methods" in replaced:
        replaced["methods"] = _entries_of(replaced["methods"], content.get("methods"))
    content = {str(key): value for key, value in {**content, **replaced}.items() if value is not None}
    for key in content:  # before the methods are looked at, which are slow to import
        if key not in _KEYS:
            near = did_you_mean(key, _KEYS) or f"the keys are {', '.join(_KEYS)}."
            raise InputError(f"{source}: unknown key {key!r}: {near}")
    if isinstance(content.get("dev"), Mapping):
        content["dev"] = {"metric": content.get("metric", "acc"), **content["dev"]}
    try:
        study = Study.model_validate(content, context=overrides)
    except ValidationError as error:
        raise InputError(f"{source}: {_fault(error)}") from error
    if "tasks" in overrides:
        for entry in study.expected:
            for name in [name for name in entry.get("values", {}) if name.startswith("average")]:
                del entry["values"][name]
    return study


def _entries_of(names: Iterable[str], given: Any) -> list[Any]:
    """The entries of a file's methods that have these names; the name itself where it has none."""
    by_name: dict[Any, list[Any]] = {}
    for entry in given if isinstance(given, list) else [given]:
        for name, arguments in entry.items() if isinstance(entry, dict) else [(entry, None)]:
            by_name.setdefault(name, []).append({name: arguments} if arguments else name)
    return [entry for name in names for entry in by_name.get(name, [name])]


def _fault(error: ValidationError) -> str:
    """One fault of a file in a sentence: an unknown key first, since another may be missing for it, which is last."""
    ranks = {"extra_forbidden": 0, "missing": 2}
    fault = min(error.errors(include_url=False), key=lambda fault: ranks.get(fault["type"], 1))
    *above, key = [part for part in fault["loc"] if isinstance(part, str)] or [""]
    where = ": ".join([*above, key])
    if fault["type"] == "extra_forbidden":
        parts = {"dev": Dev.model_fields, "expected": Expected.__annotations__, "resources": Resources.__annotations__}
        known = list(parts.get("".join(above), _KEYS))
        what = did_you_mean(key, known) or f"the keys are {', '.join(known)}."
        return f"{''.join(f'{part}: ' for part in above)}unknown key {key!r}: {what}"
    if fault["type"] == "missing":
        return f"{where}: names none: give one or several."
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return cause.message
    what = str(cause) if cause else fault["msg"].replace("Input should", "must")
    return f"{where}: {fault['input']!r}: {what}."


def _model(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return dict(given)
    if not isinstance(given, str) or not all("=" in part for part in given.split(",")):
        raise InputError(f"models: {given!r}: must be arguments as --model_args takes them, such as pretrained=gpt2.")
    return dict(simple_parse_args_string(given))


def trained_under(variant: Variant) -> Variant:
    """The method that the model of a variant is trained under, with those arguments that are not its defaults.

    It is the method itself, with all its arguments, if it is one pass over one layout. The others run on a model
    trained under another method (`icl` for `hf` and `deepthink`), with those of their arguments that this has too.
    """
    if variant.method == HF:
        return Variant("icl", {}, 0)
    method = methods.make(variant.method, dict(variant.arguments))
    name = variant.method if method.one_pass else method.trained_under
    trained = methods.make(name)
    own = {field.name: getattr(method, field.name) for field in fields(trained)}
    return Variant(name, {key: value for key, value in own.items() if value != getattr(trained, key)}, 0)
