"""Writes the YAML files of MetaICL's tasks and groups into task_configs/metaicl.

    python scripts/metaicl_tasks.py

The lists come from lm_eval_icl/metaicl/settings.json. A file that is not what this writes fails
tests/metaicl/test_metaicl.py.
"""

from __future__ import annotations

from pathlib import Path

from lm_eval_icl.metaicl.files import SETTINGS, targets

FOLDER = Path(__file__).resolve().parent.parent / "task_configs" / "metaicl"


def task_name(task: str, form: str) -> str:
    """The name in lm-eval. (The colon of UnifiedQA's tasks would be in the names of files.)"""
    return f"metaicl_{form}{task.replace(':', '-')}"


def files() -> dict[str, str]:
    """The text of every generated file, by its name."""
    found = {}
    for form in ("", "channel_"):
        for task in targets():
            name = task_name(task, form)
            found[f"{name}.yaml"] = f'include: _metaicl_{form}yaml\ntask: {name}\ndataset_name: "{task}"\n'
        for setting, lists in SETTINGS.items():
            for end, split in (("", "test"), ("_unseen", "unseen_domain")):
                name = f"metaicl_{form}{setting}{end}"
                tasks = "".join(f"  - {task_name(task, form)}\n" for task in lists[split])
                metrics = "".join(f"  - metric: {metric}\n    weight_by_size: false\n" for metric in ("metaicl", "acc"))
                found[f"{name}.yaml"] = (
                    f"group: {name}\nsetting: {setting}\nsplit: {split}\ntask:\n{tasks}"
                    f"aggregate_metric_list:\n{metrics}metadata:\n  version: 1.0\n"
                )
    return found


if __name__ == "__main__":
    for old in FOLDER.glob("metaicl_*.yaml"):
        old.unlink()
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(files())} files in {FOLDER}")
