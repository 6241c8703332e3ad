"""InvICL's Table 4: the share of MetaICL's training rows that stay whole, standard and duplicated, beside the paper's.

    python scripts/truncation.py DATA [--model openai-community/gpt2-large] [--train_k 160] [--missing skip]

DATA is MetaICL's folder `data`. No weights are loaded, and nothing is trained: the numbers are those that `lm-eval-icl
train --fits invicl --dry_run` prints for each setting, with 8 demonstrations. `--train_k 160 --missing skip` takes what
files there are, whose shares are not the paper's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

# Table 4, in percent: setting -> standard, duplicated.
PAPER = {
    "hr_to_lr": (70, 53),
    "class_to_class": (90, 79),
    "non_class_to_class": (71, 55),
    "qa_to_qa": (59, 40),
    "non_qa_to_qa": (80, 62),
    "non_nli_to_nli": (85, 75),
    "non_paraphrase_to_paraphrase": (85, 71),
}


def shares(setting: str, options: argparse.Namespace) -> dict[str, float]:
    """Method -> the share of a setting's rows of which nothing is cut, in percent."""
    command = [sys.executable, "-m", "lm_eval_icl", "train", "icl", "--dry_run"]
    command += ["--model_args", f"pretrained={options.model}", "--metaicl", setting]
    command += ["--data", options.data, "--num_fewshot", "8", "--fits", "invicl"]
    if options.train_k:
        command += ["--train_k", options.train_k]
    if options.missing:
        command += ["--metadata", f"missing={options.missing}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])
    [line] = [line for line in done.stdout.splitlines() if line.startswith("rows of which")]
    return {name: float(share) for name, share in re.findall(r"(\w+) ([\d.]+)%", line)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", metavar="DATA", help="MetaICL's folder `data`")
    parser.add_argument("--model", default="openai-community/gpt2-large", help="for its tokenizer")
    parser.add_argument("--train_k", help="the K in the names of the training files")
    parser.add_argument("--missing", choices=["skip"], help="leave out tasks without files")
    options = parser.parse_args()
    print("| setting | standard | the paper's | duplicated | the paper's |")
    print("| --- | --- | --- | --- | --- |")
    for setting, (standard, duplicated) in PAPER.items():
        share = shares(setting, options)
        ours = f"{share['icl']:.1f}%", f"{share['invicl']:.1f}%"
        print(f"| {setting} | {ours[0]} | {standard}% | {ours[1]} | {duplicated}% |", flush=True)


if __name__ == "__main__":
    main()
