"""The console command `lm-eval-icl`: lm-eval's own command line with our models, and a smoke test."""

from __future__ import annotations

import argparse
import sys

from lm_eval_icl import plugin


def main() -> None:
    """`lm-eval-icl smoke ...`, or whatever `lm_eval` takes, also where the start-up shim is not installed."""
    if sys.argv[1:2] == ["smoke"]:
        _smoke(sys.argv[2:])
        return
    from lm_eval.__main__ import cli_evaluate

    plugin.register_models()
    plugin.add_task_dir()
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print("lm-eval-icl smoke --help: a smoke test of every method; all else is lm-eval's own:\n")
    cli_evaluate()


def _smoke(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lm-eval-icl smoke",
        description="Make a tiny random model and run every method on it through lm-eval. "
        "Exit code 0, or one line that says what broke.",
    )
    parser.add_argument("--arch", default="llama", help="a transformers model type (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=3, help="documents a task (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error(f"--limit {options.limit}: must be 1 or more")

    import logging
    import os

    # Offline, and with fewer progress bars: those that lm-eval switches by itself stay.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval_icl.smoke import smoke

    for name, scores in smoke(options.arch, options.limit).items():
        said = f"refused ({scores})" if isinstance(scores, str) else f"ok ({', '.join(scores)})"
        print(f"{name} on {options.arch}: {said}")
