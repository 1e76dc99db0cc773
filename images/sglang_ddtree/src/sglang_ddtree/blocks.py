"""Trees cut into blocks of rows that recurrent layers compute independently of each other.

Nodes are laid out in preorder: every node before its descendants, those in one run. An ancestor of any node of a run
that is not in it is then an ancestor of the run's first node. So a block is a run of nodes, behind the path that leads
to the first of them: nothing that it computes depends on another block, and its work does not grow with the tree.
"""

from dataclasses import dataclass

import torch

from sglang_ddtree.tree import NONE

_UNIT = 16
"""Rows of the smallest matrix product of a tensor core."""
_USUAL, _MOST = 64, 128


@dataclass(frozen=True)
class Cut:
    """How trees of one width are cut.

    Attributes:
        width: nodes of every tree with its root.
        longest: nodes beside the root that a path can have.
        rows: rows of a block.
        path: the first of them, kept for the path; none where one block holds the tree.
    """

    width: int
    longest: int
    rows: int
    path: int

    @property
    def own(self) -> int:
        """Nodes that one block answers for."""
        return self.rows - self.path

    @property
    def blocks(self) -> int:
        """Blocks of a tree."""
        return -(-self.width // self.own)

    @property
    def levels(self) -> int:
        """Halvings of the depths until each is alone."""
        return self.longest.bit_length()


def cut(width: int, longest: int) -> Cut:
    """Return how trees are cut.

    Args:
        width: nodes of every tree with its root.
        longest: nodes beside the root that a path can have.

    Raises:
        ValueError: paths are too long for a block.
    """
    if width <= _USUAL:
        return Cut(width, longest, max(_UNIT, 1 << (width - 1).bit_length()), 0)
    path = -(-longest // _UNIT) * _UNIT
    if path > _MOST - _UNIT:
        raise ValueError(f"longest is {longest}: recurrent layers take paths of at most {_MOST - _UNIT} nodes")
    return Cut(width, longest, _USUAL if path <= _USUAL // 2 else _MOST, path)


@dataclass(frozen=True)
class Blocks:
    """Trees of a batch in blocks. One computation serves all layers of a pass.

    Attributes:
        cut: how they are cut.
        rows: [batch, blocks, rows] node of each row, NONE where there is none.
        firsts: [batch, width] place of each node in preorder.
        ends: place after the last of its descendants.
        depths: distance to the root.
        parents: places of the parents, NONE for the root.
    """

    cut: Cut
    rows: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor


def split(parents: torch.Tensor, depths: torch.Tensor, seen: torch.Tensor, how: Cut) -> Blocks:
    """Return trees in blocks, without host synchronisation.

    Args:
        parents: [batch, width], NONE for the root.
        depths: distances to the root.
        seen: [batch, width, width], from `tree.visible`.
        how: how they are cut.
    """
    batch, width = parents.shape
    nodes = torch.arange(width, device=parents.device)
    sizes = seen.sum(1)
    order = parents.argsort(dim=1, stable=True)
    ordered, size = parents.gather(1, order), sizes.gather(1, order)
    before = size.cumsum(1) - size
    joined = torch.zeros_like(ordered, dtype=torch.bool)
    joined[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    earlier = before - before.masked_fill(joined, 0).cummax(1).values
    siblings = torch.zeros_like(sizes).scatter_(1, order, earlier)
    firsts = depths + (seen * siblings.unsqueeze(1)).sum(2)

    preorder = torch.empty_like(firsts).scatter_(1, firsts, nodes.expand(batch, -1))
    own = preorder.new_full((batch, how.blocks * how.own), NONE)
    own[:, :width] = preorder
    own = own.view(batch, how.blocks, how.own)
    heads = own[:, :, :1]
    above = seen.gather(1, heads.expand(-1, -1, width)) & (nodes != heads)
    # Ancestors of one node have a depth each. What is none goes to a column that is cut off.
    columns = depths.unsqueeze(1).masked_fill(~above, how.path)
    paths = preorder.new_full((batch, how.blocks, how.path + 1), NONE)
    paths.scatter_(2, columns.clamp(max=how.path), nodes.expand_as(columns))
    rows = torch.cat([paths[:, :, : how.path], own], 2)
    return Blocks(how, *(one.to(torch.int32) for one in (rows, firsts, firsts + sizes, depths, parents)))
