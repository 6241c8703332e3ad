"""The recorded parts of prompts, against what the task's own documents say."""

import copy
import itertools
import pickle

import lm_eval
import pytest
from jinja2 import Environment
from lm_eval import utils
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.api_models import JsonChatStr

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import patches
from lm_eval_icl.harness.prompts import _MARK, _compiled, recording
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.prompt import Demonstration, FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import evaluation


def build(config, shots: int, **kwargs):
    """A task's requests, as a run of one of our models has them made."""
    task = evaluation.load_task(evaluation.TASKS[config] if isinstance(config, str) else config)
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1)
    with recording():
        task.build_all_requests(**kwargs)
    return task.instances


def first_prompt(config, shots: int, **kwargs):
    return build(config, shots, **kwargs)[0].args[0]


def test_plain_parts():
    train = [
        f"Review: {doc['text']}\nSentiment: {'abc'[doc['label']]}\n\n"
        for doc in evaluation.documents(3, 50)
    ]
    for instance in build("one_token", 3):
        prompt = instance.args[0]
        assert type(prompt) is FewShotPrompt
        assert prompt.prefix == ""
        assert list(prompt.demonstrations) == train
        assert prompt.query == f"Review: {instance.doc['text']}\nSentiment:"
        assert prompt == "".join(train) + prompt.query
    prompt = first_prompt("one_token", 0)
    assert prompt.demonstrations == () and prompt.query == prompt


def test_system_instruction_and_description_are_the_prefix():
    prompt = first_prompt("described", 2)
    assert prompt.prefix == "Tell, of film, what it is.\n\nNow: "
    assert len(prompt.demonstrations) == 2 and prompt.demonstrations[0].startswith("Review: ")
    prompt = first_prompt("described", 1, system_instruction="Be brief.")
    assert prompt.prefix == "Be brief.\n\nTell, of film, what it is.\n\nNow: "


def test_generation_prefix_ends_the_query():
    prompt = first_prompt("prefixed", 2)
    assert prompt.query.endswith("Sentiment: I say")
    assert all("I say" in part for part in prompt.demonstrations)


def test_multiple_inputs_have_a_prompt_an_option():
    first, second = (instance.args[0] for instance in build("inputs", 2)[:2])
    assert first.demonstrations == second.demonstrations and len(first.demonstrations) == 2
    assert first.query != second.query


def test_samples():
    prompt = first_prompt("samples", 3)
    assert [
        doc["text"] in part
        for doc, part in zip(evaluation.documents(3, 80), prompt.demonstrations, strict=True)
    ]


def chat(messages, add_generation_prompt=True):
    text = "".join(f"<{m['role']}>{m['content'].strip()}</{m['role']}>" for m in messages)
    return text + ("<assistant>" if add_generation_prompt else "")


@pytest.mark.parametrize("multiturn", [True, False])
def test_chat_template(multiturn):
    kwargs = {"apply_chat_template": True, "chat_template": chat, "fewshot_as_multiturn": multiturn}
    prompt = first_prompt("described", 2, **kwargs)
    assert type(prompt) is FewShotPrompt and _MARK not in prompt
    assert prompt.prefix == "<system>Tell, of film, what it is.\n\nNow:</system><user>"
    first, second = prompt.demonstrations
    end = "</user><assistant>no</assistant><user>" if multiturn else " no\n\n"
    assert first.startswith("Review: ") and first.endswith("Sentiment:" + end)
    assert second.startswith("Review: ")
    assert prompt.query.endswith("Sentiment:</user><assistant>")


def test_blanks_that_a_chat_template_strips():
    """The mark before a turn does not keep them."""
    config = evaluation.choice("blanks", "a", "b", doc_to_text="\n {{other}} is")
    kwargs = {"apply_chat_template": True, "chat_template": chat, "fewshot_as_multiturn": True}
    prompt = first_prompt(config, 1, **kwargs)
    assert isinstance(prompt, FewShotPrompt) and len(prompt.demonstrations) == 1
    assert prompt.query == f"{evaluation.documents(1, 0)[0]['other']} is</user><assistant>"


def answers(prompt):
    """Of each demonstration, with the blanks before it."""
    return [part[slice(*part.answer)] for part in prompt.demonstrations]


def labels(shots, words):
    return [words[doc["label"]] for doc in evaluation.documents(shots, 50)]


def test_the_answer_of_every_demonstration_is_known():
    prompt = first_prompt("one_token", 3)
    assert answers(prompt) == [f" {label}" for label in labels(3, "abc")]
    for part, answer in zip(prompt.demonstrations, answers(prompt), strict=True):
        assert part.endswith(answer + "\n\n")
    for config in ("described", "prefixed", "samples", "inputs", "generate"):
        prompt = first_prompt(config, 2)
        for part, answer in zip(prompt.demonstrations, answers(prompt), strict=True):
            assert isinstance(part, Demonstration)
            assert answer.strip()
            assert part.rstrip().endswith(answer.rstrip())
            assert len(answer) < len(part) / 2


@pytest.mark.parametrize("multiturn", [True, False])
def test_answers_are_known_under_a_chat_template(multiturn):
    kwargs = {"apply_chat_template": True, "chat_template": chat, "fewshot_as_multiturn": multiturn}
    prompt = first_prompt("described", 2, **kwargs)
    assert answers(prompt) == (["no", "yes"] if multiturn else [" no", " yes"])


def test_answers_are_those_of_other_labels_and_formats():
    config = evaluation.TASKS["one_token"]
    flipped = {**config, "metadata": {"labels": "flipped:1.0"}}
    shown = answers(first_prompt(flipped, 3))
    gold = answers(first_prompt(config, 3))
    for answer, right in zip(shown, gold, strict=True):
        assert answer != right
        assert answer in (" a", " b", " c")
    formatted = first_prompt({**config, "metadata": {"format": 3}}, 3)
    assert formatted != first_prompt(config, 3)
    assert [answer.strip() for answer in answers(formatted)] == labels(3, "abc")


def test_a_template_that_takes_no_marks_in_answers_leaves_the_parts():
    def quoting(messages, add_generation_prompt=True):
        turns = []
        for message in messages:
            content = message["content"].strip()
            if message["role"] == "assistant":
                content = f"{len(content)}:{content}"
            turns.append(f"<{message['role']}>{content}")
        return "".join(turns) + "<assistant>"

    kwargs = {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": quoting}
    prompt = first_prompt("one_token", 2, **kwargs)
    assert len(prompt.demonstrations) == 2
    assert not any(isinstance(part, Demonstration) for part in prompt.demonstrations)


def test_what_leaves_no_structure():
    """A template that depends on what it is given, that of a model with an API, and a document that
    holds the mark."""

    def shouting(messages, add_generation_prompt=True):
        return "".join(f"{len(m['content'])}:{m['content']}" for m in messages)

    def of_an_api(messages, add_generation_prompt=True):
        return JsonChatStr(str(messages))

    for template, kind in ((shouting, str), (of_an_api, JsonChatStr)):
        kwargs = {
            "apply_chat_template": True,
            "chat_template": template,
            "fewshot_as_multiturn": True,
        }
        prompt = first_prompt("one_token", 2, **kwargs)
        assert type(prompt) is kind and (kind is JsonChatStr or _MARK not in prompt)
    marked = {**evaluation.TASKS["one_token"], "doc_to_text": f"x{_MARK}y {{{{text}}}}"}
    assert type(first_prompt(marked, 2)) is str


def test_a_task_that_builds_its_own_prompts(checkpoint):
    class Own(ConfigurableTask):
        def fewshot_context(self, doc, **kwargs):
            # Its turns are not the prompt's: what build_qa_turn makes here must not be marked.
            return "".join(m.to_text() for m in self.build_qa_turn(q=doc["text"], a="x"))

    task = Own(config=evaluation.choice("own", "a", "b"))
    task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(0)
    with pytest.raises(InputError, match=r"'own'.*does not say which parts.*--model hf"):
        lm_eval.simple_evaluate(
            "icl",
            {"pretrained": str(checkpoint("gpt2"))},
            tasks=[task],
            task_manager=evaluation.manager(False),
            device="cpu",
        )


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [pickled, copy.copy, copy.deepcopy])
def test_copies_and_other_processes_keep_the_parts(copied):
    prompt = copied(FewShotPrompt("p", ["d"], "q"))
    assert type(prompt) is FewShotPrompt
    assert prompt == "pdq"
    assert prompt.prefix == "p"
    assert prompt.demonstrations == ("d",)
    assert prompt.query == "q"
    part = copied(Demonstration("q:", " a", "\n"))
    assert type(part) is Demonstration
    assert part == "q: a\n"
    assert part.answer == (2, 4)
    tokens = TokenizedPrompt(Context((1,), ((2,), (3, 4))), (5,))
    encoded = copied(EncodedPrompt(["d", "e"], "q", tokens))
    assert type(encoded) is EncodedPrompt
    assert encoded == "deq"
    assert encoded.ids == [1, 2, 3, 4, 5]
    assert encoded.without([0]) == TokenizedPrompt(Context((1,), ((3, 4),)), (5,))
    continuation = copied(EncodedText(" a", [7]))
    assert continuation == " a"
    assert continuation.ids == (7,)


def test_the_request_cache_is_refused(checkpoint):
    """lm-eval's --cache_requests knows prompts by task and shots, so one seed would read another's
    demonstrations."""
    with pytest.raises(InputError, match=r"--cache_requests: .*not by seed"):
        evaluation.run("icl", checkpoint("gpt2"), ["one_token"], 2, cache_requests=True)


TEMPLATES = [
    "Review: {{text}}\nSentiment:",
    # A line break at the end stays.
    "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nAnswer:\n",
    "{{['A', 'B'][label]}}",
    "{% set n = namespace(i=0) %}"
    "{% for c in choices %}{% set n.i = n.i + label %}{{c}}{{n.i}} {% endfor %}",
    "{{text | regex_replace('[aeiou]', '_')}}",
]


def test_templates_are_compiled_once_and_rendered_as_before(monkeypatch):
    """In runs of our models."""
    documents = []
    for i in range(4):
        documents.append(
            {"text": f" été {i}", "question": f"{i}? ", "choices": [i, "x"], "label": i % 2}
        )
    compiled = []
    compile_template = Environment.compile

    def counted(environment, source, *args):
        compiled.append(source)
        return compile_template(environment, source, *args)

    def rendered():
        pairs = itertools.product(documents, TEMPLATES)
        return [utils.apply_template(template, doc) for doc, template in pairs]

    monkeypatch.setattr(Environment, "compile", counted)
    # Which the tests replace by one that compiles once (`once.py`).
    monkeypatch.delattr(utils.env, "from_string")
    patches.install()
    _compiled.cache_clear()
    expected = rendered()
    assert compiled == TEMPLATES * 4
    with recording():
        assert rendered() == expected
    assert compiled == TEMPLATES * 5
