"""What the smoke test says of models that fail, refuse, or give wrong numbers."""

from types import SimpleNamespace

import lm_eval
import pytest

from lm_eval_icl.errors import Unsupported
from lm_eval_icl.smoke import every_method, tiny


def test_a_model_that_hf_does_not_run_is_none(monkeypatch, tmp_path):
    def broken(name, folder):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(tiny, "is_encoder_decoder", lambda arch: False)
    monkeypatch.setattr(every_method, "_load", broken)
    with pytest.raises(tiny.NoTinyModel, match=r"lm-eval's hf fails on it \(.*no kernel"):
        every_method.smoke(str(tmp_path), 1)


def test_a_method_that_generates_no_texts_says_why(monkeypatch):
    def run(lm, task, limit):
        if tasks[task].OUTPUT_TYPE == "generate_until":
            raise Unsupported("it generates nothing")
        return 0.5, []

    tasks = every_method._tasks()
    runner = SimpleNamespace(invariant=False, capabilities=SimpleNamespace(no_memory="none"))
    monkeypatch.setattr(every_method, "_run", run)
    monkeypatch.setattr(every_method, "_load", lambda *_: SimpleNamespace(runner=runner))
    scores = every_method._check("pcw", "", 1, {})
    refused = every_method.refusals({"pcw": scores, "sbp": "it has no memory"})
    assert refused == {"pcw (texts)": "it generates nothing", "sbp": "it has no memory"}


def test_a_log_likelihood_that_is_no_number_is_named(monkeypatch):
    name = next(iter(every_method._tasks()))
    samples = {name: [{"doc_id": 3, "resps": [[("nan", "False")]]}]}
    monkeypatch.setattr(lm_eval, "evaluate", lambda *_, **__: {"samples": samples})
    with pytest.raises(ValueError, match=f"{name}, document 3: log-likelihood nan"):
        every_method._run(None, name, 1)


def test_a_generated_text_that_is_not_the_likeliest_is_named(monkeypatch):
    task = SimpleNamespace(instances=["an instance"])
    monkeypatch.setattr(every_method, "_tasks", lambda: {"t": task})
    lm = SimpleNamespace(
        eot_token_id=0,
        tok_decode=lambda *_, **__: "",
        tokenize=lambda _: [SimpleNamespace(prompt=SimpleNamespace(context=1, query=2))],
        text_of=lambda *_: "some text",
        runner=SimpleNamespace(
            generate=lambda *_: [[7, 8]], score=lambda _: [("", [(-1.0, False)])]
        ),
    )
    with pytest.raises(ValueError, match="t: 'some text' is generated, but it is not the most"):
        every_method._likeliest(lm, "t")


def test_a_model_that_transformers_cannot_build_is_none(monkeypatch):
    def broken(*_):
        raise ValueError("heads do not fit. See above")

    monkeypatch.setattr(tiny, "configuration", broken)
    with pytest.raises(tiny.NoTinyModel, match="ValueError: heads do not fit"):
        tiny.build("llama")


def test_a_type_without_a_causal_language_model():
    with pytest.raises(tiny.NoTinyModel) as refusal:
        tiny.check("vit")
    assert "transformers has no causal language model of this type" in str(refusal.value)
