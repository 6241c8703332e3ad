"""The command `lm-eval-icl tasks`: the tasks of this package, and their folder."""

from __future__ import annotations

import argparse

from lm_eval_icl.harness.plugin import task_dir


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl tasks`."""
    parser.description = "List the tasks and groups of tasks of this package."
    parser.add_argument(
        "--path",
        action="store_true",
        help="print the folder of the tasks, for --include_path if lm-eval does not find them",
    )
    if parser.parse_args(arguments).path:
        print(task_dir())
        return
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, include_path=str(task_dir()))
    for name in sorted(manager.all_tasks):
        print(name)
