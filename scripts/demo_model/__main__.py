"""Make the demonstration checkpoint and the demonstration tasks that ship with the package.

The checkpoint is a decoder that is small enough to ship. It has learned one thing: to find out from demonstrations
which label goes with which kind of text, under the layout of every method. It is trained here, from nothing, on
text that this script makes up: episodes of classification whose label words are drawn anew each time, so that only
the demonstrations tell what a label means. See docs/reports/demo-model.md.

    python -m scripts.demo_model               # data, tokenizer and model: half an hour on one CPU core
    python -m scripts.demo_model --data-only   # only the tasks' documents: a second

The same seed gives the same documents everywhere, and the same weights on the same machine and torch.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_eval_icl.inference.attention import additive
from lm_eval_icl.methods import make
from lm_eval_icl.methods.base import Method

ROOT = Path(__file__).resolve().parents[2]

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
# These are never topics in training, where their words occur only in groups that are put together at random.
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
# These words are kept out of the tokenizer's merges, so that each is several tokens.
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
OPENERS = "|||the|a|we saw the|this is about the|they spoke of a|here is the|all about the".split(
    "|"
)
DELIMITER = "\n\n"  # follows each label
LINKS = "and|with|and the|near a|then|after the|or|by the|beside a|for the|of the|but".split("|")
# The words that do not depend on the topic.
FRAME = " ".join(OPENERS + LINKS).split()


class Length(NamedTuple):
    """How long a text is: how many topic words, and how often words that say nothing stand between two of them."""

    shortest: int
    longest: int
    links: float


WORD = Length(1, 1, 0.0)
WORDS = Length(1, 3, 0.0)
SHORT = Length(2, 4, 0.3)
MEDIUM = Length(4, 6, 0.5)
LONG = Length(8, 10, 0.9)


def make_text(rng: random.Random, words: Sequence[str], length: Length) -> str:
    """A text about a topic: some of its words, in any order, among words that say nothing."""
    count = rng.randint(min(length.shortest, len(words)), min(length.longest, len(words)))
    parts: list[str] = []
    for word in rng.sample(words, count):
        if rng.random() < length.links:
            parts.append(rng.choice(LINKS if parts else OPENERS))
        parts.append(word)
    return " ".join(filter(None, parts))


# ---------------------------------------------------------------------------------------------------------------
# The demonstration tasks.


class DemoTask(NamedTuple):
    """A task: its template, topic -> label, and the length of its texts."""

    name: str
    template: tuple[str, str]
    labels: dict[str, str]
    length: Length


# No topic of a task is seen in training with any label word of that task (`allowed`).
FOUR_LABELS = {"football": "cobalt", "money": "otter", "computer": "wolf", "music": "panda"}
# Labels of several tokens.
LABELS_OF_PIECES = {"hospital": "zephyr", "trains": "lavender", "castle": "gazebo"}
TASKS = (
    DemoTask(
        "icl_demo_short", ("Review", "Sentiment"), {"weather": "amber", "kitchen": "square"}, SHORT
    ),
    DemoTask("icl_demo_long", ("Text", "Topic"), {"court": "crimson", "farm": "north"}, LONG),
    DemoTask("icl_demo_four", ("Article", "Category"), FOUR_LABELS, MEDIUM),
    DemoTask("icl_demo_pieces", ("Question", "Type"), LABELS_OF_PIECES, MEDIUM),
    DemoTask(
        "icl_demo_unseen", ("Message", "Label"), {"space": "violet", "forest": "circle"}, SHORT
    ),
)


def make_documents(task: DemoTask, seed: int) -> dict[str, list[dict[str, Any]]]:
    """A task's documents: about 200 for the test, and as many for demonstrations. No text is there twice."""
    rng = random.Random(f"{seed} {task.name}")
    seen: set[str] = set()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "test"):
        rows: list[dict[str, Any]] = []
        for label, topic in enumerate(task.labels):
            while sum(row["label"] == label for row in rows) < 200 // len(task.labels):
                text = make_text(rng, (TOPICS | UNSEEN_TOPICS)[topic], task.length)
                if text not in seen:
                    seen.add(text)
                    rows.append({"text": text, "label": label})
        rng.shuffle(rows)
        splits[split] = rows
    return splits


def write_documents(folder: Path, seed: int) -> None:
    """Write `folder`/<task>/{train,test}.jsonl for every task."""
    for task in TASKS:
        (folder / task.name).mkdir(parents=True, exist_ok=True)
        for split, rows in make_documents(task, seed).items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / task.name / f"{split}.jsonl").write_text(
                lines, encoding="utf-8", newline="\n"
            )


# ---------------------------------------------------------------------------------------------------------------
# Training episodes.


class Shape(NamedTuple):
    """What the episodes of one batch have in common."""

    labels: int  # the number of labels
    examples: int  # the number of demonstrations and queries together
    length: Length  # the length of every text
    # The share of episodes whose topics are random groups of words, and how many words such a group has.
    random_groups: float
    group_sizes: tuple[int, int]
    one_token_labels: float = 0.7  # the share of episodes with only such labels


class Episodes:
    """Draws training episodes, without texts in `withheld`, and without pairs of topic and label of the tasks."""

    def __init__(self, seed: int, withheld: set[str]) -> None:
        self.rng = random.Random(seed)
        self.withheld = withheld

    def draw(self, shape: Shape) -> list[tuple[str, str]]:
        """Examples of one task, each as the text before the label, and the label."""
        rng = self.rng
        topics: list[str] = []
        if rng.random() < shape.random_groups:
            # New topics: only words that occur again tell them apart.
            size = rng.randint(*shape.group_sizes)
            pool = list(chain(LOOSE_WORDS, *UNSEEN_TOPICS.values()))
            words = rng.sample(pool, size * shape.labels)
            groups = [words[i :: shape.labels] for i in range(shape.labels)]
        else:
            topics = rng.sample(list(TOPICS), shape.labels)
            groups = [TOPICS[topic] for topic in topics]
        labels = self.draw_labels(shape)
        while not all(allowed(topic, label) for topic in topics for label in labels):
            labels = self.draw_labels(shape)
        texts = []
        for _ in range(shape.examples):
            kind = rng.randrange(shape.labels)
            while (text := make_text(rng, groups[kind], shape.length)) in self.withheld:
                pass
            texts.append((text, labels[kind]))
        before, after = rng.choice(TEMPLATES)
        return [(f"{before}: {text}\n{after}:", f" {label}") for text, label in texts]

    def draw_labels(self, shape: Shape) -> list[str]:
        if self.rng.random() < shape.one_token_labels:
            return self.sample_labels(LABELS, shape.labels)
        if self.rng.random() < 0.7:
            return self.sample_labels(RARE_LABELS, shape.labels)
        words = self.sample_labels(LABELS, 2 * shape.labels)
        return [f"{first} {second}" for first, second in zip(words[::2], words[1::2], strict=True)]

    def sample_labels(self, words: Sequence[str], count: int) -> list[str]:
        """Draw `count` of the words in random order, the first words of the list more often. Then the model prefers the
        more frequent label of a task, whatever the text, so that its accuracy without demonstrations is chance."""
        keys = {word: self.rng.random() ** (1 + 2 * i / len(words)) for i, word in enumerate(words)}
        drawn = sorted(words, key=keys.__getitem__)[-count:]
        self.rng.shuffle(drawn)
        return drawn


def allowed(topic: str, label: str) -> bool:
    """Whether training may pair a topic and a label: not if a task has both, as a pair or not. (If only the right pairs
    were withheld, training would teach that they never go together.)"""
    return not any(
        topic in task.labels and set(label.split()) & set(task.labels.values()) for task in TASKS
    )


def draw_shape(rng: random.Random, progress: float) -> Shape:
    """The shape of a batch, in which `examples` is the number of demonstrations. At first, texts have one word, and a
    label has one word. Then a label has a few words or a topic. At last, there are all lengths and topics. Each stage
    prepares the model for the next one."""
    if progress < WORDS_ALONE:
        return Shape(rng.randint(2, 6), rng.choice((6, 8, 12)), WORD, 1.0, (1, 1), 1.0)
    if progress < 0.25:
        labels = rng.randint(2, 4)
        examples = rng.choice((6, 8, 12))
        return Shape(labels, examples, rng.choice((WORD, WORDS, SHORT)), 0.4, (1, 4), 0.8)
    labels = rng.choice((2, 2, 3, 4, 5))
    examples = rng.choice((4, 6, 8, 8, 10, 12))
    length = rng.choices((SHORT, MEDIUM, LONG), (5, 3, 1))[0]
    return Shape(labels, examples, length, 0.4, (3, 8))


# ---------------------------------------------------------------------------------------------------------------
# Tokenizer.


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE (GPT-2's kind), which encodes any text. Our words are one token each, except for rare labels."""
    words = chain(*TOPICS.values(), *UNSEEN_TOPICS.values(), LOOSE_WORDS, LABELS, FRAME)
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


# The ids of what precedes a label, and of the label.
Example = tuple[list[int], list[int]]


def encode(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[tuple[str, str]]
) -> list[Example]:
    """Token ids of examples. Their parts end where words end, so that joined they are the ids of the whole text."""
    encodings = tokenizer.backend_tokenizer.encode_batch(list(chain(*examples)))
    ids = [encoding.ids for encoding in encodings]
    return list(zip(ids[::2], ids[1::2], strict=True))


# ---------------------------------------------------------------------------------------------------------------
# Rows: demonstrations as a method lays them out, and queries.


class Row(NamedTuple):
    """The n tokens of a row, and what the model needs to read them."""

    ids: Tensor  # [n]
    positions: Tensor  # [n]
    mask: Tensor  # [n, n] bool: whether the row's token attends to the column's
    weights: Tensor  # [n]: the weight of each token in the loss, as the token to predict


# The weight in the loss of a label that the model has not seen in the row. Other labels have the weight 1.
NEW_LABEL_WEIGHT = 0.1


def make_row(
    method: Method,
    demonstrations: Sequence[Example],
    queries: Sequence[Example],
    delimiter: list[int],
    text_weight: float = 0.0,
) -> Row:
    """Demonstrations in the layout of a method, followed by queries with their answers, which do not see each other.

    If demonstrations see the query, there must be one query. The labels of demonstrations count in the loss if the
    method hides a label from the text before it, but lets this text see other demonstrations.
    """
    parts = [[*text, *label, *delimiter] for text, label in demonstrations]
    lengths = list(map(len, parts))
    together = method.memory_depends_on_query
    if together:
        ((text, label),) = queries
        parts.append([*text, *label])
        layout = method.lay_out(0, lengths, len(text), len(label))
        queries = ()
    else:
        layout = method.lay_out(0, lengths)
    prompt = list(chain(*parts))
    ids = [prompt[i] for i in layout.source]
    positions = layout.positions.tolist()
    n = len(layout)
    total = n + sum(len(text) + len(label) for text, label in queries)
    mask = torch.zeros(total, total, dtype=torch.bool)
    mask[:n, :n] = layout.mask
    weights = torch.zeros(total)

    def weigh(end: int, example: Example, seen: Sequence[list[int]]) -> None:
        """Set the weights of an example whose label ends at index `end`."""
        text, label = example
        start = end - len(label)
        weights[start:end] = 1.0 if label in seen else NEW_LABEL_WEIGHT
        weights[start - len(text) + 1 : start] = text_weight

    labels = [label for _, label in demonstrations]
    if method.name in ("icl", "nope", "invicl"):
        end = n - sum(lengths)  # queries see the last copies
        for i, length in enumerate(lengths):
            end += length
            others = labels[:i] + (labels[i + 1 :] if method.name == "invicl" else [])
            weigh(end - len(delimiter), demonstrations[i], others)
    if together:
        weigh(n, (text, label), labels)
    for text, label in queries:
        start = len(ids)
        ids += [*text, *label]
        end = len(ids)
        positions += [layout.end + layout.step * i for i in range(end - start)]
        mask[start:end, layout.kept_tokens] = True
        mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        weigh(end, (text, label), labels)
    return Row(torch.tensor(ids), torch.tensor(positions), mask, weights)


def losses_of(model: LlamaForCausalLM, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The loss and the weight of each token that counts."""
    ids = pad_sequence([row.ids for row in rows], batch_first=True)
    positions = pad_sequence([row.positions for row in rows], batch_first=True)
    weights = pad_sequence([row.weights for row in rows], batch_first=True)[:, 1:]
    # Padding sees itself: a softmax over nothing is NaN.
    mask = torch.eye(ids.shape[1], dtype=torch.bool).repeat(len(rows), 1, 1)
    for sees, row in zip(mask, rows, strict=True):
        sees[: len(row.ids), : len(row.ids)] = row.mask
    output = model.model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=additive(mask, torch.float32)[:, None],
        use_cache=False,
    )
    counts = weights > 0  # only tokens that count are projected to the vocabulary
    logits = model.lm_head(output.last_hidden_state[:, :-1][counts])
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counts], reduction="none")
    return losses, weights[counts]


# ---------------------------------------------------------------------------------------------------------------
# Training.

# Method -> how often batches have its layout: while texts have one word, and after that. (With one word in every text,
# prefixicl cannot tell to which demonstration a label belongs: docs/reports/demo-model.md.)
METHODS = {
    "icl": (3, 1.5),
    "pcw": (1, 1),
    "saicl": (1, 1.5),
    "invicl": (3, 2),
    "prefixicl": (0, 3),
    "nope": (4, 2.5),
}
WORDS_ALONE = 0.1  # the share of the training in which texts have one word
# How many queries a row has: one if demonstrations see the query, few if the labels of demonstrations count in the
# loss, and otherwise 6.
QUERIES = {"saicl": 1, "icl": 2, "nope": 2}
TOKENS_PER_BATCH = 4000
LEARNING_RATE = 1.5e-3
TEXT_WEIGHT = 0.1
TEXT_EVERY = 8  # in one of so many rows, texts count in the loss; this saves time in the vocabulary projection


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of five layers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.04,
    )
    model = LlamaForCausalLM(config)
    # The tokens around topic words and labels, which do not depend on the topic.
    frame = [f"{before}:\n{after}:\n\n" for before, after in TEMPLATES]
    frame += [f" {word}" for word in FRAME]
    (line_break,) = set(tokenizer(DELIMITER).input_ids)
    prime(model, sorted(set(chain(*tokenizer(frame).input_ids))), line_break)
    return model


@torch.no_grad()
def prime(model: LlamaForCausalLM, frame: Sequence[int], line_break: int) -> None:
    """Initialize attention so that it gathers the words of a demonstration, and looks up similar words
    (docs/reports/demo-model.md says why; after Trockman and Kolter, "Mimetic initialization of self-attention layers",
    ICML 2023).

    A label must gather only the words of its demonstration, which positions alone do not tell from other words. But a
    word of the first demonstration (`icl`, `nope`) or of a first copy (`invicl`) sees no line break, and a word of the
    last demonstration sees most line breaks. The residual stream begins as: token | gathered words | marks, each of one
    dimension. All weights are trained afterwards. The layers begin like this:

    1.  Mark the tokens that see a line break.
    2.  Gather words a few tokens back, marked words first. Count: write the share of line breaks among them and the
        tokens that see no line break, whose number is the same for all demonstrations.
    3.  Gather words with a large count, which are those of the last demonstration that a token sees. Look up.
    4, 5.  Look up.
    """
    config = model.config
    width = config.hidden_size
    heads = config.num_attention_heads
    size = width // heads
    half = width // 2
    *_, count, breaks, sees_break, is_frame, is_word = range(width)
    always = torch.tensor([is_frame, is_word])  # every token has one of these marks
    gathered = torch.arange(half - 5)

    def slow(head: int, pairs: int) -> Tensor:
        """The dimensions of a head's slowest rotary pairs, which change little with distance."""
        last = torch.arange(size // 2 - pairs, size // 2)
        return head * size + torch.cat([last, last + size // 2])

    embedding = model.get_parameter("model.embed_tokens.weight")
    embedding.zero_()
    embedding[:, :half].normal_(0, 0.125)
    embedding[:, is_word] = 1.0
    embedding[frame, :half] *= 0.02
    embedding[frame, is_word] = 0.1
    embedding[frame, is_frame] = 1.4
    embedding[line_break, [is_frame, breaks]] = 1.0

    for number in range(config.num_hidden_layers):
        query, key, value, output = torch.zeros(4, width, width)
        # Two heads carry each dimension of a token.
        value[torch.arange(width), torch.arange(width) % half] = 1.0
        if number == 0:
            query[slow(0, 1)[:, None], always] = 0.5
            key[slow(0, 1), breaks] = 0.5
            value.zero_()
            value[0, breaks] = 1.0
            output[sees_break, 0] = 0.15
        elif number == 1:
            # Attention goes to words, most of all to words five tokens back: in a rotary pair that turns by the angle a
            # for each token, the query is at 0 and the key at 5 a. Four fast pairs in a head make a window of tokens.
            for head in range(3):
                pairs = torch.arange(1, 5) + head // 2
                angles = 5 * 10000.0 ** (-pairs / (size // 2))
                rows = head * size + pairs
                query[rows[:, None], always] = 0.35
                key[rows, is_word] = 0.35 * angles.cos()
                key[rows + size // 2, is_word] = 0.35 * angles.sin()
                query[slow(head, 1)[:, None], always] = 0.5
                key[slow(head, 1), sees_break] = 0.5
            query[slow(3, 2)[:, None], always] = 0.5
            key[slow(3, 2), breaks] = 0.45
            key[slow(3, 2), sees_break] = -0.45
            value[3 * size :] = 0.0
            value[3 * size, breaks] = 1.0
            output[half + gathered] = 0.5 * value.T[gathered]
            output[half + gathered[size:]] *= 2  # only one head carries these
            output[count, 3 * size] = 0.15
        else:
            alike = torch.arange(width).view(heads, 2, -1)[:, :, size // 4 :].flatten()[gathered]
            query[alike, half + gathered] = key[alike, half + gathered] = 1.0
            output[:half] = 0.5 * value.T[:half]
            if number == 2:
                query[: 2 * size] = key[: 2 * size] = output[:, : 2 * size] = 0.0
                for head in range(2):
                    query[slow(head, 8)[:, None], always] = 0.8
                    key[slow(head, 8), count] = 0.8
                    key[slow(head, 8), is_word] = 0.08
                output[half + gathered, gathered] = 1.0
        for name, start in {"q": query, "k": key, "v": value, "o": output}.items():
            weight = model.get_parameter(f"model.layers.{number}.self_attn.{name}_proj.weight")
            weight.normal_(0, 0.02).add_(start)
        model.get_parameter(f"model.layers.{number}.mlp.down_proj.weight").mul_(0.2)
    model.get_parameter("model.norm.weight").fill_(0.4)


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, withheld: set[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Yield `steps` batches, each as a method's name, and rows of one shape in the layout of the method."""
    rng = random.Random(f"shapes {seed}")
    episodes = Episodes(seed, withheld)
    delimiter = tokenizer(DELIMITER).input_ids
    for step in range(steps):
        progress = step / steps
        shares = [share[progress >= WORDS_ALONE] for share in METHODS.values()]
        name = rng.choices(list(METHODS), shares)[0]
        shape = draw_shape(rng, progress)
        drawn = shape._replace(examples=shape.examples + QUERIES.get(name, 6))
        rows: list[Row] = []
        while sum(len(row.ids) for row in rows) < TOKENS_PER_BATCH:
            examples = encode(tokenizer, episodes.draw(drawn))
            demonstrations = examples[: shape.examples]
            queries = examples[shape.examples :]
            text_weight = 0.0 if len(rows) % TEXT_EVERY else TEXT_WEIGHT
            rows.append(make_row(make(name), demonstrations, queries, delimiter, text_weight))
        yield name, rows


def train(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> LlamaForCausalLM:
    """Train a model on `steps` batches. Prints the mean loss of labels in the last 50 batches of each method."""
    torch.manual_seed(seed)
    withheld: set[str] = set()
    for task in TASKS:
        for rows in make_documents(task, seed).values():
            withheld.update(row["text"] for row in rows)
    model = make_model(tokenizer)
    print(
        f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens in the vocabulary, {steps:,} steps"
    )
    recent = {name: deque[float](maxlen=50) for name in METHODS}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 200, 1.0, max(0.02, 2 * (1 - step / steps)))
    )
    batches = draw_batches(tokenizer, seed, steps, withheld)
    for step, (name, batch) in enumerate(tqdm(batches, total=steps, mininterval=5), 1):
        losses, weights = losses_of(model, batch)
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent[name].append(losses[weights == 1.0].mean().item())
        if step % 300 == 0 or step in (1, steps):
            means = (f"{name} {mean(values):.3f}" for name, values in recent.items() if values)
            tqdm.write(f"step {step:,}: loss of labels under {', '.join(means)}")
    trained = {"methods": list(METHODS), "shots": [4, 12], "steps": steps, "loss": "all"}
    model.config.lm_eval_icl = {"trained": trained}
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="the folder of lm_eval_icl/ and task_configs/"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--data-only", action="store_true", help="write only the tasks' documents")
    args = parser.parse_args()

    write_documents(args.out / "task_configs/demo", args.seed)
    if args.data_only:
        return
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = train(tokenizer, args.seed, args.steps)
    folder = args.out / "lm_eval_icl/demo_model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
