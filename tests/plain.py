"""The tests under plain mode (`make test-plain`): its default is switched on, in this process and
in forked ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

import pytest

ON = os.environ.get("PLAIN") == "1"

# Why tests cannot pass under plain mode -> the tests: a file, or a file and the beginning of a
# name.
SKIPPED: dict[str, tuple[str, ...]] = {
    "counts tokens, passes or memories": (
        "harness/test_learning.py::test_a_context_for_each_document_is_refused",
        "harness/test_learning.py::test_a_context_is_learned_once_for_all_documents_and_rules",
        "harness/test_learning.py::test_an_hf_object_that_shares_the_model",
        "harness/test_learning.py::test_ttt_answers_all_documents_of_a_task_with_one_adapter",
        "harness/test_runs.py::test_a_model_that_changed_between_runs_is_read_anew",
        "inference/test_hybrids.py::test_every_query_goes_on_from_the_same_state",
        "inference/test_invariance.py::test_permuted_contexts_share_one_memory",
        "inference/test_many_shots.py::test_scores_are_handed_on_while_the_next_pack_runs",
        "inference/test_memories.py::test_windows_are_stored_by_themselves",
        "inference/test_memories.py::test_windows_are_encoded_once_for_all_packs_and_released",
        "inference/test_out_of_memory.py::test_what_is_halved_and_what_is_forgotten",
        "inference/test_reuse.py",
        "inference/test_side_by_side.py::test_how_texts_begin",
        "inference/test_side_by_side.py::test_scores_are_those_of_contexts_that_run_alone",
        "metaicl/test_metaicl.py::test_what_is_learned_from_metaicls_demonstrations",
        "methods/test_joining.py",
        "methods/test_ttt.py::test_adapters_beyond_the_budget_are_learned_again",
        "methods/test_ttt.py::test_each_context_has_its_own_adapter",
        "methods/test_predictor.py::test_one_memory_for_many_calls",
    ),
    "generates the texts of a batch": (
        "inference/test_generation.py::test_stop_strings_end_texts",
        "inference/test_memories.py::test_texts_are_chosen_by_all_memories_together",
        "inference/test_memories.py::test_texts_are_generated_in_parts",
        "inference/test_memories.py::test_texts_on_one_memory_are_those_of_its_demonstrations",
        "inference/test_out_of_memory.py::test_auto_generates_as_many_side_by_side_as_fit",
        "inference/test_out_of_memory.py::test_texts_are_generated_in_smaller_batches",
    ),
    "breaks an optimized function, which plain mode does not call": (
        "cli/test_cli.py::test_smoke_notices_what_hf_does_not_say",
    ),
    "runs a method with code of its own to encode, which plain mode refuses": (
        "inference/test_side_by_side.py::test_a_method_that_overrides_encode_alone",
        "inference/test_side_by_side.py::test_what_a_method_must_say_of_itself",
    ),
    "expects the positions of transformers' `generate`, and not those of the model's own passes": (
        "inference/test_generation.py::test_positions_that_begin_after_the_padding_token",
        "harness/test_runs.py::test_long_prompts_without_demonstrations_run_as_in_hf[206",
    ),
}


@functools.cache
def install() -> None:
    """Make `plain=True` the default of models, of runners and of `Predictor`."""
    from lm_eval_icl.harness.arguments import CommonArguments
    from lm_eval_icl.methods.predictor import Predictor
    from lm_eval_icl.methods.runner import MethodRunner

    *defaults, plain = CommonArguments.__init__.__defaults__
    assert plain is False
    CommonArguments.__init__.__defaults__ = (*defaults, True)
    for cls in (MethodRunner, Predictor):
        cls.__init__.__kwdefaults__["plain"] = True


def skip(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of `SKIPPED`."""
    for item in items:
        for reason, tests in SKIPPED.items():
            if any(item.nodeid.startswith(f"tests/{test}") for test in tests):
                item.add_marker(pytest.mark.skip(reason=f"plain mode: {reason}"))
