"""What must hold from one run to the next, and in runs out of the ordinary."""

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import patches
from lm_eval_icl.harness.run import PreparedRun
from lm_eval_icl.prompts.prompt import FewShotPrompt
from tests import evaluation, tiny
from tests.evaluation import ICL, DeepThink


def evaluate(lm, names, shots=2):
    return evaluation.run(lm, "", names, shots)


def test_a_model_that_changed_between_runs_is_read_anew(checkpoint):
    """Evaluation during training: nothing of the old weights may be left."""
    path = checkpoint("gpt2")
    model, tokenizer = tiny.load(path, attn_pdrop=0.5)
    lm = DeepThink(model, tokenizer=tokenizer, T=2)
    before = evaluation.responses(evaluate(lm, ["one_token"]))
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    after = evaluation.responses(evaluate(lm, ["one_token"]))
    fresh = DeepThink(model, tokenizer=tokenizer, T=2)
    assert after == evaluation.responses(evaluate(fresh, ["one_token"])) != before
    assert lm.get_model_info()["icl"]["contexts_encoded"] == 1


def test_requests_made_by_hand(checkpoint):
    """Objects that come and go: one's tokens are never taken for another's."""
    lm = ICL(str(checkpoint("gpt2")), device="cpu")
    scores = []
    for text in ("a", "b", "a", "c", "a"):
        request = Instance("loglikelihood", {}, (FewShotPrompt("", ["dull film\n"], text), " x"), 0)
        scores += lm.loglikelihood([request], disable_tqdm=True)
        del request
    assert scores[0] == scores[2] == scores[4]
    assert len(set(scores)) == 3


def test_options_lose_the_same_demonstrations(tmp_path, monkeypatch):
    """In a multiple-input task every option has a prompt of its own; they stay comparable."""
    tiny.save("gpt2", tmp_path, n_positions=120)
    config = evaluation.task(
        "uneven",
        **evaluation.CHOICE,
        doc_to_text="label",
        doc_to_choice="{{[text, text + ' and so on and on and on for a long while' ]}}",
        doc_to_target="then {{other}}",
        fewshot_config={"sampler": "first_n", "doc_to_choice": "{{[text, other]}}"},
    )
    monkeypatch.setattr(PreparedRun, "release", lambda *_: None)  # else nothing would be left to look at
    lm = ICL(str(tmp_path), device="cpu", overflow="drop")
    results = evaluate(lm, [config], 10)
    kept = {}
    for instance, request in lm.run._prepared.values():
        kept.setdefault(instance.doc_id, set()).add(len(request.prompt.context.demonstrations))
    assert all(len(numbers) == 1 for numbers in kept.values())
    assert len({number for numbers in kept.values() for number in numbers}) > 1
    assert lm.run.left_out["uneven"]["documents"] == len(kept) == 6
    assert len(evaluation.responses(results)) == 12


@pytest.mark.parametrize("rope", tiny.slow_but(["longrope"], ["longrope", "dynamic"]))
def test_angles_that_change_with_length_are_not_mixed(tmp_path, rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 8.0}
    longest = 150  # where "dynamic" looks
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "original_max_position_embeddings": 150}
        longest = 1200
    tiny.save("llama", tmp_path, rope_parameters=parameters, max_position_embeddings=longest)
    names, args = ["one_token", "many_tokens"], {"max_length": 1200}
    fits, refused = ((1, 8), (3,)) if rope == "longrope" else ((1,), (3, 8))  # "dynamic" changes with every length
    for shots in refused:
        with pytest.raises(InputError, match="cross position 150"):
            evaluation.run("icl", tmp_path, names, shots, args=args | {"overflow": "error"})
    for shots in fits:  # all on one side, as hf
        theirs = evaluation.answers("hf", tmp_path, names, shots, batch_size=1, args=args)
        evaluation.assert_same(evaluation.answers("icl", tmp_path, names, shots, args=args), theirs, 1e-4)


def test_the_task_manager_takes_what_it_took():
    """By position too."""
    patches.install("lm_eval.tasks.manager")
    assert TaskManager(None, None, False, {"a": 1}).metadata == {"a": 1}


def test_one_line_of_demonstrations_that_differ_by_document(checkpoint, caplog):
    """lm-eval's own tasks draw anew for each document unless they are told not to."""
    tasks = [
        evaluation.task(name, **evaluation.CHOICE, doc_to_choice=["a", "b"], fewshot_config={"sampler": "default"})
        for name in ("one", "two", "three", "four", "five")
    ]
    evaluation.run("icl", checkpoint("gpt2"), tasks, 2)
    (line,) = [line for line in caplog.messages if "--metadata demonstrations=" in line]
    assert line.startswith("one, two, three and 2 more: lm-eval draws other demonstrations for each document (")
    caplog.clear()
    results = evaluation.run("icl", checkpoint("gpt2"), tasks, 2, metadata={"demonstrations": "random"})
    assert results["config"]["icl"]["contexts_encoded"] <= 5
    evaluation.run("icl", checkpoint("gpt2"), tasks, 0)
    assert not [line for line in caplog.messages if "--metadata demonstrations=" in line]
