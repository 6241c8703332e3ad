"""Every change that this package makes to lm-eval, in one table.

Importing this module imports neither lm-eval nor torch: patched functions and wrappers are given by name, and are
looked up when they are needed. `lm_eval --model hf` behaves as if this package were not installed, except that it finds
this package's tasks, and reads `--metadata demonstrations=...`, `shuffle=SEED` and `decide=...`. (For MetaICL's tasks,
which bring token ids, it runs these.)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

OURS, EVERYBODY = "our models", "all models"


@dataclass(frozen=True)
class Patch:
    """A function of lm-eval, and the wrapper that replaces it.

    Attributes:
        place: the function of lm-eval, as MODULE:CLASS.FUNCTION, MODULE:OBJECT.FUNCTION or MODULE:FUNCTION.
        wrapper: MODULE:FUNCTION below `lm_eval_icl.harness`, called as `wrapper(original, *args, **kwargs)`.
        concerns: the runs that the patch affects: `OURS` or `EVERYBODY`.
        what: what the patch does.
        until: what would make the patch unnecessary.
        early: the patch is put in as soon as lm-eval imports the module (`lm_eval_icl.harness.shim`), for what happens
            before a model is made. The others are put in when one of this package's models is imported.
    """

    place: str
    wrapper: str
    concerns: str
    what: str
    until: str
    early: bool = False


PATCHES = (
    Patch(
        "lm_eval.tasks.manager:TaskManager.__init__",
        "plugin:with_our_tasks",
        EVERYBODY,
        "The folder of our tasks is scanned too, so that --tasks finds icl_sst2.",
        "lm-eval reads tasks from entry points (pull request 4015).",
        early=True,
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.__init__",
        "tasks:with_given_demonstrations",
        EVERYBODY,
        "--metadata demonstrations=... gives lm-eval's own tasks, too, the demonstrations that it names, and "
        "shuffle=SEED documents in random order.",
        "lm-eval takes indices of demonstrations for every task, and a seed for a sample of its documents.",
        early=True,
    ),
    Patch(
        "lm_eval.config.evaluate_config:EvaluatorConfig.from_cli",
        "plugin:with_known_model",
        EVERYBODY,
        "A misspelt name of a method is refused before anything is imported or read that takes seconds.",
        "lm-eval makes the model first.",
        early=True,
    ),
    Patch(
        "lm_eval.config.evaluate_config:EvaluatorConfig.process_tasks",
        "arguments:checked_first",
        OURS,
        "The arguments of a model are checked before lm-eval reads the files of all its tasks.",
        "lm-eval makes the model first.",
        early=True,
    ),
    Patch(
        "lm_eval.api.registry:get_model",
        "plugin:with_our_models",
        OURS,
        "A name MODULE:CLASS is the method of that class, in a file of the user's.",
        "lm-eval finds a model by its class.",
        early=True,
    ),
    Patch(
        "lm_eval.evaluator:evaluate",
        "evaluate:announced",
        OURS,
        "The model is told that a run over some tasks begins, so that every prompt is checked before the first pass, "
        "and that it ends, so that what all processes did can be counted.",
        "lm-eval calls a model at the start and at the end of a run.",
    ),
    Patch(
        "lm_eval.evaluator:evaluate",
        "deciding:decided",
        EVERYBODY,
        "--metadata decide=... gives tasks a decision rule as a further filter, and the requests that it needs; "
        "MetaICL's tasks are told the model, whose tokenizer cuts their sequences and counts tokens.",
        "lm-eval has scorers that may ask a model (version 0.5), and tells a task which model is evaluated.",
        early=True,
    ),
    Patch(
        "lm_eval.api.model:TemplateLM._encode_pair",
        "metaicl:own_ids",
        EVERYBODY,
        "A request that comes with its token ids, as MetaICL's do, is not tokenized again.",
        "lm-eval takes requests of token ids.",
        early=True,
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.build_qa_turn",
        "prompts:marked_turn",
        OURS,
        "Each turn of a prompt is marked where it begins.",
        "lm-eval hands a model the turns of a prompt.",
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.fewshot_context",
        "prompts:with_parts",
        OURS,
        "The marks are read back from the joined prompt, which becomes a FewShotPrompt.",
        "lm-eval hands a model the turns of a prompt.",
    ),
    Patch(
        "lm_eval.utils:env.from_string",
        "prompts:compiled_once",
        OURS,
        "A Jinja template is compiled once, not for every document and field.",
        "lm-eval keeps compiled templates, as 0.5.0.dev1 does.",
    ),
    Patch(
        "lm_eval.api.model:CachingLM.__new__",
        "evaluate:resumable",
        OURS,
        "--use_cache keeps JSON, by run and by the parts of a prompt, in place of pickles by its text alone.",
        "lm-eval lets a model bring its own cache.",
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.build_all_requests",
        "deciding:with_queries",
        EVERYBODY,
        "The queries of decision rules (--metadata decide=...) are requests of their task.",
        "A filter of lm-eval's may make requests.",
        early=True,
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.process_results",
        "deciding:without_meaningless",
        EVERYBODY,
        "Metrics that mean nothing with a decision rule's values are not reported under its filter.",
        "A filter of lm-eval's may name the metrics that it has.",
        early=True,
    ),
)


def install() -> None:
    """Install the patches that this package's models need, and print an uncaught `InputError` as one line.

    Installing again changes nothing.
    """
    for patch in PATCHES:
        if patch.concerns == OURS:
            _put_in(patch)
    _show_refusals_as_lines()


def install_early(module: str) -> None:
    """Install the early patches of a module of lm-eval. Installing again changes nothing."""
    for patch in PATCHES:
        if patch.early and patch.place.startswith(f"{module}:"):
            _put_in(patch)
    _show_refusals_as_lines()  # our tasks refuse too, in a run of `hf` for example


def _put_in(patch: Patch) -> Callable[[], None]:
    module, _, path = patch.place.partition(":")
    *owners, name = path.split(".")
    place = functools.reduce(getattr, owners, importlib.import_module(module))
    return patch_once(place, name, _wrapper(patch))


@functools.cache
def _wrapper(patch: Patch) -> Callable[..., Any]:
    """The patch's wrapper. It is looked up only when called, since its module may import one that installs patches."""
    module, _, function = patch.wrapper.partition(":")

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wrapper = getattr(importlib.import_module(f"lm_eval_icl.harness.{module}"), function)
        return wrapper(original, *args, **kwargs)

    return call


def patch_once(place: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Replace `place.name` by a function that calls `wrapper(original, *args, **kwargs)`.

    Patching again with the same wrapper changes nothing.

    Returns:
        A function that removes the patch.
    """
    original, attribute = getattr(place, name), inspect.getattr_static(place, name)
    wrappers = getattr(original, "wrappers", ())
    if wrapper in wrappers:
        return lambda: None

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    patched.wrappers = (*wrappers, wrapper)  # type: ignore[attr-defined]
    setattr(place, name, staticmethod(patched) if isinstance(attribute, staticmethod) else patched)
    return lambda: setattr(place, name, attribute)


def _show_refusals_as_lines() -> None:
    """Print an uncaught `InputError` as one line without a traceback, in the `lm_eval` command too."""
    from lm_eval_icl.errors import InputError

    show = sys.excepthook
    if getattr(show, "shows_refusals", False):
        return

    def one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, InputError):
            print(error, file=sys.stderr)
        else:
            show(kind, error, traceback)

    one_line.shows_refusals = True  # type: ignore[attr-defined]
    sys.excepthook = one_line
