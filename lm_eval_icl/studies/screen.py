"""What `--dry_run` and `--status` print: the cells of a study, counted, and their list only if it is asked for."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer

from lm_eval_icl.errors import refusing
from lm_eval_icl.studies.cells import Cell, Grid, Model
from lm_eval_icl.studies.conduct import DONE, READY, WAITING, states
from lm_eval_icl.studies.folder import StudyFolder

_NAMES = {DONE: "done", READY: "missing", WAITING: "waiting for others"}


def check_model(model: Model) -> None:
    """Load the tokenizer and the configuration of a model, without its weights.

    Raises:
        InputError: they cannot be loaded.
    """
    of_hub = {k: model.arguments[k] for k in ("revision", "subfolder", "trust_remote_code") if k in model.arguments}
    tokenizer = str(model.arguments.get("tokenizer", model.name))
    with refusing(f"tokenizer={tokenizer!r}: the tokenizer cannot be loaded"):
        AutoTokenizer.from_pretrained(tokenizer, **of_hub)
    with refusing(f"pretrained={model.name!r}: the configuration cannot be loaded"):
        AutoConfig.from_pretrained(model.name, **of_hub)


def print_states(grid: Grid, folder: StudyFolder, console: Console, verbose: bool) -> None:
    """Print how many cells are in which state, and why some could not be made.

    Args:
        verbose: list all targets that are not done.
    """
    known = states(grid, folder, folder.failures())
    cells = Counter((target.split, _NAMES.get(s, "failed")) for target, s in known if isinstance(target, Cell))
    for (split, state), number in cells.items():
        _print(console, f"{number:,} cells on the {split} set: {state}")
    if trained := sum(not isinstance(target, Cell) for target, _ in known):
        _print(console, f"{trained:,} checkpoints to be trained first")
    for target, state in known:
        if state not in _NAMES:
            _print(console, f"failed: {target.path}: {state}")
        elif verbose and state != DONE:
            _print(console, f"{_NAMES[state]}: {target.path}")


def _print(console: Console, text: str) -> None:
    # Reasons have the texts of other people's tasks: nothing that a terminal would obey.
    console.print(Text("".join(c if c.isprintable() else "\ufffd" for c in text)), soft_wrap=True)
