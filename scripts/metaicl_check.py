"""Evaluates a checkpoint on the test tasks of hr_to_lr, direct and channel, with five seeds, under hf, icl and invicl.

    python scripts/metaicl_check.py METAICL/data --model CHECKPOINT --limit 10

Prints the group's value by model and form, the largest difference of a log-probability between icl and hf, and whether
all their answers are the same.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lm_eval_icl.harness import patches
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.metaicl.files import SEEDS

GROUPS = ("metaicl_hr_to_lr", "metaicl_channel_hr_to_lr")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="the folder of MetaICL's data")
    parser.add_argument("--model", required=True, help="the folder or name of a checkpoint")
    parser.add_argument("--limit", type=int, help="documents of each task; all by default")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for module in ("lm_eval.evaluator", "lm_eval.api.model"):  # where the start-up hook is not installed
        patches.install_early(module)
    hf = HFLM(pretrained=options.model, device=options.device, batch_size=8)
    models: dict[str, Any] = {"hf": hf}
    for name in ("icl", "invicl"):
        models[name] = model_class(name)(pretrained=hf.model, tokenizer=hf.tokenizer, device=options.device)
    folder = str(task_dir() / "metaicl")
    manager = TaskManager(include_path=folder, include_defaults=False, metadata={"metaicl": options.data})
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in GROUPS:
        scored, largest, same = 0, 0.0, True
        for seed in SEEDS:
            answers: dict[str, list[tuple[float, Any]]] = {}
            for name, model in models.items():
                results: Any = lm_eval.simple_evaluate(
                    model=model,
                    tasks=[group],
                    task_manager=manager,
                    limit=options.limit,
                    fewshot_random_seed=seed,
                    bootstrap_iters=0,
                )
                values[group, name].append(results["results"][group]["metaicl,none"])
                print(f"{group}, seed {seed}, {name}: {values[group, name][-1]:.3f}", flush=True)
                answers[name] = [
                    (float(response[0][0]), sample["metaicl"])
                    for task in sorted(results["samples"])
                    for sample in results["samples"][task]
                    for response in sample["resps"]
                ]
            pairs = list(zip(answers["icl"], answers["hf"], strict=True))
            scored += len(pairs)
            largest = max(largest, *(abs(ours[0] - theirs[0]) for ours, theirs in pairs))
            same &= all(ours[1] == theirs[1] for ours, theirs in pairs)
        print(f"{group}: {scored:,} options, icl and hf differ by {largest:.1e} at most; the same answers: {same}")
    for (group, name), of_seeds in values.items():
        print(f"{group}, {name}: mean {statistics.mean(of_seeds):.3f}, lowest seed {min(of_seeds):.3f}")


if __name__ == "__main__":
    main()
