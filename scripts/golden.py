"""For development: golden samples of this package's numbers, and a comparison of two versions' samples.

    python scripts/golden.py make /tmp/before      # in one version: some minutes of one core
    python scripts/golden.py make /tmp/after       # in the other
    python scripts/golden.py compare /tmp/before /tmp/after

Samples are the responses of every method and of `hf` on tiny random models and a trained one, the papers' tasks,
decision rules, a study with a dev set and rows that a model chooses, its board, and a model after training.
Two versions are equal if log-likelihoods agree to 1e-6 (float32; relatively, if they are above 1), and texts,
predictions, refusals, choices and the board's numbers are the same. Real data are read from ../shared, if it is there.
"""

import argparse
import csv
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
DEMO_MODEL = str(ROOT / "lm_eval_icl" / "demo_model")
Samples = Iterator[tuple[str, Any]]
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
METHODS = (
    "hf icl nope prefixicl pcw saicl batchicl invicl deepthink sbp star ape structured ensemble nbce "
    "ctkv moicl ttt"
).split()
ARGUMENTS: dict[str, dict[str, Any]] = {
    "batchicl": {"layer": 2},
    "deepthink": {"T": 3, "eta": 0.1},
    "ctkv": {"steps": 2, "lr": 0.01},
    "moicl": {"rows": 6, "epochs": 2},
    "ttt": {"permutations": 4, "batch": 2, "rank": 2, "alpha": 2, "lr": 0.01},
}
TASKS = ["icl_demo_short", "icl_demo_pieces"]
REAL = ["icl_trec", "bbh_fewshot_object_counting"]
PAPERS = "icl_sst2 icl_sst5 icl_mr icl_agnews icl_bbh_snarks icl_mmlu_anatomy mmlu_anatomy".split()
RULES = "contextual+domain:n=3+batch+dcpmi+pmi+hidden:m=4+knn:m=4"
STUDY = """{methods: [hf, icl, invicl, {deepthink: {T: 1..3, eta: [0.1, 0.5]}}], tasks: icl_demo_unseen, num_fewshot: 2,
  demonstrations: [stratified, herding], seeds: 0..1, orders: 2, dev: {size: 8, choose: [T]}}"""
BOARD = "value low high difference difference_low difference_high difference_p order_sensitivity".split()
TRAIN = "--tasks icl_demo_four --num_fewshot 3 --steps 6 --batch_size 2 --learning_rate 1e-3 --eval_steps 0".split()
COMMAND = str(Path(sys.executable).with_name("lm-eval-icl"))
MODEL = ["--model_args", f"pretrained={DEMO_MODEL}", "--device", "cpu"]


def models() -> Iterator[tuple[str, Any, Any]]:
    """Name, model and tokenizer: random ones of three types, and a trained one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for name in ("gpt2", "llama", "gpt_neox"):
        torch.manual_seed(1)
        config = AutoConfig.for_model(name, vocab_size=len(tokenizer), **SIZES)
        yield name, AutoModelForCausalLM.from_config(config).eval(), tokenizer
    trained = SHARED / "models" / "stories260K"
    if trained.is_dir():
        model = AutoModelForCausalLM.from_pretrained(trained).eval()
        yield trained.name, model, AutoTokenizer.from_pretrained(trained)


def responses(samples: list[dict[str, Any]]) -> list[list[Any]]:
    """For each document and filter: its number, the prediction, and a log-likelihood for each option, or the text."""
    rows = []
    for sample in samples:
        answers = sample["filtered_resps"]
        found = [answer if isinstance(answer, str) else float(answer[0]) for answer in answers]
        rows.append([sample["doc_id"], sample["filter"], found.index(max(found)), *found])
    return rows


def evaluations(out: Path) -> Samples:
    """Every method on every model, the papers' tasks, and decision rules."""
    import lm_eval.evaluator
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    import lm_eval_icl  # noqa: F401 (registers its tasks)

    def run(made: Any, method: str, tasks: list[str], manager: TaskManager) -> Samples:
        name, model, tokenizer = made
        arguments = ARGUMENTS.get(method, {})
        try:
            lm = get_model(method)(pretrained=model, tokenizer=tokenizer, batch_size=4, **arguments)
            done = lm_eval.simple_evaluate(
                lm,
                tasks=tasks,
                task_manager=manager,
                num_fewshot=2,
                limit=4,
                gen_kwargs={"max_gen_toks": 12},
                bootstrap_iters=0,
            )
        except ValueError as error:
            yield f"{name}/{method}/{','.join(tasks)}", f"refused: {type(error).__name__}"
            return
        for task, found in done["samples"].items():
            yield f"{name}/{method}/{task}", responses(found)

    lm_eval.evaluator.add_env_info = lambda results: None  # asks pip for a second each time
    real = (SHARED / "data").is_dir()
    plain = TaskManager()
    with_rules = TaskManager(metadata={"decide": RULES})
    for made in models():
        for method in METHODS:
            tasks = list(TASKS)
            if real:
                tasks += REAL
                if made[0] == "llama" and method in ("hf", "icl", "invicl", "deepthink"):
                    tasks += PAPERS
            if method == "moicl":  # its weights are for options
                tasks = [task for task in tasks if not task.startswith("bbh_fewshot")]
            yield from run(made, method, tasks, plain)
        for key, value in run(made, "icl", TASKS[:1], with_rules):
            yield f"decide/{key}", value


def command(*arguments: str | Path) -> None:
    subprocess.run([COMMAND, *arguments], check=True)


def study(out: Path) -> Samples:
    """The cells of a study, including those that its dev set has chosen, and its board."""
    (out / "study.yaml").write_text(STUDY)
    command("study", out / "study.yaml", *MODEL, "--limit", "8", "--output", out / "study")
    for file in sorted((out / "study" / "cells").rglob("results_*.json")):
        config = json.loads(file.read_text(encoding="utf-8"))["config"]
        cell = {name: config["icl"]["study"][name] for name in ("demonstrations", "order", "split")}
        cell["arguments"] = config["model_args"]
        del cell["arguments"]["pretrained"]
        key = json.dumps([config["model"], config["fewshot_seed"], cell], sort_keys=True)
        samples = next(file.parent.glob("samples_*.jsonl")).read_text(encoding="utf-8").splitlines()
        yield f"study/{key}", responses(list(map(json.loads, samples)))
    command("leaderboard", out / "study" / "cells", "--csv", out / "board.csv")
    board = []
    for row in csv.DictReader((out / "board.csv").read_text(encoding="utf-8").splitlines()):
        board.append([row["method"], *(float(row[name] or "nan") for name in BOARD)])
    yield "board", sorted(board, key=repr)


def training(out: Path) -> Samples:
    """The log-probabilities of a model after some steps of training."""
    import torch
    from transformers import AutoModelForCausalLM

    command("train", "invicl", *MODEL, *TRAIN, "--output", out / "trained")
    logits = AutoModelForCausalLM.from_pretrained(out / "trained")(torch.arange(5, 45)[None]).logits
    yield "training", logits.log_softmax(-1)[0, :, :8].tolist()


def make(out: Path) -> bool:
    out = out.resolve()
    (out / "hub").mkdir(parents=True)
    if (SHARED / "data").is_dir():
        runpy.run_path(str(SHARED / "tools" / "local_hub.py"))["main"](out / "hub")
    os.chdir(out / "hub")
    os.environ["LM_EVAL_ICL_CACHE"] = str(out / "cache")
    samples = dict([*study(out), *training(out), *evaluations(out)])
    (out / "golden.json").write_text(json.dumps(samples, indent=0), encoding="utf-8")
    return False


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    both = isinstance(one, float) and isinstance(other, float)
    return repr(one) == repr(other) or bool(both and abs(one - other) <= 1e-6 * max(1, abs(one)))


def compare(first: Path, second: Path) -> bool:
    before = json.loads((first / "golden.json").read_text(encoding="utf-8"))
    after = json.loads((second / "golden.json").read_text(encoding="utf-8"))
    names = {**before, **after}
    different = 0
    for name in names:
        pair = (before.get(name, "missing"), after.get(name, "missing"))
        if not equal(*pair):
            different += 1
            one, other = next((rows for rows in zip(*pair, strict=False) if not equal(*rows)), pair)
            print(name, f"    {one}"[:200], f"    {other}"[:200], sep="\n")
    print(f"{different} of {len(names)} samples are different")
    return bool(different)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("make", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    arguments = parser.parse_args()
    sys.exit(globals()[arguments.command](*arguments.folders))
