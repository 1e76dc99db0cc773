"""The algorithms in their most readable form: one request at a time, Python lists, a heap."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Row = Sequence[float]


@dataclass(frozen=True)
class Node:
    """A node of a tree: the ranks of the tokens on its path, and its parent's place in the tree."""

    ranks: tuple[int, ...]
    parent: int
    score: float


def chain(length: int) -> set[tuple[int, ...]]:
    """Return the paths of the chain."""
    return {(0,) * depth for depth in range(1, length + 1)}


def best_first(marginals: Sequence[Row], budget: int, seed_chain: bool) -> list[Node]:
    """Return the first nodes of the order that sglang_ddtree.tree states, by a heap. The root is at place 0.

    Args:
        marginals: log marginals of each depth, falling.
        budget: most nodes.
        seed_chain: whether the chain comes first.
    """
    seeds = chain(len(marginals)) if seed_chain else set()
    rows = [[np.float32(value) for value in row] for row in marginals]
    nodes: list[Node] = []
    heap: list[tuple[bool, float, int, int, int]] = []
    paths: dict[int, tuple[tuple[int, ...], np.float32]] = {0: ((), np.float32(0))}

    def push(parent: int, rank: int) -> None:
        ranks, score = paths[parent]
        depth = len(ranks)
        if depth < len(rows) and rank < len(rows[depth]):
            child = (*ranks, rank)
            place = len(child) if child in seeds else 0
            seeded = float(place) if place else -float(score + rows[depth][rank])
            heapq.heappush(heap, (child not in seeds, seeded, depth + 1, parent, rank))

    push(0, 0)
    while heap and len(nodes) < budget:
        _, _, depth, parent, rank = heapq.heappop(heap)
        ranks, score = paths[parent]
        total = score + rows[depth - 1][rank]
        nodes.append(Node((*ranks, rank), parent, float(total)))
        paths[len(nodes)] = ((*ranks, rank), total)
        push(parent, rank + 1)
        push(len(nodes), 0)
    return nodes


def children(parents: Sequence[int]) -> list[list[int]]:
    """Return each node's children, in order."""
    return [[node for node, parent in enumerate(parents) if parent == at] for at in range(len(parents))]


def links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each node's first child and next sibling, -1 where there is none."""
    families = children(parents)
    siblings = [-1] * len(parents)
    for family in families:
        for left, right in pairwise(family):
            siblings[left] = right
    return [family[0] if family else -1 for family in families], siblings


def path(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to a node."""
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


def walk(parents: Sequence[int], tokens: Sequence[int], decided: Sequence[int]) -> list[int]:
    """Return the nodes that are accepted: from the root, the child whose token was decided, as long as there is one.

    Args:
        parents: each node's parent.
        tokens: each node's token.
        decided: what the target says comes after each node.
    """
    found = [0]
    while True:
        hits = [node for node in children(parents)[found[-1]] if tokens[node] == decided[found[-1]]]
        if not hits:
            return found
        found.append(hits[0])
