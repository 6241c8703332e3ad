"""The command `lm-eval-icl demo`: lm-eval's `hf` and eight methods on the model that comes with the
package."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lm_eval_icl.cli import OneLine, study
from lm_eval_icl.smoke.demo import model_path


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl demo`."""
    parser.description = (
        "Run lm-eval's hf and eight methods on the demonstration tasks, as a study, with a table and a leaderboard's "
        "page. The demo runs offline and on a CPU: the model and the documents come with the package."
    )
    parser.add_argument(
        "--limit", default="50", metavar="N", help="documents of each task (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        default="results/demo",
        metavar="DIR",
        help="the folder of the study (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
    file = Path(__file__).parents[1] / "smoke" / "demo.yaml"
    options = ["--model_args", f"pretrained={model_path()}", "--device", "cpu"]
    options += ["--limit", args.limit, "--output", args.output]
    study.command(OneLine(prog=parser.prog), [str(file), *options])
    print(
        "The model knows a few hundred words: which method is better here says nothing\n"
        "about real models. For yours:\n"
        "  lm-eval-icl study which-method --model_args pretrained=MODEL \\\n"
        "    --limit 200 --output results/which"
    )
