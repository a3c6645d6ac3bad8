"""Draws docs/rooms.svg, the rooms of the code and who uses whom, from the imports (python -m docs.draw_rooms)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from random import Random

from tests.import_graph import ROOM_ORDER, ROOT, Graph, import_graph, room_graph

PICTURE = Path(__file__).with_name("rooms.svg")

# Every room uses some of these: they are drawn as the ground on which the others stand, without arrows.
GROUND = ("errors", "version")

TEXTS = {
    "models": "weights and adapters on disk",
    "blocks": "computes a span of blocks",
    "network": "a libp2p peer, also behind NAT",
    "trust": "receipts, evidence, bans",
    "swarm": "directory, discovery, routing",
    "verification": "recomputes and judges answers",
    "placement": "which server takes which blocks",
    "client": "sessions and batches over chains",
    "server": "serves a span",
    "validator": "probes and audits servers",
    "tuning": "fine-tuning over the swarm",
    "credits": "points: ledger, wallet, payments",
    "api": "HTTP APIs over the swarm",
    "monitoring": "metrics for Prometheus",
    "web": "the chat page and the swarm's",
    "cli": "commands; builds the parts",
}
GREEN, BLUE, AMBER, VIOLET, TEAL, GREY = "#cfe8cf", "#cfe0f7", "#f7e0bd", "#e2d6f5", "#c8e9e8", "#dfe3e8"
COLOURS = {
    **dict.fromkeys(("models", "blocks"), GREEN),
    **dict.fromkeys(("network", "swarm"), BLUE),
    **dict.fromkeys(("trust", "verification", "validator", "credits"), AMBER),
    **dict.fromkeys(("placement", "server"), VIOLET),
    **dict.fromkeys(("client", "tuning", "api", "web"), TEAL),
}
# Dark on the boxes; lines and free text in a grey that can be read on white as well as on black.
INK, LINE = "#1f2733", "#6f7b8a"

WIDTH, HEIGHT, GAP, LAYER_GAP, MARGIN = 222, 66, 22, 58, 24
LANE = 26  # of an arrow that passes a layer
STARTS = 6
LONGEST = 28  # letters of the names of folders in a box


def arrows(rooms: Mapping[str, Iterable[str]]) -> set[tuple[str, str]]:
    """Who imports whom among the rooms that have boxes, without the arrows that follow from others."""
    used = {name: TEXTS.keys() & rooms[name] & set(ROOM_ORDER[: ROOM_ORDER.index(name)]) for name in TEXTS}

    def reachable(name: str) -> set[str]:
        return used[name].union(*(reachable(below) for below in used[name]))

    return {
        (name, below)
        for name in used
        for below in used[name]
        if not any(below in reachable(other) for other in used[name] - {below})
    }


@dataclass(frozen=True)
class Node:
    """A box, or (with `of`) the place where an arrow passes a layer."""

    name: str
    layer: int
    of: tuple[str, str] | None = None

    @property
    def width(self) -> int:
        return LANE if self.of else WIDTH


def layered(edges: set[tuple[str, str]]) -> tuple[list[list[Node]], dict[tuple[str, str], list[Node]]]:
    """The nodes layer by layer from the lowest, and the nodes that each arrow goes through, from its upper end."""
    below = {name: {low for high, low in edges if high == name} for name in TEXTS}
    depth: dict[str, int] = {}
    for name in (name for name in ROOM_ORDER if name in TEXTS):
        depth[name] = max((depth[low] + 1 for low in below[name]), default=0)
    boxes = {name: Node(name, layer) for name, layer in depth.items()}
    layers: list[list[Node]] = [[] for _ in range(max(depth.values()) + 1)]
    for box in boxes.values():
        layers[box.layer].append(box)
    paths = {}
    for high, low in sorted(edges):
        lanes = [Node(f"{high}-{low}", layer, (high, low)) for layer in range(depth[high] - 1, depth[low], -1)]
        for lane in lanes:
            layers[lane.layer].append(lane)
        paths[high, low] = [boxes[high], *lanes, boxes[low]]
    return layers, paths


def crossings(upper: Sequence[Node], lower: Sequence[Node], links: set[tuple[Node, Node]]) -> int:
    ends = sorted((upper.index(high), lower.index(low)) for high, low in links if high in upper and low in lower)
    return sum(
        first[1] > second[1] for at, first in enumerate(ends) for second in ends[at + 1 :] if first[0] < second[0]
    )


def ordered(layers: list[list[Node]], links: set[tuple[Node, Node]]) -> list[list[Node]]:
    """The layers with the nodes of each in the order in which the fewest arrows cross (Sugiyama, 1981).

    One layer after the other is ordered as the layers beside it want it; of several starts the best counts.
    """

    def cost(layers: list[list[Node]], lowest: int, highest: int) -> tuple[int, float]:
        crossed, length = 0, 0.0
        for lower, upper in pairwise(layers[max(0, lowest) : highest + 1]):
            crossed += crossings(upper, lower, links)
            place = {node: (at + 0.5) / len(layer) for layer in (lower, upper) for at, node in enumerate(layer)}
            length += sum(abs(place[high] - place[low]) for high, low in links if high in place and low in place)
        return crossed, round(length, 6)

    def improved(layers: list[list[Node]]) -> list[list[Node]]:
        for index in (*range(len(layers)), *reversed(range(len(layers)))) * 2:
            layers[index] = min(
                (list(order) for order in permutations(layers[index])),
                key=lambda order: cost([*layers[:index], order, *layers[index + 1 :]], index - 1, index + 1),
            )
        return layers

    random = Random(0)
    starts = [[random.sample(layer, len(layer)) for layer in layers] for _ in range(STARTS)]
    return min((improved(start) for start in starts), key=lambda found: cost(found, 0, len(found)))


def spread(wanted: Sequence[float], widths: Sequence[int]) -> list[float]:
    """Centres as near as can be to those wanted (least squares), in the same order and without overlap."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + GAP)
    groups: list[tuple[float, int]] = []  # mean and size: pool adjacent violators
    for centre, offset in zip(wanted, offsets, strict=True):
        groups.append((centre - offset, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (mean, size), (before, count) = groups.pop(), groups.pop()
            groups.append(((mean * size + before * count) / (size + count), size + count))
    means = [mean for mean, size in groups for _ in range(size)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def centres(layers: list[list[Node]], links: set[tuple[Node, Node]]) -> dict[Node, float]:
    """The x of every node: each as near to its neighbours as the others of its layer let it."""
    x = {node: 0.0 for layer in layers for node in layer}
    for layer in layers:
        x.update(zip(layer, spread([0.0] * len(layer), [node.width for node in layer]), strict=True))
    around: dict[Node, list[Node]] = {node: [] for node in x}
    for high, low in sorted(links, key=lambda link: (link[0].name, link[1].name)):
        around[high].append(low)
        around[low].append(high)
    for _ in range(60):
        for layer in layers:
            wanted = [sum(x[other] for other in around[node]) / max(1, len(around[node])) for node in layer]
            x.update(zip(layer, spread(wanted, [node.width for node in layer]), strict=True))
    left = min(x[node] - node.width / 2 for node in x)
    return {node: round(x[node] - left + 2 * MARGIN, 1) for node in x}


def subfolders(name: str) -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "node" / name).glob("*/__init__.py"))


def text(
    x: float, y: float, content: str, size: int, *, anchor: str = "middle", style: str = "", fill: str = INK
) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" {style}>{content}</text>'


BOLD, CODE = 'font-weight="700"', 'font-family="SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"'


def box(name: str, x: float, y: float) -> list[str]:
    names = [f"{folder}/" for folder in subfolders(name)]
    while len(" ".join(names)) > LONGEST:
        names = [*names[: -1 - (names[-1] == "...")], "..."]
    folders = " ".join(names)
    return [
        f'<g id="room-{name}"><rect x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="9"'
        f' fill="{COLOURS.get(name, GREY)}" stroke="{LINE}"/>',
        text(x, y + (20 if folders else 28), name, 15, style=BOLD),
        text(x, y + (38 if folders else 47), TEXTS[name], 12),
        *([text(x, y + 56, folders, 11, style=CODE, fill="#46505e")] if folders else []),
        "</g>",
    ]


def arrow(points: list[tuple[float, float]], ends: tuple[str, str]) -> str:
    """A line through points (bottom and top of each layer that it passes), bent between the layers only."""
    path = f"M{points[0][0]:g} {points[0][1]:g}"
    for at, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        bend = (y1 - y0) * 0.5
        path += f" C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}" if at % 2 == 0 else f" V{y1:g}"
    return f'<path data-from="{ends[0]}" data-to="{ends[1]}" d="{path}" marker-end="url(#head)"/>'


def ground(y: float, width: float) -> list[str]:
    """What all rooms of a node stand on."""
    plates = [
        (", ".join(f"node/{name}.py" for name in GROUND), "error classes and the software's version", GREY),
        ("protocols/", "what two nodes say: framing, messages, tensors", BLUE),
        ("crypto/", "what a node can prove: identity, canonical bytes, receipts", AMBER),
    ]
    lines = []
    for at, (name, says, colour) in enumerate(plates):
        top = y + at * 46
        lines += [
            f'<rect x="{MARGIN}" y="{top:g}" width="{width - 2 * MARGIN:g}" height="36" rx="9"'
            f' fill="{colour}" stroke="{LINE}"/>',
            text(2 * MARGIN, top + 23, name, 14, anchor="start", style=BOLD),
            text(width - 2 * MARGIN, top + 23, says, 12, anchor="end"),
        ]
    return lines


def draw(rooms: Graph) -> str:
    edges = arrows(rooms)
    layers, paths = layered(edges)
    links = {link for path in paths.values() for link in pairwise(path)}
    layers = ordered(layers, links)
    x = centres(layers, links)
    width = max(x[node] + node.width / 2 for node in x) + 2 * MARGIN
    top = {at: 2.4 * MARGIN + (len(layers) - 1 - at) * (HEIGHT + LAYER_GAP) for at in range(len(layers))}
    bottom = top[0] + HEIGHT + MARGIN

    def port(node: Node, towards: Node, others: list[Node]) -> float:
        """Where an arrow leaves or reaches a box: side by side with the others there, ordered by their other ends."""
        if node.of:
            return x[node]
        rank = sorted(others, key=lambda other: (x[other], other.name)).index(towards)
        return x[node] + (rank - (len(others) - 1) / 2) * min(30, WIDTH / (len(others) + 1))

    lines = []
    for ends, path in sorted(paths.items()):
        points = []
        for high, low in pairwise(path):
            points.append((port(high, low, [b for a, b in links if a == high]), top[high.layer] + HEIGHT))
            points.append((port(low, high, [a for a, b in links if b == low]), top[low.layer] - (0 if low.of else 5)))
        lines.append(arrow(points, ends))
    height = bottom + MARGIN + 3 * 46 + 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
            f' width="{width:g}" height="{height:g}"'
            ' font-family="Inter, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif">',
            "<title>The rooms of petalnode's code; an arrow means: imports</title>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="6" refY="5" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>',
            f'<rect x="{MARGIN / 2:g}" y="{MARGIN / 2:g}" width="{width - MARGIN:g}" height="{bottom - MARGIN / 2:g}"'
            f' rx="14" fill="none" stroke="{LINE}" stroke-dasharray="5 4"/>',
            text(MARGIN, 1.6 * MARGIN, "node/", 14, anchor="start", style=BOLD, fill=LINE),
            f'<g fill="none" stroke="{LINE}" stroke-width="1.6">',
            *lines,
            "</g>",
            *(
                line
                for layer in layers
                for node in layer
                if not node.of
                for line in box(node.name, x[node], top[node.layer])
            ),
            *ground(bottom + MARGIN, width),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(room_graph(import_graph())))
    print(PICTURE)
