"""Estimate how well the demonstration tasks can be answered under prefixicl with symmetric positions.

There every token of every demonstration sees the same tokens at the same positions, so a model knows which words stand
at each position in any demonstration, and not which demonstration has them. The lengths of the demonstrations are what
binds labels to texts: a label follows the last word of its own text.

Two ways to answer with that knowledge are tried on random demonstrations, balanced by label. "topics" knows the words
of each topic and how often a text of a length has a topic word at a position, and takes the most probable of all
assignments of labels to topics. "words" knows no topics: each word of the query that the demonstrations have votes
for a label as often as texts with that label have a topic word where it stands.

    python scripts/prefixicl_ceiling.py [--shots K]
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections import Counter

from make_demo_model import TASKS, TOPICS, UNSEEN_TOPICS, DemoTask, Length, make_documents, make_text

ALL_TOPICS = TOPICS | UNSEEN_TOPICS
TOPIC_OF = {word: topic for topic, words in ALL_TOPICS.items() for word in words}
DRAWS, QUERIES = 300, 20

Shares = dict[tuple[int, int], float]
"""(number of words, position) -> the share of such texts that have a topic word there."""


def topic_word_shares(length: Length) -> Shares:
    rng, texts, words = random.Random(1), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for _ in range(60_000):
        text = make_text(rng, TOPICS[rng.choice(list(TOPICS))], length).split()
        places = [(len(text), position) for position in range(len(text))]
        texts.update(places)
        words.update(place for place, word in zip(places, text, strict=True) if word in TOPIC_OF)
    return {place: words[place] / count for place, count in texts.items()}


def chance_of(count: int, chances: list[float]) -> float:
    """The probability that just `count` of independent events happen."""
    found = [1.0]
    for p in chances:
        found = [a * (1 - p) + b * p for a, b in zip([*found, 0.0], [0.0, *found], strict=True)]
    return found[count] if count < len(found) else 0.0


def by_topics(texts: list[list[str]], labels: list[int], topics: list[str], shares: Shares) -> list[dict[int, float]]:
    """For each topic, what is in proportion to the probability of each label."""
    logarithms = {}
    for assigned in itertools.permutations(range(len(topics))):  # label -> topic
        logarithm = 0.0
        for position in range(max(map(len, texts))):
            there = Counter(TOPIC_OF.get(text[position]) for text in texts if len(text) > position)
            for label, topic in enumerate(assigned):
                own = [text for text, its in zip(texts, labels, strict=True) if its == label and len(text) > position]
                p = chance_of(there[topics[topic]], [shares.get((len(text), position), 0.5) for text in own])
                logarithm += math.log(p + 1e-9)
        logarithms[assigned] = logarithm
    found = [dict.fromkeys(range(len(topics)), 0.0) for _ in topics]
    for assigned, logarithm in logarithms.items():
        for label, topic in enumerate(assigned):
            found[topic][label] += math.exp(logarithm - max(logarithms.values()))
    return found


def by_words(query: list[str], texts: list[list[str]], labels: list[int], shares: Shares) -> dict[int, float]:
    """The votes for each label."""
    votes = dict.fromkeys(sorted(set(labels)), 0.0)
    for text in texts:
        for position, word in enumerate(text):
            if word in query and word in TOPIC_OF:
                expected = dict.fromkeys(votes, 0.02)
                for other, label in zip(texts, labels, strict=True):
                    expected[label] += shares.get((len(other), position), 0.0)
                for label in votes:
                    votes[label] += math.log(expected[label] / sum(expected.values()))
    return votes


def share_right(scores: dict[int, float], label: int) -> float:
    """1 if the label alone has the highest score, a share of 1 if several have."""
    best = [each for each, score in scores.items() if score > max(scores.values()) - 1e-12]
    return (label in best) / len(best)


def measure(task: DemoTask, shots: int) -> tuple[float, float]:
    """Accuracy with topics, and with words alone."""
    topics, shares, rng = list(task.labels), topic_word_shares(task.length), random.Random(5)
    pool = make_documents(task, 0)["train"]
    by_label = [[row["text"].split() for row in pool if row["label"] == label] for label in range(len(topics))]
    with_topics, with_words = [], []
    for _ in range(DRAWS):
        order = rng.sample(range(len(topics)), len(topics))
        labels = [order[i % len(topics)] for i in range(shots)]
        texts = [rng.choice(by_label[label]) for label in labels]
        chances = by_topics(texts, labels, topics, shares)
        with_topics += [share_right(chances[label], label) for label in range(len(topics))]
        for _ in range(QUERIES):
            label = rng.randrange(len(topics))
            with_words.append(share_right(by_words(rng.choice(by_label[label]), texts, labels, shares), label))
    return sum(with_topics) / len(with_topics), sum(with_words) / len(with_words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=8, help="demonstrations (default: %(default)s)")
    options = parser.parse_args()
    print("task | accuracy with topics | with words alone")
    for task in TASKS:
        with_topics, with_words = measure(task, options.shots)
        print(f"{task.name} | {with_topics:.3f} | {with_words:.3f}", flush=True)


if __name__ == "__main__":
    main()
