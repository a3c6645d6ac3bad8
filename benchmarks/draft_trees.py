"""What trees of drafts would gain over chains of as many tokens: a simulation with answers of a real model.

    python benchmarks/draft_trees.py [--json] [--model smollm2] [--tokens 220] [--servers 3]

The model answers sixteen prompts of four kinds in this process, greedily. Their texts are then gone through as a chain
of servers would: drafts come from places where the last two to six tokens stood before; a tree may follow the best two
or three of them from each place on, a chain the best one. What a candidate's chance to be right is, by its rank and the
length of its match, is taken from the same answers, and each finds its best size and least chance by hindsight, both of
which a running answer would have to guess. A step is answered after a trip through the servers, 1.5 ms of handling at
each, 5 ms at the client and the kernels' time for as many rows (benchmarks/RESULTS.md, weights of 4 bits as stored), or
eight times that. `bound` is what nobody could exceed: every second or third candidate that was right where those before
it were wrong saves a whole step.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from drafts import FILE
from plain import plain_model
from transformers import AutoTokenizer

from petalnode.node.client.generation.draft_model import LONGEST_MATCH, SHORTEST_MATCH
from petalnode.node.client.generation.drafting import kind_of
from petalnode.node.models.sources.resolve import resolve

CODE = """def read(path):
    lines = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, _, value = line.partition("=")
            lines.append((name.strip(), value.strip()))
    return dict(lines)
"""
NEWS = """The town council of Marlow voted on Tuesday to close the old bridge over the river for six months. Engineers
had found cracks in two of its piers in spring. Buses will go by the new bridge in the north, which adds about ten
minutes to the way from the station to the market. Shops near the old bridge fear that they will lose customers, and
have asked the council for help with their rents. The mayor said that the council would look at it in autumn, and that
the bridge would be safer and wider when it opens again, with a path for bicycles on each side.""".replace("\n", " ")
EDIT = 'Repeat this file word for word, without any comment, but with the level "{}" instead of "info":\n\n' + FILE
PROMPTS = {
    "re-emitted": [EDIT.replace("{}", level) for level in ("debug", "warning", "error", "trace")],
    "code with an edit": [
        f"Write this function again with {change}:\n\n```python\n{CODE}```"
        for change in ("a docstring", "type hints", "the name parse instead of read", '";" instead of "#" for comments')
    ],
    "about a text": [
        f"{question}\n\n{NEWS}"
        for question in (
            "Summarise this text in three sentences:",
            "Which facts does this text name? Make a list:",
            "Rewrite this text as a letter to the mayor:",
            "Answer with quotations from the text: why is the bridge closed, and what do the shops fear?",
        )
    ],
    "ordinary": [
        "Explain in a few sentences why the sky is blue and why sunsets are red.",
        "What is a hash table?",
        "Why do leaves change their colour in autumn?",
        "How is bread made? Give the steps as a list.",
    ],
}
ROWS = ((1, 2.87), (4, 6.28), (8, 10.7), (16, 21.0), (32, 41.2))
"""Milliseconds of the kernels for all of SmolLM2's blocks, by rows."""
ROUND_TRIPS = (20, 50, 100, 200)
SIZES, LEAST = (2, 4, 8, 16, 31), (0.02, 0.1, 0.3, 0.5)
KEY = 6
Answer = tuple[list[int], list[int]]
Place = tuple[int, int]
"""The length of a match, and where what followed it stands."""


def answers(model: str, tokens: int) -> Iterator[tuple[str, list[Answer]]]:
    """(kind, prompt and answer of each text)."""
    path = resolve(model, offline=True).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    whole = plain_model(path, "float32")
    end = tokenizer.eos_token_id
    for kind, texts in PROMPTS.items():
        messages = [[{"role": "user", "content": text}] for text in texts]
        prompts = [
            tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in messages
        ]
        longest = max(map(len, prompts))
        ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.no_grad():
            made = whole.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=end)
        said = [row[: row.index(end) + 1] if end in row else row for row in made[:, longest:].tolist()]
        yield kind, list(zip(prompts, said, strict=True))


class Text:
    """A text that grows, and where its last tokens stood before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._known = 0

    def candidates(self, path: Sequence[int], follow: Place | None, most: int) -> list[tuple[int, Place]]:
        """Different tokens that may follow the text and `path`, the best first: what `follow` goes on with, then by the
        length of the match."""
        for end in range(max(SHORTEST_MATCH, self._known), len(self.tokens)):
            for length in range(SHORTEST_MATCH, min(KEY, end) + 1):
                self._ends[tuple(self.tokens[end - length : end])].append(end)
        self._known = len(self.tokens)
        context, found = [*self.tokens[-LONGEST_MATCH:], *path], dict[int, Place]()
        if follow is not None and follow[1] < len(self.tokens):
            found[self.tokens[follow[1]]] = follow
        for length in range(min(KEY, len(context) - 1), SHORTEST_MATCH - 1, -1):
            places = self._ends.get(tuple(context[-length:]), [])[-32:]
            for match, place in sorted(
                ((self._match(context, place, length), place) for place in places), reverse=True
            ):
                if len(found) < most:
                    found.setdefault(self.tokens[place], (match, place))
        return list(found.items())[:most]

    def _match(self, context: Sequence[int], place: int, length: int) -> int:
        most = min(LONGEST_MATCH, place, len(context)) if length == KEY else length
        while length < most and self.tokens[place - 1 - length] == context[-1 - length]:
            length += 1
        return length


class Chances:
    """How often a candidate is right, by its rank and the length of its match; by hindsight."""

    def __init__(self, texts: Sequence[Answer]) -> None:
        self._tried: Counter[tuple[int, int]] = Counter()
        self._right: Counter[tuple[int, int]] = Counter()
        self.counts: Counter[str] = Counter()
        for prompt, answer in texts:
            text, follow = Text(prompt), None
            for token in answer:
                found = text.candidates((), follow, 3)
                self._count(found, token)
                follow = after(found, token)
                text.tokens.append(token)

    def _count(self, found: Sequence[tuple[int, Place]], token: int) -> None:
        hits = [candidate == token for candidate, _ in found]
        for rank, ((_, (match, _)), hit) in enumerate(zip(found, hits, strict=True)):
            self._tried[rank, kind_of(match)] += 1
            self._right[rank, kind_of(match)] += hit
        self.counts["tokens"] += 1
        self.counts["with_a_candidate"] += bool(hits)
        self.counts["first_right"] += bool(hits and hits[0])
        self.counts["wrong_with_a_second"] += len(hits) > 1 and not hits[0]
        self.counts["second_right"] += len(hits) > 1 and hits[1]
        self.counts["third_right"] += len(hits) > 2 and hits[2]

    def of(self, rank: int, match: int) -> float:
        kind = rank, kind_of(match)
        return (self._right[kind] + 0.5) / (self._tried[kind] + 1)


def after(found: Sequence[tuple[int, Place]], token: int) -> Place | None:
    """Where what is drafted goes on behind this token."""
    return next(((match + 1, place + 1) for candidate, (match, place) in found if candidate == token), None)


def tree(text: Text, follow: Place | None, chances: Chances, size: int, width: int, least: float) -> dict[Any, Any]:
    """The likeliest drafted tokens, each by the path to it: a chain for a `width` of one."""
    waiting: list[tuple[float, int, tuple[int, ...], Place]] = []
    chosen: dict[tuple[int, ...], Place] = {}

    def grow(path: tuple[int, ...], chance: float, follow: Place | None) -> None:
        for rank, (token, (match, place)) in enumerate(text.candidates(path, follow, width)):
            likely = chance * chances.of(rank, match)
            if likely >= least:
                heapq.heappush(waiting, (-likely, len(path), (*path, token), (match + 1, place + 1)))

    grow((), 1.0, follow)
    while waiting and len(chosen) < size:
        likely, _, path, place = heapq.heappop(waiting)
        chosen[path] = place
        grow(path, -likely, place)
    return chosen


def steps(texts: Sequence[Answer], chances: Chances, size: int, width: int, least: float) -> Counter[int]:
    """How many steps of `rows` rows all answers take."""
    taken: Counter[int] = Counter()
    for prompt, answer in texts:
        text, follow, made = Text(prompt), None, 0
        while made < len(answer):
            drafted, path = tree(text, follow, chances, size, width, least), ()
            while made + len(path) < len(answer) and (*path, answer[made + len(path)]) in drafted:
                path = (*path, answer[made + len(path)])
            taken[1 + len(drafted)] += 1
            said = answer[made : made + len(path) + 1]
            if len(said) > len(path):
                follow = after(text.candidates(path, drafted.get(path, follow), 3), said[-1])
            text.tokens += said
            made += len(said)
    return taken


def kernels(rows: int) -> float:
    """Milliseconds."""
    for (less, least), (more, most) in itertools.pairwise(ROWS):
        if rows <= more:
            return least + (most - least) * (rows - less) / (more - less)
    return ROWS[-1][1] * rows / ROWS[-1][0]


def quickest(
    texts: Sequence[Answer], taken: dict[Any, Counter[int]], width: int, seconds: Callable[[int], float]
) -> float:
    """Times as quick as one token a step, with the best size and least chance."""
    tokens = sum(len(answer) for _, answer in texts)
    times = [
        sum(count * seconds(rows) for rows, count in taken[width, *way].items())
        for way in itertools.product(SIZES, LEAST)
    ]
    return tokens * seconds(1) / min(times)


def run(model: str, tokens: int, servers: int) -> Iterator[dict[str, Any]]:
    kinds = dict(answers(model, tokens))
    chances = Chances([one for texts in kinds.values() for one in texts])
    for kind, texts in kinds.items():
        ways = itertools.product((1, 2, 3), SIZES, LEAST)
        taken = {way: steps(texts, chances, way[1], way[0], way[2]) for way in ways}
        counts = Chances(texts).counts
        least = min(sum(one.values()) for way, one in taken.items() if way[0] == 1)
        others = counts["second_right"] + counts["third_right"]
        for rtt, scale in itertools.product(ROUND_TRIPS, (1, 8)):

            def seconds(rows: int, rtt: float = rtt, scale: int = scale) -> float:
                return (servers + 1) * rtt / 2 + 1.5 * servers + 5 + scale * kernels(rows)

            chain, two, three = (quickest(texts, taken, width, seconds) for width in (1, 2, 3))
            yield {
                "text": kind,
                "rtt_ms": rtt,
                "compute": scale,
                "chain": chain,
                "tree": max(two, three),
                "gain": max(two, three) / chain,
                "bound": least / max(1, least - others),
                **counts,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table in Markdown")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=220)
    parser.add_argument("--servers", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = list(run(options.model, options.tokens, options.servers))
    if options.json:
        print(json.dumps({"draft_trees": results}))
        return
    print("| text | RTT | compute | chain, times as quick | tree | tree over chain | bound |")
    print("|---|---|---|---|---|---|---|")
    for row in results:
        figures = f"{row['chain']:.2f} | {row['tree']:.2f} | {row['gain']:.3f} | {row['bound']:.2f}"
        print(f"| {row['text']} | {row['rtt_ms']} ms | {row['compute']} | {figures} |")
    print("\n| text | tokens | with a candidate | first right | wrong with a second | second right | third right |")
    print("|---|---|---|---|---|---|---|")
    names = ("tokens", "with_a_candidate", "first_right", "wrong_with_a_second", "second_right", "third_right")
    for kind in PROMPTS:
        counts = next(row for row in results if row["text"] == kind)
        print(f"| {kind} |", " | ".join(str(counts[name]) for name in names), "|")


if __name__ == "__main__":
    main()
