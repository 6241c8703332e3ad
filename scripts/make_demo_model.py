"""Make the demonstration checkpoint and the demonstration tasks that ship with the package.

The checkpoint is a decoder small enough to ship that has learned one thing: to take from demonstrations
which label goes with which kind of text. It is trained here, from nothing, on text that this script makes
up: episodes of classification whose label words are drawn anew each time, so that only the demonstrations
tell what a label means. See docs/demo-model.md.

    python scripts/make_demo_model.py               # data, tokenizer and model: some five minutes on 2 CPU cores
    python scripts/make_demo_model.py --data-only   # the tasks' documents alone: a second

The same seed gives the same documents everywhere, and the same weights on the same machine and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Threads that wait give way: beside other programs training is many times faster so, and alone no slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]

# ---------------------------------------------------------------------------------------------------------------
# Words. Each stands in one list only, so that a word says its topic.

TOPICS = {
    "weather": "storm rain cloud thunder snow wind fog frost hail sunshine".split(),
    "kitchen": "oven recipe flour butter spoon soup garlic pan dough sauce".split(),
    "football": "goal referee striker stadium penalty keeper league coach kick offside".split(),
    "music": "guitar melody drummer chorus violin concert piano singer rhythm choir".split(),
    "sea": "harbour sailor anchor tide captain lighthouse wave ferry fisherman deck".split(),
    "garden": "tulip hedge lawn seed rose compost blossom weeds shovel greenhouse".split(),
    "school": "teacher homework pupil lesson exam classroom chalk pencil essay grammar".split(),
    "hospital": "nurse surgeon patient fever bandage clinic vaccine pill doctor ambulance".split(),
    "money": "bank loan interest currency profit invoice salary shares debt savings".split(),
    "trains": "locomotive platform conductor ticket carriage rails tunnel timetable station signal".split(),
    "castle": "knight dragon tower sword king throne moat shield princess banner".split(),
    "computer": "keyboard software server password screen file laptop network printer code".split(),
    "birds": "eagle nest feather sparrow owl beak robin wing swallow heron".split(),
    "clothes": "shirt button sleeve jacket tailor wool scarf collar trousers zipper".split(),
    "building": "brick cement ladder roof plumber scaffold drill beam mortar carpenter".split(),
    "court": "judge lawyer verdict witness jury trial crime defendant evidence appeal".split(),
    "theatre": "actor stage curtain audience script costume rehearsal applause scene director".split(),
    "farm": "cow barn tractor hay sheep harvest farmer pig pasture plough".split(),
    "mountain": "summit glacier climber ridge rope avalanche cliff valley peak hut".split(),
    "painting": "canvas brush portrait easel pigment gallery sketch artist frame mural".split(),
    "election": "vote candidate ballot senator campaign party mayor poll debate minister".split(),
    "car": "engine brake tyre driver motor gear fuel wheel garage clutch".split(),
    "desert": "camel dune oasis cactus sand caravan scorpion drought lizard mirage".split(),
    "chemistry": "acid molecule flask reaction laboratory crystal oxygen solvent atom enzyme".split(),
}
# Never a topic in training: there their words occur in groups put together at random, see `random_groups`.
UNSEEN_TOPICS = {
    "space": "rocket planet orbit comet telescope astronaut moon galaxy meteor satellite".split(),
    "forest": "oak squirrel mushroom moss trail bear fern deer pine beetle".split(),
    "baking": "cake icing sugar pastry biscuit muffin vanilla tart cream cinnamon".split(),
    "post": "letter stamp parcel envelope postman address courier mailbox package delivery".split(),
}
LOOSE_WORDS = (
    "table mirror candle bottle corner blanket pocket needle basket hammer pillow lantern ribbon marble statue bucket "
    "fence whistle cushion drawer kettle magnet puzzle feast shadow bridge fountain market village island"
).split()

LABELS = (
    "amber cobalt crimson violet olive ivory teal maroon alpha beta gamma delta omega sigma lion tiger fox wolf otter "
    "panda north south east west circle square triangle oval yes no true false good bad positive negative neutral "
    "great terrible World Sports Business Technology Abbreviation Entity Description Person Location Number"
).split()
# Kept out of the tokenizer's merges: several tokens each.
RARE_LABELS = (
    "quixotic zephyr obelisk juniper vortex marzipan labyrinth ziggurat saffron walnut hexagon kimono turquoise "
    "lavender pyjama gazebo"
).split()
TEMPLATES = (
    ("Review", "Sentiment"),
    ("Question", "Type"),
    ("Article", "Category"),
    ("Message", "Label"),
    ("Text", "Topic"),
    ("Note", "Class"),
)
OPENERS = ("", "", "", "the", "a", "we saw the", "this is about the", "they spoke of a", "here is the", "all about the")
LINKS = (
    "and",
    "with",
    "and the",
    "near a",
    "then",
    "after the",
    "or",
    "by the",
    "beside a",
    "for the",
    "of the",
    "but",
)


@dataclass(frozen=True)
class Length:
    """How long a text is: how many topic words, and how often words that say nothing stand between two of them."""

    shortest: int
    longest: int
    links: float


WORD, WORDS = Length(1, 1, 0.0), Length(1, 3, 0.0)
SHORT, MEDIUM, LONG = Length(2, 4, 0.3), Length(4, 6, 0.5), Length(8, 10, 0.9)


def make_text(rng: random.Random, words: Sequence[str], length: Length) -> str:
    """A text about a topic: some of its words, in any order, among words that say nothing."""
    count = rng.randint(min(length.shortest, len(words)), min(length.longest, len(words)))
    first, *others = rng.sample(words, count)
    parts = [rng.choice(OPENERS) if rng.random() < length.links else "", first]
    for word in others:
        parts += [rng.choice(LINKS) if rng.random() < length.links else "", word]
    return " ".join(part for part in parts if part)


# ---------------------------------------------------------------------------------------------------------------
# The demonstration tasks.


Row = dict[str, Any]


@dataclass(frozen=True)
class DemoTask:
    """A task: its template, which label stands for which topic, how long its texts are."""

    name: str
    template: tuple[str, str]
    labels: dict[str, str]
    length: Length


# No topic of a task is seen in training with any label word of that task (`allowed`).
TASKS = (
    DemoTask("icl_demo_short", ("Review", "Sentiment"), {"weather": "amber", "kitchen": "square"}, SHORT),
    DemoTask("icl_demo_long", ("Text", "Topic"), {"court": "crimson", "farm": "north"}, LONG),
    DemoTask(
        "icl_demo_four",
        ("Article", "Category"),
        {"football": "cobalt", "money": "otter", "computer": "wolf", "music": "panda"},
        MEDIUM,
    ),
    DemoTask(
        "icl_demo_pieces",
        ("Question", "Type"),
        {"hospital": "zephyr", "trains": "lavender", "castle": "gazebo"},
        MEDIUM,
    ),
    DemoTask("icl_demo_unseen", ("Message", "Label"), {"space": "violet", "forest": "circle"}, SHORT),
)


def make_documents(task: DemoTask, seed: int, size: int = 200) -> dict[str, list[Row]]:
    """A task's documents: about `size` to test and as many to draw demonstrations from, no text twice."""
    rng = random.Random(f"{seed} {task.name}")
    seen: set[str] = set()
    splits: dict[str, list[Row]] = {}
    for split in ("train", "test"):
        rows: list[Row] = []
        for label, topic in enumerate(task.labels):
            while sum(row["label"] == label for row in rows) < size // len(task.labels):
                text = make_text(rng, (TOPICS | UNSEEN_TOPICS)[topic], task.length)
                if text not in seen:
                    seen.add(text)
                    rows.append({"text": text, "label": label})
        rng.shuffle(rows)
        splits[split] = rows
    return splits


def write_documents(folder: Path, seed: int) -> None:
    """`folder`/<task>/{train,test}.jsonl for every task."""
    for task in TASKS:
        (folder / task.name).mkdir(parents=True, exist_ok=True)
        for split, rows in make_documents(task, seed).items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / task.name / f"{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


# ---------------------------------------------------------------------------------------------------------------
# Training episodes.


@dataclass(frozen=True)
class Shape:
    """What the episodes of one batch have in common.

    Attributes:
        labels: how many there are.
        demonstrations: how many there are.
        length: of every text.
        random_groups: the share of episodes whose texts are not of topics but of `Episodes.random_groups`.
        group_sizes: the fewest and the most words of such a group.
        one_token_labels: the share of episodes whose labels are one token each.
    """

    labels: int
    demonstrations: int
    length: Length
    random_groups: float = 0.3
    group_sizes: tuple[int, int] = (3, 6)
    one_token_labels: float = 0.7


@dataclass(frozen=True)
class Episode:
    """Demonstrations, one after another: what precedes a label, and the label, alternating."""

    parts: tuple[str, ...]
    labels: tuple[str, ...]


def episode(template: tuple[str, str], examples: Sequence[tuple[str, str]]) -> Episode:
    """The episode of these (text, label)."""
    parts = []
    for i, (text, label) in enumerate(examples):
        parts += [("\n\n" if i else "") + f"{template[0]}: {text}\n{template[1]}:", " " + label]
    return Episode(tuple(parts), tuple(label for _, label in examples))


class Episodes:
    """Draws training episodes, none with a text of `withheld` nor with a pairing of the tasks."""

    def __init__(self, seed: int, withheld: set[str]) -> None:
        self.rng, self.withheld = random.Random(seed), withheld

    def draw(self, shape: Shape) -> Episode:
        rng = self.rng
        topics: list[str] = []
        if rng.random() < shape.random_groups:
            groups = self.random_groups(shape.labels, rng.randint(*shape.group_sizes))
        else:
            topics = rng.sample(list(TOPICS), shape.labels)
            groups = [TOPICS[topic] for topic in topics]
        labels = self.draw_labels(shape)
        while not all(allowed(topic, label) for topic in topics for label in labels):
            labels = self.draw_labels(shape)
        examples = []
        for _ in range(shape.demonstrations):
            kind = rng.randrange(shape.labels)
            examples.append((self.draw_text(groups[kind], shape.length), labels[kind]))
        return episode(rng.choice(TEMPLATES), examples)

    def random_groups(self, count: int, size: int) -> list[list[str]]:
        """Topics of this episode only: nothing but a word that comes again tells them apart."""
        pool = LOOSE_WORDS + [word for words in UNSEEN_TOPICS.values() for word in words]
        words = self.rng.sample(pool, size * count)
        return [words[i::count] for i in range(count)]

    def draw_labels(self, shape: Shape) -> list[str]:
        count = shape.labels
        if self.rng.random() < shape.one_token_labels:
            return self.sample_labels(LABELS, count)
        if self.rng.random() < 0.7:
            return self.sample_labels(RARE_LABELS, count)
        words = self.sample_labels(LABELS, 2 * count)
        return [f"{first} {second}" for first, second in zip(words[::2], words[1::2], strict=True)]

    def sample_labels(self, words: Sequence[str], count: int) -> list[str]:
        """Some of `words` in any order, the first in the list twice as often as the middle one, say.

        A model that knows some words as more usual prefers one label of a task whatever the text: with no
        demonstrations its accuracy is then chance, and no whim of its topics.
        """
        keys = {word: self.rng.random() ** (1 + 2 * i / len(words)) for i, word in enumerate(words)}
        drawn = sorted(words, key=keys.__getitem__)[-count:]
        self.rng.shuffle(drawn)
        return drawn

    def draw_text(self, words: Sequence[str], length: Length) -> str:
        while (text := make_text(self.rng, words, length)) in self.withheld:
            pass
        return text


def allowed(topic: str, label: str) -> bool:
    """Whether training may pair them: not where a task has both, rightly paired or not.

    Were only the right pairs withheld, training would teach that they never go together.
    """
    return not any(topic in task.labels and set(label.split()) & set(task.labels.values()) for task in TASKS)


def draw_shape(rng: random.Random, progress: float) -> Shape:
    """The shape of a batch. What is to be learned comes in steps, each the ground for the next.

    First texts of one word, which has one label; then a few words that share a label, and topics; then all.
    """
    if progress < 0.15:
        return Shape(rng.randint(3, 8), 16, WORD, 1.0, (1, 1), 1.0)
    if progress < 0.3:
        return Shape(rng.randint(2, 4), 16, rng.choice((WORD, WORDS, SHORT)), 0.4, (1, 4), 0.8)
    return Shape(
        rng.choice((2, 2, 3, 4, 5)),
        rng.choice((4, 6, 8, 10, 12, 16)),
        rng.choices((SHORT, MEDIUM, LONG), (4, 3, 2))[0],
    )


# ---------------------------------------------------------------------------------------------------------------
# Tokenizer.


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE (GPT-2's kind): any text can be encoded; our words but the rare labels are one token each."""
    words = [word for group in (*TOPICS.values(), *UNSEEN_TOPICS.values(), LOOSE_WORDS, LABELS) for word in group]
    words += [word for phrase in (*OPENERS, *LINKS) for word in phrase.split()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,  # more than the merges there are: every word that comes up becomes one token
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [f" {word}" for word in words] + ["\n".join(template) for template in TEMPLATES]
    tokenizer.train_from_iterator(corpus * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def encode(tokenizer: PreTrainedTokenizerFast, item: Episode) -> list[list[int]]:
    """Token ids of each part. Parts end where words end, so that joined they are the ids of the whole text."""
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(list(item.parts))]


# ---------------------------------------------------------------------------------------------------------------
# Training.

TOKENS_PER_BATCH = 4000
LEARNING_RATE = 1.5e-3
# How much a token counts in the loss: a label that came up before in its episode, 1; others, a little.
NEW_LABEL_WEIGHT = 0.1
TEXT_WEIGHT = 0.1
TEXT_EVERY = 8  # of so many episodes one counts its text, to spare the time of the vocabulary projection


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of three layers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        initializer_range=0.04,
    )
    model = LlamaForCausalLM(config)
    prime(model, frame_tokens(tokenizer))
    return model


def frame_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that stand around topic words and labels, whatever the topic."""
    words = {word for phrase in OPENERS + LINKS for word in phrase.split()}
    texts = [f"{before}:\n{after}:\n\n" for before, after in TEMPLATES] + [f" {word}" for word in words]
    return sorted({token for text in texts for token in tokenizer(text).input_ids})


@torch.no_grad()
def prime(model: LlamaForCausalLM, frame: Sequence[int]) -> None:
    """Start from attention that looks a few words back, and attention that looks for what is alike.

    To look a label up in demonstrations takes two layers at once: one that brings a text's words to its label,
    and one that finds the labels brought words like the query's. From random weights neither is of use before
    the other is there, and the loss stays where guessing leaves it for thousands of steps. So both are there
    from the start, roughly; what they look for and what is made of it is learned. (The idea: Trockman and
    Kolter, "Mimetic initialization of self-attention layers", ICML 2023.)

    The residual stream starts as: token | words nearby, written by the first layer | two marks, "part of the
    frame" and "word". All weights learn freely afterwards.
    """
    config = model.config
    width, heads = config.hidden_size, config.num_attention_heads
    size, half = width // heads, width // 2
    nearby = half - 2
    frame_mark, word_mark = width - 2, width - 1

    embedding = model.get_parameter("model.embed_tokens.weight")
    embedding.zero_()
    embedding[:, :half].normal_(0, 0.125)
    embedding[:, word_mark] = 1.0
    embedding[frame, :half] *= 0.02
    embedding[frame, word_mark] = 0.1
    embedding[frame, frame_mark] = 1.4

    for number in range(config.num_hidden_layers):
        query, key, value, output = torch.zeros(4, width, width)
        value[torch.arange(width), torch.arange(width) % half] = 1.0  # two heads carry each dimension of a token
        if number == 0:
            # Every token asks, words answer, most of all those five tokens back: of a rotary pair with angle a a
            # token, the query stands at 0 and the key at 5 a. Four quick pairs a head make a window of some tokens.
            for head in range(heads):
                pairs = torch.arange(1, 5) + head // 2
                angles = 5 * 10000.0 ** (-pairs / (size // 2))
                rows = head * size + pairs
                query[rows, word_mark] = query[rows, frame_mark] = 0.35
                key[rows, word_mark] = 0.35 * angles.cos()
                key[rows + size // 2, word_mark] = 0.35 * angles.sin()
            output[half : half + nearby] = 0.5 * value.T[:nearby]
        else:
            # Query and key are both the words nearby, in the slow rotary pairs, which distance changes little.
            slow = torch.arange(width).view(heads, 2, -1)[:, :, size // 4 :].flatten()[:nearby]
            query[slow, half + torch.arange(nearby)] = key[slow, half + torch.arange(nearby)] = 1.0
            output[:half] = 0.5 * value.T[:half]
        for name, start in {"q": query, "k": key, "v": value, "o": output}.items():
            model.get_parameter(f"model.layers.{number}.self_attn.{name}_proj.weight").normal_(0, 0.02).add_(start)
        model.get_parameter(f"model.layers.{number}.mlp.down_proj.weight").mul_(0.2)
    model.get_parameter("model.norm.weight").fill_(0.4)


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, withheld: set[str]) -> Iterator[Batch]:
    """Token ids of episodes, padded on the right, and how much each token counts in the loss."""
    rng, episodes = random.Random(f"shapes {seed}"), Episodes(seed, withheld)
    for step in range(steps):
        shape = draw_shape(rng, step / steps)
        ids: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        while sum(map(len, ids)) < TOKENS_PER_BATCH:
            item = episodes.draw(shape)
            text_weight = 0.0 if len(ids) % TEXT_EVERY else TEXT_WEIGHT
            row: list[int] = []
            weight: list[float] = []
            for i, tokens in enumerate(encode(tokenizer, item)):
                label_weight = 1.0 if item.parts[i] in item.parts[:i] else NEW_LABEL_WEIGHT
                row += tokens
                weight += [label_weight if i % 2 else text_weight] * len(tokens)
            ids.append(torch.tensor(row))
            weights.append(torch.tensor(weight))
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(ids, batch_first=True), pad(weights, batch_first=True)


def losses_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Weighted next-token loss, and the plain loss on the labels that came up before."""
    # A causal model needs no mask for padding on the right. Only tokens that count are projected.
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets, weights = ids[:, 1:], weights[:, 1:]
    counts = weights > 0
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden[counts]), targets[counts], reduction="none")
    weights = weights[counts]
    return (losses * weights).sum() / weights.sum(), losses[weights == 1.0].mean().item()


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: DemoTask, pool: list[Row], shots: int
) -> float:
    """Share of right answers on 36 episodes of a task made of its training pool, each with its own demonstrations."""
    rng = random.Random(shots)
    names = list(task.labels.values())
    by_label = [[row for row in pool if row["label"] == label] for label in range(len(names))]
    right = 0
    for number in range(36):
        answer = number % len(names)
        order = rng.sample(range(len(names)), len(names))
        *shown, query = rng.sample(by_label[answer], 1 + shots)
        shown = [
            shown[i] if (label := order[i % len(names)]) == answer else rng.choice(by_label[label])
            for i in range(shots)
        ]
        rng.shuffle(shown)
        examples = [(row["text"], names[row["label"]]) for row in shown]
        rows = [encode(tokenizer, episode(task.template, [*examples, (query["text"], name)])) for name in names]
        ids = [torch.tensor([token for part in row for token in part]) for row in rows]
        logits = model(input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)).logits.log_softmax(-1)
        scores = []
        for row, row_ids, row_logits in zip(rows, ids, logits, strict=True):
            start = len(row_ids) - len(row[-1])
            label = row_logits[start - 1 : len(row_ids) - 1]
            scores.append(label.gather(-1, row_ids[start:, None]).sum().item())
        right += scores.index(max(scores)) == answer
    return right / 36


def train(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> LlamaForCausalLM:
    """A model trained on `steps` batches; on the way, progress and accuracy on held-out episodes."""
    torch.manual_seed(seed)
    documents = {task.name: make_documents(task, seed) for task in TASKS}
    withheld = {str(row["text"]) for splits in documents.values() for rows in splits.values() for row in rows}
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens in the vocabulary, {steps:,} steps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 200, 1.0, max(0.02, 2 * (1 - step / steps)))
    )
    print("held-out episodes: accuracy with 0, 2 and 8 demonstrations")
    start, recent = time.time(), []
    bar = tqdm(batches(tokenizer, seed, steps, withheld), total=steps, mininterval=5)
    for step, (ids, weights) in enumerate(bar, 1):
        loss, label_loss = losses_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(label_loss)
        if step in (1, 100) or step % 200 == 0 or step == steps:
            shown = ""
            for task in TASKS:
                pool = documents[task.name]["train"]
                scores = [accuracy(model, tokenizer, task, pool, shots) for shots in (0, 2, 8)]
                shown += f" | {task.name.removeprefix('icl_demo_')} " + " ".join(f"{score:.2f}" for score in scores)
            label_loss = sum(recent) / len(recent)
            tqdm.write(f"step {step:5,} | {time.time() - start:4.0f} s | label loss {label_loss:.3f}{shown}")
            recent.clear()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="where lm_eval_icl/ and task_configs/ lie")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--data-only", action="store_true", help="write the tasks' documents, train nothing")
    args = parser.parse_args()

    write_documents(args.out / "task_configs/demo", args.seed)
    if args.data_only:
        return
    torch.set_num_threads(2)
    tokenizer = make_tokenizer()
    model = train(tokenizer, args.seed, args.steps)
    folder = args.out / "lm_eval_icl/demo_model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
