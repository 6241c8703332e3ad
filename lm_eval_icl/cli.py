"""The console command `lm-eval-icl`: lm-eval's own command line, our models and tasks registered."""

from lm_eval.__main__ import cli_evaluate

from lm_eval_icl import plugin


def main() -> None:
    """Run `lm_eval` with the arguments given, also where the start-up shim is not installed."""
    plugin.register_models()
    plugin.add_task_dir()
    cli_evaluate()
