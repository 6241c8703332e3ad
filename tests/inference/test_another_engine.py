"""`icl` beside an inference engine that shares no code with PyTorch: CTranslate2."""

import pytest

from tests import evaluation, tiny

pytest.importorskip("ctranslate2", reason="needs CTranslate2: pip install ctranslate2")

from scripts.benchmarks.engine import CTranslate2

TASK = evaluation.task(
    "words", output_type="multiple_choice", doc_to_choice=["positive", "negative", "a"]
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_another_engine_gives_the_same_log_likelihoods(checkpoint, name):
    path = checkpoint(name)
    results = evaluation.run("icl", path, [TASK], 3)
    samples = results["samples"]["words"]
    requests = [tuple(request) for sample in samples for request in sample["arguments"]]
    numbers = [float(response[0]) for sample in samples for [response] in sample["resps"]]

    model, tokenizer = tiny.load(path)
    theirs = CTranslate2(model, tokenizer).log_likelihoods(requests)

    assert len(numbers) == len(theirs) == 18
    assert numbers == pytest.approx(theirs, abs=1e-4)
    assert max(numbers) - min(numbers) > 1  # they are not all alike
