"""Every change that this package makes to lm-eval, in one table.

Importing this module imports neither lm-eval nor torch: functions are given by name. `lm_eval
--model hf` behaves as if this package were not installed, except that it finds this package's
tasks, runs MetaICL's token ids, and reads `--metadata demonstrations=...`, `shuffle=SEED`,
`labels=...`, `format=SEED` and `decide=...`.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OURS = "our models"
EVERYBODY = "all models"
# The doors by which a program finds this package: the start-up hook (`lm_eval`), `import
# lm_eval_icl`, and the entry points that lm-eval reads after 0.4.13. An entry point is loaded when
# a model of ours is made: too late for what happens earlier, and never in a run of another model.
EVERY_DOOR = "every door"
EARLY_DOORS = "the hook and the import"


@dataclass(frozen=True)
class Patch:
    """A function of lm-eval, and the wrapper that replaces it.

    Attributes:
        place: the function of lm-eval, as MODULE:CLASS.FUNCTION or MODULE:FUNCTION.
        wrapper: MODULE:FUNCTION below `lm_eval_icl.harness`, called as
            `wrapper(original, *args, **kwargs)`.
        concerns: the runs that the patch affects: `OURS` or `EVERYBODY`.
        door: the doors that need the patch: `EVERY_DOOR` or `EARLY_DOORS`.
        what: what the patch does.
        until: what would make the patch unnecessary.
    """

    place: str
    wrapper: str
    concerns: str
    door: str
    what: str
    until: str

    @property
    def module(self) -> str:
        """The module of lm-eval that has the function."""
        return self.place.partition(":")[0]


PATCHES = (
    Patch(
        "lm_eval.tasks.manager:TaskManager.__init__",
        "plugin:with_our_tasks",
        EVERYBODY,
        EARLY_DOORS,
        "The folder of our tasks is scanned too, so that --tasks finds icl_sst2. Without the "
        'patch, --include_path "$(lm-eval-icl tasks --path)" does it.',
        "lm-eval reads tasks from entry points (pull request 4015).",
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.__init__",
        "tasks:with_given_demonstrations",
        EVERYBODY,
        EVERY_DOOR,
        "--metadata demonstrations=... chooses the demonstrations of lm-eval's own tasks, too. "
        "shuffle=SEED puts their documents in random order, labels=... gives demonstrations other "
        "labels, and format=SEED prompts another format.",
        "lm-eval takes indices of demonstrations for every task, and a seed for a sample of its "
        "documents.",
    ),
    Patch(
        "lm_eval.api.registry:get_model",
        "plugin:with_our_models",
        OURS,
        EARLY_DOORS,
        "A name MODULE:CLASS is the method of that class, in a file of the user's. A misspelt "
        "name of ours is refused with the right one, and a line says if a name of ours is "
        "another package's model.",
        "lm-eval finds a model by its class.",
    ),
    Patch(
        "lm_eval.evaluator:evaluate",
        "evaluate:announced",
        EVERYBODY,
        EVERY_DOOR,
        "Tasks are told the model, since MetaICL's tasks cut their sequences by its tokenizer. "
        "Tasks with --metadata decide=... get decision rules as further filters. A model of "
        "ours is told when a run over some tasks begins, so that every prompt is checked before "
        "the first pass, and when it ends; its --use_cache stores JSON, by the run and the "
        "parts of a prompt, instead of pickles by the prompt's text alone.",
        "lm-eval calls a model and its tasks at the start and at the end of a run, has scorers "
        "that may ask a model (version 0.5), and lets a model bring its own cache.",
    ),
    Patch(
        "lm_eval.api.model:TemplateLM._encode_pair",
        "metaicl_task:given_ids",
        EVERYBODY,
        EVERY_DOOR,
        "A request that comes with its token ids, as MetaICL's do, is not tokenized again.",
        "lm-eval takes requests of token ids.",
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.build_qa_turn",
        "prompts:marked_turn",
        OURS,
        EVERY_DOOR,
        "Each turn of a prompt is marked where it begins, and a demonstration's answer at its ends.",
        "lm-eval hands a model the turns of a prompt.",
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.fewshot_context",
        "prompts:with_parts",
        EVERYBODY,
        EVERY_DOOR,
        "A sampler that retrieves demonstrations is told the document. For our models, the "
        "marks are read back from the joined prompt, which becomes a FewShotPrompt.",
        "lm-eval hands a model the turns of a prompt, and a sampler every document.",
    ),
    Patch(
        "lm_eval.api.task:ConfigurableTask.build_all_requests",
        "deciding:with_queries",
        EVERYBODY,
        EVERY_DOOR,
        "The queries of decision rules (--metadata decide=...) are requests of their task.",
        "A filter of lm-eval's may make requests.",
    ),
    Patch(
        "lm_eval.utils:apply_template",
        "prompts:compiled_once",
        OURS,
        EVERY_DOOR,
        "A Jinja template is compiled once, not for every document and field.",
        "lm-eval keeps compiled templates, as 0.5.0.dev1 does.",
    ),
)


def install(module: str = "") -> None:
    """Install the patches of one module of lm-eval, or all patches. A second call changes
    nothing."""
    for patch in PATCHES:
        if module in ("", patch.module):
            *owners, name = patch.place.partition(":")[2].split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(patch.module))
            patch_once(owner, name, _wrapper(patch))


@functools.cache
def _wrapper(patch: Patch) -> Callable[..., Any]:
    """The patch's wrapper. It is looked up only when called, since its module may import one that
    installs patches."""
    module, _, function = patch.wrapper.partition(":")

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wrapper = getattr(importlib.import_module(f"lm_eval_icl.harness.{module}"), function)
        return wrapper(original, *args, **kwargs)

    return call


def patch_once(place: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `place.name` by a function that calls `wrapper(original, *args, **kwargs)`, unless it
    is replaced so."""
    original = getattr(place, name)
    attribute = inspect.getattr_static(place, name)
    wrappers = getattr(original, "wrappers", ())
    if wrapper in wrappers:
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    patched.wrappers = (*wrappers, wrapper)  # type: ignore[attr-defined]
    is_static = isinstance(attribute, staticmethod)
    setattr(place, name, staticmethod(patched) if is_static else patched)
