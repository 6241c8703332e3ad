"""Which decision rules fit which tasks, as a table: `python scripts/decision_fits.py TASK ...`, beside the datasets.

A rule fits a task if its queries can be made: nothing is run through a model.
"""

import functools
import logging
import re
import sys

import lm_eval
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from lm_eval_icl.decisions.how import RULES
from lm_eval_icl.errors import InputError

RULES_SHOWN = [*RULES, "batch:of=pool:m=64"]


class Nothing(LM):
    """A model that says the same of everything."""

    def loglikelihood(self, requests: list) -> list:
        return [(-1.0, False)] * len(requests)

    loglikelihood_rolling = generate_until = loglikelihood


def fits(name: str, rule: str, manager: TaskManager, shots: int = 2) -> str:
    """Yes, or why not."""
    task = loaded(name, manager)
    task.set_config("metadata", {**(task.config.metadata or {}), "decide": rule})
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(0)
    try:
        lm_eval.evaluate(lm=Nothing(), task_dict={"tasks": {name: task}, "groups": {}}, limit=20, bootstrap_iters=0)
    except InputError as error:
        return re.sub(r"^task '\w+': decide=\S+: ", "", error.message)
    return "yes"


@functools.cache
def loaded(name: str, manager: TaskManager) -> ConfigurableTask:
    task: ConfigurableTask = manager.load([name])["tasks"][name]
    return task


def main(names: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    manager = TaskManager()
    print(f"| task | {' | '.join(f'`{rule}`' for rule in RULES_SHOWN)} |\n|{' --- |' * (len(RULES_SHOWN) + 1)}")
    notes: dict[str, int] = {}
    for name in names:
        found = [fits(name, rule, manager) for rule in RULES_SHOWN]
        cells = [said if said == "yes" else f"no ({notes.setdefault(said, len(notes) + 1)})" for said in found]
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)
    for said, number in notes.items():
        print(f"\n({number}) {said}")


if __name__ == "__main__":
    main(sys.argv[1:])
