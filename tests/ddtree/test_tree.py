"""Trees built for a batch are the heap's, whatever the marginals; masks and links are the ones read off a tree."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_ddtree.tree import NONE, Builder, Shape, Tree, best_tokens, links, verify_mask, visible

from tests.ddtree import reference, trees

DEPTH, TOP_K = 5, 6


def falling(values: Sequence[float]) -> list[float]:
    """Return log marginals from any numbers: the share of each, the largest first."""
    total = sum(values)
    return sorted((math.log(value / total) if value else -math.inf for value in values), reverse=True)


rows = st.one_of(
    st.lists(st.floats(1e-6, 1), min_size=TOP_K, max_size=TOP_K).map(falling),
    st.sampled_from([falling([1] * TOP_K), falling([1e9, *[1] * (TOP_K - 1)]), falling([4, 4, 2, 2, 1, 1])]),
    st.lists(st.sampled_from([0.0, -1.0, -2.0, -math.inf]), min_size=TOP_K, max_size=TOP_K).map(
        lambda row: sorted(row, reverse=True)
    ),
)
marginals = st.lists(rows, min_size=DEPTH, max_size=DEPTH)


def tokens_of(batch: int, depth: int, top_k: int) -> torch.Tensor:
    """Return tokens that tell their place: 100 for each depth, and the rank."""
    return (torch.arange(depth)[:, None] * 100 + torch.arange(top_k)).expand(batch, -1, -1)


def build(batch: Sequence[Sequence[Sequence[float]]], shape: Shape) -> Tree:
    values = torch.tensor(batch)
    roots = torch.arange(len(batch)) + 1000
    return Builder(shape, "cpu").build(values, tokens_of(*values.shape), roots)


def as_nodes(tree: Tree, row: int) -> list[reference.Node]:
    """Return a tree in the reference's form."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    found = []
    for node in range(1, len(parents)):
        path = reference.path(parents, node)[1:]
        assert [tokens[at] // 100 for at in path] == list(range(len(path)))
        assert tree.depths[row, node] == len(path)
        ranks = tuple(tokens[at] % 100 for at in path)
        found.append(reference.Node(ranks, parents[node], float(tree.scores[row, node])))
    return found


@given(st.lists(marginals, min_size=1, max_size=3), st.integers(1, 70), st.integers(1, DEPTH), st.booleans())
@settings(max_examples=300, deadline=None)
def test_trees_are_the_heaps(batch: list[list[list[float]]], budget: int, depth: int, chain: bool) -> None:
    tree = build(batch, Shape(budget, depth, TOP_K, chain))
    for row, values in enumerate(batch):
        assert as_nodes(tree, row) == reference.best_first(values[:depth], budget, chain)
    assert tree.tokens[:, 0].tolist() == [1000 + row for row in range(len(batch))]
    assert tree.parents[:, 0].eq(NONE).all()


@given(marginals, st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_no_path_outside_scores_higher(values: list[list[float]], budget: int) -> None:
    """The heap itself is right: against every path there is, at a small depth."""
    kept = {node.ranks: node.score for node in reference.best_first(values[:3], budget, seed_chain=False)}
    everything = {
        ranks: sum(values[depth][rank] for depth, rank in enumerate(ranks))
        for length in (1, 2, 3)
        for ranks in torch.cartesian_prod(*[torch.arange(TOP_K)] * length).view(-1, length).tolist()
        for ranks in [tuple(ranks)]
    }
    assert len(kept) == min(budget, len(everything))
    assert all(ranks[:-1] in kept for ranks in kept if len(ranks) > 1)
    worst = min(kept.values())
    assert all(score <= worst + 1e-5 for ranks, score in everything.items() if ranks not in kept)


@given(marginals, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_smaller_budget_is_the_start_of_a_larger(values: list[list[float]], one: int, other: int) -> None:
    small, large = (build([values], Shape(budget, DEPTH, TOP_K, chain=False)) for budget in sorted((one, other)))
    width = small.tokens.shape[1]
    assert torch.equal(small.tokens, large.tokens[:, :width])
    assert torch.equal(small.parents, large.parents[:, :width])


@pytest.mark.parametrize("budget", [1, 3, DEPTH, 20])
def test_the_chain_is_in_the_tree_where_its_scores_would_not_bring_it(budget: int) -> None:
    flat = [falling([5, 4, 4, 4, 4, 4])] * DEPTH
    seeded = {node.ranks for node in as_nodes(build([flat], Shape(budget, DEPTH, TOP_K)), 0)}
    plain = {node.ranks for node in as_nodes(build([flat], Shape(budget, DEPTH, TOP_K, chain=False)), 0)}
    assert reference.chain(min(budget, DEPTH)) <= seeded
    assert reference.chain(DEPTH) - plain


def test_one_candidate_each_makes_a_chain_of_the_drafters_length() -> None:
    shape = Shape(budget=16, depth=4, top_k=1)
    tree = build([[[-1.0]] * 4], shape)
    assert (shape.nodes, shape.width) == (4, 5)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]


@pytest.mark.parametrize("budget", [64, 256, 1024])
def test_large_trees_are_the_heaps(budget: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    values = torch.randn(2, 15, 64, generator=generator).mul(3).log_softmax(-1).sort(-1, descending=True).values
    tree = build(values.tolist(), Shape(budget, 15, 64))
    for row in range(2):
        assert as_nodes(tree, row) == reference.best_first(values[row].tolist(), budget, seed_chain=True)


def test_numbers_that_are_none_still_make_a_tree() -> None:
    values = torch.full((1, DEPTH, TOP_K), math.nan)
    values[0, 1, 3] = 7.0
    tree = build(values.tolist(), Shape(12, DEPTH, TOP_K))
    parents = tree.parents[0].tolist()
    assert all(parent < node for node, parent in enumerate(parents))
    pairs = set(zip(parents, tree.tokens[0].tolist(), strict=True))
    assert len(pairs) == 13


def test_nothing_in_a_build_depends_on_values() -> None:
    """A device without data builds a tree, so no shape or branch waits for one."""
    shape = Shape(40, 15, 8)
    values = torch.empty(3, 15, 8, device="meta")
    logits = torch.empty(3, 15, 100, device="meta")
    best_tokens(logits, torch.arange(100, device="meta"), 8)
    tree = Builder(shape, "meta").build(values, values.long(), torch.empty(3, dtype=torch.int64, device="meta"))
    seen = visible(tree.parents, shape.longest)
    verify_mask(seen, tree.parents[:, 0], torch.empty(9000, dtype=torch.bool, device="meta"))
    assert links(tree.parents)[0].shape == seen.shape[:2] == (3, 41)


@pytest.mark.parametrize(("field", "shape"), [("budget", (0, 1, 1)), ("depth", (1, 0, 1)), ("top_k", (1, 1, 0))])
def test_impossible_shapes_are_refused(field: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"^{field} is 0: it must be at least 1$"):
        Shape(*shape)


@given(
    st.lists(st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 1e-40, 3.0, math.inf]), min_size=1, max_size=12), st.data()
)
@settings(max_examples=200, deadline=None)
def test_best_tokens_are_the_highest_and_then_the_lowest(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    tokens = data.draw(st.permutations([7 * place for place in range(len(values))]))
    found = best_tokens(torch.tensor([values]), torch.tensor(tokens), count)
    expected = sorted(zip(torch.tensor(values).tolist(), tokens, strict=True), key=lambda one: (-one[0], one[1]))[
        :count
    ]
    assert found[1].tolist() == [[token for _, token in expected]]
    assert found[0].tolist() == [[value for value, _ in expected]]


def check_tree(batch: list[list[int]]) -> None:
    parents = torch.tensor(batch)
    first, siblings = links(parents)
    longest = max(len(reference.path(row, node)) - 1 for row in batch for node in range(len(row)))
    seen = visible(parents, longest)
    prefixes = [5 * row for row in range(len(batch))]
    width = parents.shape[1]
    mask = torch.zeros(sum(width * (prefix + width) for prefix in prefixes) + 3, dtype=torch.bool)
    verify_mask(seen, torch.tensor(prefixes), mask)
    expected: list[list[bool]] = []
    for row, prefix in zip(batch, prefixes, strict=True):
        assert (first[len(expected)].tolist(), siblings[len(expected)].tolist()) == reference.links(row)
        on_path = [[at in reference.path(row, node) for at in range(width)] for node in range(width)]
        assert seen[len(expected)].tolist() == on_path
        expected.append([cell for line in on_path for cell in [True] * prefix + line])
    assert mask.tolist() == [cell for request in expected for cell in request] + [True] * 3


@pytest.mark.parametrize("name", trees.ADVERSARIAL)
def test_links_and_masks_of_hard_trees(name: str) -> None:
    check_tree([trees.ADVERSARIAL[name]])
    check_tree([trees.ADVERSARIAL[name], *trees.same_width(len(trees.ADVERSARIAL[name]), 2, seed=1)])


@given(trees.parents)
@settings(max_examples=150, deadline=None)
def test_links_and_masks_of_any_tree(parents: list[int]) -> None:
    check_tree([parents])
