"""What must hold from one run to the next, and in runs out of the ordinary."""

import pytest
import torch

from lm_eval_icl.errors import InputError
from tests import evaluation, tiny
from tests.evaluation import DeepThink


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


@pytest.mark.parametrize(
    ("rope", "longest", "fits", "refused"),
    [
        ("longrope", 1200, (1, 8), (3,)),
        # It changes with every length, from position 150 on.
        pytest.param("dynamic", 150, (1,), (3, 8), marks=pytest.mark.slow),
    ],
    ids=["longrope", "dynamic"],
)
def test_angles_that_change_with_length_are_not_mixed(tmp_path, rope, longest, fits, refused):
    parameters = tiny.longrope(150)
    if rope == "dynamic":
        parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 8.0}
    tiny.save("llama", tmp_path, rope_parameters=parameters, max_position_embeddings=longest)
    names = ["one_token", "many_tokens"]
    args = {"max_length": 1200}
    for shots in refused:
        with pytest.raises(InputError, match="cross position 150, and from there on"):
            evaluation.run("icl", tmp_path, names, shots, args=args | {"overflow": "error"})
    for shots in fits:  # all on one side, as hf
        theirs = evaluation.answers("hf", tmp_path, names, shots, batch_size=1, args=args)
        ours = evaluation.answers("icl", tmp_path, names, shots, args=args)
        evaluation.assert_same(ours, theirs, 1e-4)


@pytest.mark.parametrize(
    ("switch", "bos", "description"),
    # 206: prompts on both sides of it, and one of 201 tokens whose answers cross it.
    [(150, True, "Tell {{other}}:\n\n"), (206, True, ""), (206, False, "")],
)
def test_long_prompts_without_demonstrations_run_as_in_hf(tmp_path, switch, bos, description):
    """Beyond the switch of angles, all of a request has those of long sequences, also if only the
    answer crosses it; and nothing is cut."""
    tiny.save(
        "llama", tmp_path, rope_parameters=tiny.longrope(switch), max_position_embeddings=1200
    )
    long_text = {"description": description, "doc_to_text": "{{text}} " * 8}
    tasks = [evaluation.choice("options", "no", "yes indeed", **long_text)]
    tasks.append(evaluation.generation("texts", {"until": ["?"], "max_gen_toks": 7}, **long_text))
    args = {"add_bos_token": bos}
    theirs = evaluation.answers("hf", tmp_path, tasks, 0, batch_size=1, args=args)
    for name in ("icl", "deepthink", "invicl"):
        run = evaluation.run(name, tmp_path, tasks, 0, args=args)
        evaluation.assert_same(evaluation.responses(run), theirs, 1e-4)
        assert run["config"]["icl"]["truncated"] == {}


def test_what_documents_cannot_show_is_said(checkpoint, caplog):
    """`--limit` takes the first rows of a split that is sorted by its labels."""

    def warned(limit, **config):
        caplog.clear()
        task = evaluation.choice("t", "a", "b", **config)
        with caplog.at_level("WARNING"):
            evaluation.run("icl", checkpoint("gpt2"), [task], 2, limit=limit)
        return [line for line in caplog.messages if "documents" in line]

    [one_label] = warned(2, doc_to_target=0)
    assert "one right answer in t (0): --limit" in one_label and "shuffle=0" in one_label
    assert warned(2) == ["Intervals will be wide, since the documents are few: t 2."]
    assert warned(None, doc_to_target=0) == []


def test_a_run_records_what_it_cost(checkpoint):
    info = evaluation.run("icl", checkpoint("gpt2"), ["one_token"], 2)["config"]["icl"]
    assert 0 < info["passes"] <= info["tokens_run"]
    assert info["peak_bytes"] > 2**20 and info["shared_demonstrations"] == {}
