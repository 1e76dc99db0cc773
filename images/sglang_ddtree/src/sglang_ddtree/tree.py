"""Trees of the continuations with the highest products of marginals, for a whole batch, without host synchronisation.

A drafter gives each position of its block a distribution of its own. A path's score is the sum of its tokens' log
marginals. Marginals are at most one, so no node scores above its parent, and the best nodes are closed under parents.

One total order decides everything, so every rank builds the same tree from the same numbers:

1. nodes of the chain (the top token of every position), by depth, where the chain is asked for;
2. the higher score;
3. the lower depth;
4. the parent that comes first in this order;
5. the token that comes first among the position's candidates.

Parents come before their children and siblings in the order of their candidates. The first nodes of a tree are the tree
of a smaller budget, except that rule 1 reaches deeper with a larger one.
"""

from dataclasses import dataclass

import torch

ROOT = 0
NONE = -1
_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1


@dataclass(frozen=True)
class Shape:
    """What a tree is made of.

    Attributes:
        budget: most nodes beside the root.
        depth: most nodes on a path beside the root: the drafter's block less the root's place.
        top_k: candidates of each position.
        chain: the top token of every position is in the tree, as far as the budget goes.
    """

    budget: int
    depth: int
    top_k: int
    chain: bool = True

    def __post_init__(self) -> None:
        """Refuse what no tree can be made of."""
        for name in ("budget", "depth", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")

    @property
    def nodes(self) -> int:
        """Nodes of every tree beside the root: the budget, or all paths there are where those are fewer."""
        paths = 0
        for depth in range(1, self.depth + 1):
            paths += self.top_k**depth
            if paths >= self.budget:
                return self.budget
        return paths

    @property
    def width(self) -> int:
        """Nodes of every tree with its root."""
        return self.nodes + 1

    @property
    def longest(self) -> int:
        """Nodes beside the root that a path can have."""
        return min(self.depth, self.budget)


@dataclass(frozen=True)
class Tree:
    """Trees of a batch, each [batch, width], with the root first.

    Attributes:
        tokens: token of each node; the root's is the last one that the target decided.
        parents: place of each node's parent in its tree, NONE for the root.
        depths: distance to the root.
        scores: sum of log marginals on the path.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class _Level:
    """Candidates of one depth.

    Attributes:
        parents: each candidate's parent, as a place among those kept at the depth above.
        ranks: its token, as a place among the position's.
        keep: how many can be in the tree.
        above: where the depth above starts among all that is kept; below zero for the root's children.
        start: where this depth starts there.
    """

    parents: torch.Tensor
    ranks: torch.Tensor
    keep: int
    above: int
    start: int


class Builder:
    """Builds trees of one shape on one device.

    A node with j nodes before it at its depth and d-1 ancestors is among the first `budget` only if j+d-1 < budget. The
    child of rank r of the parent at place j has (j+1)(r+1)-1 such nodes before it. So few candidates of each depth need
    a look: about budget * ln(budget), whatever top_k is.
    """

    def __init__(self, shape: Shape, device: torch.device | str) -> None:
        """Make the tables of candidates.

        Args:
            shape: what trees are made of.
            device: where they are built.
        """
        self.shape = shape
        self._levels: list[_Level] = []
        above, places = 1, 0
        for depth in range(shape.longest):
            room = shape.budget - depth
            pairs = [
                (parent, rank)
                for parent in range(min(above, room))
                for rank in range(min(shape.top_k, room // (parent + 1)))
            ]
            parents, ranks = torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1)
            keep = min(len(pairs), room)
            self._levels.append(_Level(parents, ranks, keep, above=places - above, start=places))
            above, places = keep, places + keep
        sizes = torch.tensor([level.keep for level in self._levels])
        self._depths = torch.arange(1, len(sizes) + 1).repeat_interleave(sizes).to(device)
        self._seeds = torch.tensor([level.start for level in self._levels] if shape.chain else [], device=device).long()

    def build(self, log_marginals: torch.Tensor, candidates: torch.Tensor, roots: torch.Tensor) -> Tree:
        """Return the trees of a batch.

        Args:
            log_marginals: [batch, at least depth, at least top_k], falling along the last axis; NaN is impossible.
            candidates: tokens of the same shape, distinct at each position.
            roots: [batch] tokens of the roots.
        """
        batch = roots.shape[0]
        impossible = float("-inf")
        marginals = log_marginals.float().nan_to_num(nan=impossible, neginf=impossible).clamp(max=0)
        scores = marginals.new_zeros(batch, 1)
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for depth, level in enumerate(self._levels):
            paths = scores[:, level.parents] + marginals[:, depth, level.ranks]
            chosen = _first(paths, level.keep)
            scores = paths.gather(1, chosen)
            tokens = candidates[:, depth].gather(1, level.ranks[chosen])
            found.append((scores, level.parents[chosen] + level.above, tokens))
        all_scores, all_parents, all_tokens = (torch.cat(parts, 1) for parts in zip(*found, strict=True))

        chosen = _first(all_scores, self.shape.nodes, self._seeds)
        order = torch.arange(1, self.shape.width, device=chosen.device).expand(batch, -1)
        places = torch.zeros_like(all_parents).scatter_(1, chosen, order)
        depths = self._depths[chosen]
        above = all_parents.gather(1, chosen)
        parents = places.gather(1, above.clamp(min=0)).masked_fill(above < 0, ROOT)

        def with_root(root: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
            return torch.cat([root.unsqueeze(1), rest.to(root.dtype)], 1)

        return Tree(
            tokens=with_root(roots.to(torch.int64), all_tokens.gather(1, chosen)),
            parents=with_root(torch.full_like(parents[:, 0], NONE), parents),
            depths=with_root(torch.zeros_like(depths[:, 0]), depths),
            scores=with_root(torch.zeros_like(all_scores[:, 0]), all_scores.gather(1, chosen)),
        )


def _first(scores: torch.Tensor, count: int, seeds: torch.Tensor | None = None) -> torch.Tensor:
    """Return the places of the highest scores in order, the lower place first among equals.

    Args:
        scores: [batch, places], none above zero.
        count: how many.
        seeds: places that come before all others.
    """
    places = torch.arange(scores.shape[1], device=scores.device)
    # Bits of a float without a sign are in the order of the numbers, and no two keys are equal.
    keys = (scores.abs().view(torch.int32).to(torch.int64) << _LOW_BITS) + places
    if seeds is not None:
        keys[:, seeds] = seeds - (1 << 62)
    return keys.topk(count, dim=1, largest=False, sorted=True).values & _LOW_MASK


def best_tokens(values: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest values of the last axis and their tokens in order, the lower token first among equals.

    Args:
        values: [..., n], of any float type.
        tokens: [n] or as values, each below 2**31, distinct.
        count: how many.
    """
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    highest = (1 << 31) - 1
    keys = (ordered.to(torch.int64) << _LOW_BITS) + (highest - tokens.to(torch.int64))
    found = keys.topk(count, dim=-1, sorted=True).values
    ordered = (found >> _LOW_BITS).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), highest - (found & _LOW_MASK)


def links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each node's first child and next sibling, NONE where there is none.

    Args:
        parents: [batch, width], each below its child's place, NONE for the root.
    """
    width = parents.shape[1]
    order = parents.argsort(dim=1, stable=True)
    ordered = parents.gather(1, order)
    joined = ordered[:, 1:] == ordered[:, :-1]
    siblings = torch.full_like(parents, NONE)
    siblings.scatter_(1, order[:, :-1], order[:, 1:].masked_fill(~joined, NONE))
    # What is no first child goes to a column that is cut off.
    first = ordered[:, 1:].masked_fill(joined, width)
    children = parents.new_full((parents.shape[0], width + 1), NONE)
    children.scatter_(1, first, order[:, 1:])
    return children[:, :width], siblings


def visible(parents: torch.Tensor, longest: int) -> torch.Tensor:
    """Return whether each node sees each other: itself and its ancestors, [batch, width, width].

    Args:
        parents: [batch, width], NONE for the root.
        longest: nodes beside the root that a path can have.
    """
    batch, width = parents.shape
    up = parents.clamp(min=ROOT)
    at = torch.arange(width, device=parents.device).expand(batch, -1)
    seen = torch.zeros(batch, width, width, dtype=torch.bool, device=parents.device)
    for step in range(longest + 1):
        seen.scatter_(2, at.unsqueeze(2), True)
        if step < longest:
            at = up.gather(1, at)
    return seen


def verify_mask(seen: torch.Tensor, prefixes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the mask of a verification as SGLang's attention reads it, and return it.

    Requests follow each other in one flat tensor; each has a row per node: its prefix, all of it seen, then its tree.

    Args:
        seen: [batch, width, width], from `visible`.
        prefixes: [batch] tokens before the root.
        out: a flat tensor of booleans, at least the sum of width * (prefix + width) long.
    """
    width = seen.shape[1]
    lengths = prefixes.to(torch.int64) + width
    starts = (lengths * width).cumsum(0) - lengths * width
    nodes = torch.arange(width, device=seen.device)
    rows = starts[:, None] + nodes * lengths[:, None] + prefixes[:, None]
    out.fill_(True)
    return out.scatter_(0, (rows[:, :, None] + nodes).flatten(), seen.flatten())
