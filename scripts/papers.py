"""For development: every named study once, small. The papers' models are narrow random stand-ins.

    python scripts/papers.py OUT [--only NAME ...] [--limit 2] [--jobs 2]

A stand-in has random weights, but the positions, windows and tokenizer of its model. So prompts are cut and refused as
for the real model, but the answers mean nothing. A cell has two documents, a training two steps, and a study one seed
and two orders; demonstrations are selected from 1,000 rows, or from 200 by LENS. Stand-ins and data come from
../shared/tools, if that is beside the checkout. Otherwise, configurations, tokenizers and data sets come from the Hub.
Tasks of MetaICL without rows are left out (missing=skip), and all studies of MetaICL if there are no rows. RTE, MRPC
and QNLI have MetaICL's rows. A line is printed for each study. The exit status is 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT.parent / "shared/tools"
STUDIES = {path.stem: path for path in sorted((ROOT / "lm_eval_icl/studies/named").glob("*.yaml"))}
# The ways to get demonstrations that need no model.
DRAWN = ("stratified", "random", "first")
# Tasks of MetaICL that have a single data set, whose rows are not beside the checkout.
WITHOUT_ROWS = ("metaicl_qa_to_qa_unseen", "metaicl_non_qa_to_qa_unseen")
# The sizes of a stand-in, under the names that configurations have for them.
NARROW: dict[str, Any] = {"head_dim": 8, "attention_types": [[["global", "local"], 2]]}
NARROW |= dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 32)
NARROW |= dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 4)
NARROW |= dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"), 4)
NARROW |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 64)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_of_metaicl(study: dict[str, Any]) -> bool:
    return "train" in study or "metaicl_" in str(study["tasks"])


def models(study: dict[str, Any]) -> set[str]:
    """The names of a study's checkpoints."""
    return {
        str(model).partition("pretrained=")[2].partition(",")[0]
        for model in listed(study["models"])
    }


def stand_in(name: str, out: Path) -> None:
    """Write a random, narrow model with the configuration and tokenizer that the Hub has under a name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(name).to_dict()
    sizes = {key: value for key, value in NARROW.items() if config.get(key) is not None}
    config = AutoConfig.for_model(
        config.pop("model_type"), **{**config, **sizes, "attention_layers": None}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(out / name)
    AutoTokenizer.from_pretrained(name).save_pretrained(out / name)


def prepare(out: Path, names: Iterable[str]) -> Path | None:
    """Put models and data into a folder, under their Hub names.

    Returns:
        The folder of MetaICL's data; None if there is none.
    """
    if not TOOLS.is_dir():
        for name in sorted(names):
            if not (out / name / "config.json").is_file():
                stand_in(name, out)
        return None
    if not (out / "metaicl/data").is_dir():
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, TOOLS / "paper_models.py", out], check=True, capture_output=True
        )
        runpy.run_path(str(TOOLS / "local_hub.py"))["main"](out)
        runpy.run_path(str(TOOLS / "metaicl_data.py"))["lay_out"](out / "metaicl")
        # The training files of 160 rows belong to the same folder.
        shutil.copytree(out / "metaicl/pool", out / "metaicl/data", dirs_exist_ok=True)
        pairs_of_glue(out)
    for name in names:  # models of studies that reproduce no paper
        if not (out / name).is_dir():
            shutil.copytree(out / "huggyllama/llama-7b", out / name)
    return out / "metaicl/data"


def pairs_of_glue(out: Path) -> None:
    """Put MetaICL's rows of three tasks of GLUE into GLUE's folder, where SST-2 is already. In MetaICL, a row has the
    form "sentence 1: ... [SEP] sentence 2: ..."."""
    glue = out / "nyu-mll/glue"
    configs = {"sst2": {path.stem: lines(path) for path in sorted(glue.glob("sst2/*.jsonl"))}}
    for task, columns, labels in (
        ("rte", ("sentence1", "sentence2"), ("entailment", "not_entailment")),
        ("qnli", ("question", "sentence"), ("entailment", "not_entailment")),
        ("mrpc", ("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    ):
        rows = []
        for path in sorted(out.glob(f"metaicl/data/glue-{task}/*_16_*.jsonl")):
            for row in lines(path):
                texts = [part.partition(": ")[2] for part in row["input"].split(" [SEP] ")]
                pair: dict[str, Any] = dict(zip(columns, texts, strict=True))
                rows.append({**pair, "label": labels.index(row["output"])})
        half = len(rows) // 2
        configs[task] = {"train": rows[half:], "validation": rows[:half]}
    runpy.run_path(str(TOOLS / "local_hub.py"))["write_repo"](glue, configs)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def options(study: dict[str, Any], metaicl: Path | None, limit: int) -> list[str]:
    """The options of `lm-eval-icl study` that make a study small."""
    seeds = str(listed(study.get("seeds", 0))[0]).partition("..")[0]
    small = ["--limit", str(limit), "--seeds", seeds, "--device", "cpu"]
    if study.get("orders") and not study.get("one_at_a_time"):  # there, all would cost little more
        small += ["--orders", "2"]
    ways = [str(way) for way in listed(study.get("demonstrations", "first"))]
    if any(way not in DRAWN for way in ways):
        sizes = dict.fromkeys(ways, ":pool=1000") | dict.fromkeys(DRAWN, "")
        # The search of LENS would score many sets on many rows.
        sizes["lens"] = ":pool=200:m=50:dev=20:beams=2:iterations=2"
        small += ["--demonstrations", ",".join(way + sizes[way] for way in ways)]
    learning = []
    if "ctkv" in str(study["methods"]):
        learning.append("steps=2")
    if "ttt" in str(study["methods"]):
        learning.append("permutations=4,batch=2")
    if learning:
        small += ["--model_args", ",".join(learning)]
    if "train" in study:
        small += ["--train", "steps=2,train_k=160,eval_steps=0"]
    if is_of_metaicl(study):
        small += ["--metadata", f"metaicl={metaicl},missing=skip"]
        tasks = listed(study["tasks"])
        with_rows = [task for task in tasks if task not in WITHOUT_ROWS]
        if with_rows != tasks:
            small += ["--tasks", ",".join(with_rows)]
    return small


def run(
    name: str,
    study: dict[str, Any],
    out: Path,
    metaicl: Path | None,
    limit: int,
    more: Sequence[str] = (),
) -> tuple[int, int, str]:
    """Run a study.

    Args:
        name: its name, or its file in the folder `out`.
        more: further options of the command.

    Returns:
        How many cells have a result, how many failed (1 if the study ended with another error), and the last line on
        standard error if anything failed.
    """
    folder = out / "studies" / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "lm_eval_icl", "study", name, "--output", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if TOOLS.is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    command += [*options(study, metaicl, limit), *more]
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        said = subprocess.run(
            command,
            cwd=out,
            env=environment,
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        log.write(said.stderr)
    failed = re.search(r"(\d+) of \d+ cells failed", said.stderr)
    last = (said.stderr.strip().splitlines() or [""])[-1] if said.returncode else ""
    number = int(failed[1]) if failed else int(said.returncode != 0)
    return len(list(folder.glob("cells/**/results_*.json"))), number, last


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="a folder for stand-ins, data and results"
    )
    parser.add_argument(
        "--only", nargs="+", choices=STUDIES, metavar="NAME", default=list(STUDIES), help="studies"
    )
    parser.add_argument("--limit", type=int, default=2, help="how many documents a cell has")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="studies that run side by side"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    studies = {
        name: yaml.safe_load(STUDIES[name].read_text(encoding="utf-8")) for name in args.only
    }
    metaicl = prepare(out, set().union(*map(models, studies.values())))
    print(f"{'study':32}{'cells':>8}{'failed':>8}{'seconds':>9}", flush=True)

    def timed(name: str) -> tuple[int, int, float]:
        study = studies[name]
        if is_of_metaicl(study) and metaicl is None:
            why = f"no MetaICL data beside the checkout ({TOOLS.parent})"
            print(f"{name:32}left out: {why}", flush=True)
            return 0, 0, 0.0
        begun = time.perf_counter()
        cells, failed, last = run(name, study, out, metaicl, args.limit)
        seconds = time.perf_counter() - begun
        print(f"{name:32}{cells:8,}{failed:8,}{seconds:9.0f}  {last}".rstrip(), flush=True)
        return cells, failed, seconds

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of each study
    with ThreadPoolExecutor(args.jobs) as pool:
        total = [sum(numbers) for numbers in zip(*pool.map(timed, studies), strict=True)]
    print(f"{'all':32}{total[0]:8,}{total[1]:8,}{total[2]:9.0f}")
    return int(total[1] > 0)


if __name__ == "__main__":
    sys.exit(main())
