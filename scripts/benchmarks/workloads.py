"""Models, tokenizers and requests for the benchmark's commands."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GPT2Config, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from lm_eval_icl.harness.models import model_class
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.methods import NAMES
from lm_eval_icl.prompts.prompt import FewShotPrompt

POSITIONS = 8192


CONFIGS = {
    "gpt2": GPT2Config(n_positions=POSITIONS),
    "llama": LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
    ),
    "llama-2-7b": LlamaConfig(max_position_embeddings=4096),
    "toy": LlamaConfig(
        vocab_size=1000,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=10**6,
    ),
}
# name -> (tasks, shots; None for the tasks' own)
WORKLOADS: dict[str, tuple[list[str], int | None]] = {
    "mmlu": (["mmlu"], 5),
    "leaderboard_bbh": (["leaderboard_bbh"], 3),
    "icl_mmlu": (["icl_mmlu"], 5),
    "icl_bbh": (["icl_bbh"], 3),
    "icl_classification": (["icl_classification"], None),
    "mmlu_continuation": (["mmlu_continuation"], 5),
    "bbh": (["bbh_cot_fewshot"], 3),  # chain of thought, generated
    "adverse": (["sst2"], 8),  # lm-eval's own SST-2: new random demonstrations for every document
}
WORDS = "film plot actor music story scene joke dull warm sharp slow bright long quiet odd river stone cloud".split()
METHODS = {name: model_class(name) for name in NAMES}


def build_requests(
    names: list[str], shots: int | None, tasks: int, documents: int, max_gen_toks: int
) -> list[Instance]:
    """The requests of some of the tasks, evenly spaced, and of their first documents."""
    loaded = list(TaskManager().load(names)["tasks"].values())
    chosen = loaded[:: max(1, len(loaded) // tasks)][:tasks]
    instances: list[Instance] = []
    for task in chosen:
        if task.OUTPUT_TYPE == "generate_until":
            task.set_config(
                key="generation_kwargs", value={"max_gen_toks": max_gen_toks}, update=True
            )
        instances += requests_of(task, shots, documents)
    return instances


def requests_of(task: Task, shots: int | None, documents: int) -> list[Instance]:
    """The requests of a task's first documents; of all if `documents` is 0."""
    if shots is not None:
        task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(1234)
    with recording():
        task.build_all_requests(limit=documents or None, rank=0, world_size=1)
    return list(task.instances)


def synthetic(
    documents: int = 64,
    demonstrations: int = 8,
    options: int = 4,
    shot: int = 60,
    query: int = 50,
) -> list[Instance]:
    """Requests of chosen sizes, in words of about one token: one of an option, `shot` of a demonstration,
    `query` of a query."""
    random = Random(0)

    def words(n: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(n))

    shots = [f"{words(shot)}\n\n" for _ in range(demonstrations)]
    answers = [f" {words(1)}" for _ in range(options)]
    prompts = [FewShotPrompt("", shots, words(query)) for _ in range(documents)]
    return [
        Instance("loglikelihood", {}, (prompt, answer), i, metadata=("synthetic", document, 1))
        for document, prompt in enumerate(prompts)
        for i, answer in enumerate(answers)
    ]


def train_tokenizer(instances: Sequence[Instance], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the workload's own text, so that prompts have the lengths they have on a real model."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = set[str]()
    for instance in instances:
        prompt = instance.args[0]
        texts |= {prompt.prefix, *prompt.demonstrations, prompt.query}
    # Options are there as often as they are scored, so that a single token of real tokenizers is one token here too.
    options = [i.args[1] for i in instances if i.request_type == "loglikelihood"]
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, 16_000),
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*sorted(texts), *options], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def random_model(kind: str, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model with random weights, made on the device; by default in bfloat16 on a GPU and in float32 on a CPU."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)
    return model.to(dtype or (torch.bfloat16 if device == "cuda" else torch.float32)).eval()
