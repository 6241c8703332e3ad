"""What decision rules cost: `python scripts/decision_costs.py MODEL LIMIT`, beside the datasets.

Prints processor seconds of a run with each rule as a ratio to those of the raw run, the least of rounds in which
all take turns, by task and model.
"""

import logging
import sys
import time

import lm_eval
from lm_eval.tasks import TaskManager

from lm_eval_icl.harness.models import model_class

RULES = [None, "contextual", "domain", "batch", "dcpmi", "batch:of=pool:m=128"]
ROUNDS = 3


def main(pretrained: str, limit: int) -> None:
    logging.disable(logging.CRITICAL)
    print(f"| task, model, documents | {' | '.join(f'`{rule}`' for rule in RULES[1:])} |\n|{' --- |' * len(RULES)}")
    manager = TaskManager()
    for name in ("icl_sst2", "icl_agnews"):
        task = manager.load([name])["tasks"][name]
        for method in ("icl", "invicl", "hf"):
            cls = model_class(method) if method != "hf" else lm_eval.api.registry.get_model("hf")
            model = cls.create_from_arg_obj({"pretrained": pretrained}, {"device": "cpu", "batch_size": 8})
            seconds: dict[str | None, list[float]] = {rule: [] for rule in RULES}
            for rule in RULES * ROUNDS:
                others = {key: value for key, value in (task.config.metadata or {}).items() if key != "decide"}
                task.set_config("metadata", {**others, **({"decide": rule} if rule else {})})
                task.set_config("num_fewshot", 8)
                task.set_fewshot_seed(0)
                began = time.process_time()
                lm_eval.evaluate(
                    lm=model, task_dict={"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0
                )
                seconds[rule].append(time.process_time() - began)
            ratios = [f"{min(seconds[rule]) / min(seconds[None]):.2f}" for rule in RULES[1:]]
            print(f"| `{name}`, `{method}`, {limit} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
