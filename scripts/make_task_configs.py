"""Write the YAML files of `icl_mmlu`, `icl_mmlu_instruction`, `icl_bbh`, `icl_rte`, `icl_mrpc`, `icl_qnli` and MetaICL
into task_configs: each subject, subtask or task, and the groups.

    python scripts/make_task_configs.py

The three demonstrations of each subtask of BBH come with the dataset; they are read from the `bbh_fewshot` tasks of the
installed lm-eval. MetaICL's lists are those of lm_eval_icl/metaicl/settings.json. A second run writes the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.tasks._yaml_loader import load_yaml

from lm_eval_icl.harness.tasks import bbh_cloze
from lm_eval_icl.metaicl.data import SETTINGS, targets

OUT = Path(__file__).resolve().parent.parent / "task_configs"

# Deep-Thinking, Table 5: the paper's four categories.
MMLU = {
    "stem": """astronomy college_physics conceptual_physics high_school_physics college_chemistry
        high_school_chemistry college_biology high_school_biology college_computer_science computer_security
        high_school_computer_science machine_learning abstract_algebra college_mathematics
        elementary_mathematics high_school_mathematics high_school_statistics electrical_engineering""",
    "humanities": """high_school_european_history high_school_us_history high_school_world_history prehistory
        formal_logic logical_fallacies moral_disputes moral_scenarios philosophy world_religions
        international_law jurisprudence professional_law""",
    "social_sciences": """high_school_government_and_politics public_relations security_studies
        us_foreign_policy human_sexuality sociology econometrics high_school_macroeconomics
        high_school_microeconomics high_school_geography high_school_psychology professional_psychology""",
    "other": """global_facts miscellaneous professional_accounting business_ethics management marketing anatomy
        clinical_knowledge college_medicine human_aging medical_genetics nutrition professional_medicine
        virology""",
}

# Deep-Thinking, Appendix C: BBH without dyck_languages, multistep_arithmetic_two, object_counting, word_sorting
# and reasoning_about_colored_objects.
BBH = """boolean_expressions causal_judgement date_understanding disambiguation_qa formal_fallacies
    geometric_shapes hyperbaton logical_deduction_five_objects logical_deduction_seven_objects
    logical_deduction_three_objects movie_recommendation navigate penguins_in_a_table ruin_names
    salient_translation_error_detection snarks sports_understanding temporal_sequences
    tracking_shuffled_objects_five_objects tracking_shuffled_objects_seven_objects
    tracking_shuffled_objects_three_objects web_of_lies""".split()
# The answers of the subtasks that list no options.
BBH_ANSWERS = {
    "boolean_expressions": ["False", "True"],
    "sports_understanding": ["no", "yes"],
    "web_of_lies": ["No", "Yes"],
}

# The pairs of sentences of Batch-ICL (Zhang et al. 2024), which InvICL's Figure 1 has, with the templates, arrows and
# instructions of its released code: the columns by their names in the template, the answers by label, the instruction.
PAIRS: dict[str, tuple[dict[str, str], list[str], str]] = {
    "rte": (
        {"Premise": "sentence1", "Hypothesis": "sentence2"},
        ["↑", "↓"],
        "Determine whether the hypotheses made based on the premises below are ↑ or ↓.",
    ),
    "mrpc": (
        {"Sentence 1": "sentence1", "Sentence 2": "sentence2"},
        ["←", "→"],
        "Assess if each pair reflects a semantic equivalence relationship. Use ← or → to indicate the answers.",
    ),
    "qnli": (
        {"Question": "question", "Paragraph": "sentence"},
        ["↑", "↓"],
        "Please determine whether the paragraph contains the answer to the corresponding question. Use ↑ or ↓ to "
        "indicate the answers.",
    ),
}


def write_group(folder: str, name: str, members: list[str]) -> None:
    metrics = [{"metric": metric, "weight_by_size": True} for metric in ("acc", "acc_norm")]
    config = {
        "group": name,
        "task": members,
        "aggregate_metric_list": metrics,
        "metadata": {"version": 1.0},
    }
    write(f"{folder}/{name}.yaml", config)


def write(name: str, config: dict[str, Any]) -> None:
    path = OUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110)
    path.write_text(text, encoding="utf-8")


METRICS = """  - metric: metaicl
    weight_by_size: false
  - metric: acc
    weight_by_size: false
"""


def metaicl_files() -> dict[str, str]:
    """The text of every file of MetaICL's tasks and groups, by its name."""
    texts = {}
    for form in ("", "channel_"):
        # The colon of UnifiedQA's tasks would be in the names of files.
        names = {task: f"metaicl_{form}{task.replace(':', '-')}" for task in targets()}
        for task, name in names.items():
            texts[f"{name}.yaml"] = (
                f'include: _metaicl_{form}yaml\ntask: {name}\ndataset_name: "{task}"\n'
            )
        for setting, lists in SETTINGS.items():
            for end, split in (("", "test"), ("_unseen", "unseen_domain")):
                name = f"metaicl_{form}{setting}{end}"
                tasks = "".join(f"  - {names[task]}\n" for task in lists[split])
                texts[f"{name}.yaml"] = (
                    f"group: {name}\nsetting: {setting}\nsplit: {split}\ntask:\n{tasks}"
                    f"aggregate_metric_list:\n{METRICS}metadata:\n  version: 1.0\n"
                )
    return texts


def main() -> None:
    (OUT / "metaicl").mkdir(exist_ok=True)
    for old in (OUT / "metaicl").glob("metaicl_*.yaml"):
        old.unlink()
    for name, text in metaicl_files().items():
        (OUT / "metaicl" / name).write_text(text, encoding="utf-8")
    for start, folder in (("icl_mmlu", "mmlu"), ("icl_mmlu_instruction", "mmlu/instruction")):
        for category, subjects in MMLU.items():
            names = [f"{start}_{subject}" for subject in subjects.split()]
            write_group(folder, f"{start}_{category}", names)
        write_group(folder, start, [f"{start}_{category}" for category in MMLU])
    for subject in " ".join(MMLU.values()).split():
        names_of = {"task_alias": subject, "dataset_name": subject}
        plain = {"include": "_icl_mmlu_yaml", "task": f"icl_mmlu_{subject}", **names_of}
        write(f"mmlu/icl_mmlu_{subject}.yaml", plain)
        # Hendrycks et al. (2021), as in lm-eval's own `mmlu`.
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        with_instruction = {
            "include": f"../icl_mmlu_{subject}.yaml",
            "task": f"icl_mmlu_instruction_{subject}",
            "description": about,
        }
        write(f"mmlu/instruction/icl_mmlu_instruction_{subject}.yaml", with_instruction)

    for name, (columns, answers, instruction) in PAIRS.items():
        lines = [f"{title}:{{{{{column}.strip()}}}}" for title, column in columns.items()]
        pair: dict[str, Any] = {
            "include": "_icl_classification_yaml",
            "task": f"icl_{name}",
            "dataset_path": "nyu-mll/glue",
            "dataset_name": name,
            "test_split": "validation",  # GLUE hides the labels of its test splits
            "num_fewshot": 4,
            "doc_to_text": "\n".join([*lines, "Answer:"]),
            "doc_to_target": "label",
            "doc_to_choice": answers,
            "target_delimiter": "",
        }
        write(f"classification/icl_{name}.yaml", pair)
        described = {
            "include": f"icl_{name}.yaml",
            "task": f"icl_{name}_instruction",
            "description": f"{instruction}\n\n",
        }
        write(f"classification/icl_{name}_instruction.yaml", described)

    source = Path(lm_eval.tasks.__file__).parent / "bbh/fewshot"
    for subtask in BBH:
        samples = load_yaml(source / f"{subtask}.yaml")["fewshot_config"]["samples"]
        config: dict[str, Any] = {
            "include": "_icl_bbh_yaml",
            "task": f"icl_bbh_{subtask}",
            "task_alias": subtask,
            "dataset_name": subtask,
            "fewshot_config": {"samples": bbh_cloze(samples, BBH_ANSWERS.get(subtask, []))},
        }
        write(f"bbh/icl_bbh_{subtask}.yaml", config)
    write_group("bbh", "icl_bbh", [f"icl_bbh_{subtask}" for subtask in BBH])


if __name__ == "__main__":
    main()
