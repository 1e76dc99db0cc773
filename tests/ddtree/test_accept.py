"""The walk accepts the path that was decided, and what it lets out has the target's law."""

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_ddtree.accept import Sampling, decide, distribution, draw, walk
from sglang_ddtree.tree import NONE, Builder, Shape, visible

from tests.ddtree import reference, trees

SIGNIFICANCE = 1e-3
"""Chance that a right procedure fails a test of its law; seeds are fixed, so it fails always or never."""

VOCABULARY, LENGTH, SAMPLES = 5, 3, 200_000
START = (2, 3)


def check_walk(parents: list[int], tokens: list[int], decided: list[int]) -> int:
    depths = [len(reference.path(parents, node)) - 1 for node in range(len(parents))]
    longest = max(depths)
    rows = torch.tensor([parents])
    found = walk(
        torch.tensor([tokens]), rows, torch.tensor([depths]), visible(rows, longest), torch.tensor([decided]), longest
    )
    expected = reference.walk(parents, tokens, decided)
    assert found.nodes.tolist() == [expected + [NONE] * (longest + 1 - len(expected))]
    assert found.lengths.tolist() == [len(expected)]
    return len(expected)


@pytest.mark.parametrize("name", trees.ADVERSARIAL)
def test_walks_on_hard_trees(name: str) -> None:
    parents = trees.ADVERSARIAL[name]
    lengths = set()
    for leaf in range(len(parents)):
        goal = reference.path(parents, leaf)
        decided = [9999] * len(parents)
        for at, node in pairwise(goal):
            decided[at] = 100 + node
        lengths.add(check_walk(parents, [100 + node for node in range(len(parents))], decided))
    assert max(lengths) == max(len(reference.path(parents, node)) for node in range(len(parents)))


@given(trees.parents, st.data())
@settings(max_examples=200, deadline=None)
def test_walks_on_any_tree(parents: list[int], data: st.DataObject) -> None:
    """Tokens are few, so that the same ones come again elsewhere in the tree, and decisions hit them."""
    tokens = [0] * len(parents)
    for family in reference.children(parents):
        for child, token in zip(family, data.draw(st.permutations(range(len(family) + 1))), strict=False):
            tokens[child] = token
    decided = data.draw(st.lists(st.integers(0, 3), min_size=len(parents), max_size=len(parents)))
    check_walk(parents, tokens, decided)


def plain(temperature: float = 1.0, top_k: int = 1 << 30, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    return Sampling(*(torch.tensor([value]) for value in (temperature, top_k, top_p, min_p)))


def row_of(logits: list[float], sampling: Sampling) -> list[float]:
    return [round(value, 4) for value in distribution(torch.tensor([[logits]]), sampling).flatten().tolist()]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (plain(), [0.4, 0.1, 0.3, 0.2]),
        (plain(temperature=0.5), [0.5333, 0.0333, 0.3, 0.1333]),
        (plain(top_k=2), [0.5714, 0, 0.4286, 0]),
        (plain(top_p=0.6), [0.5714, 0, 0.4286, 0]),
        (plain(top_p=0.71), [0.4444, 0, 0.3333, 0.2222]),
        (plain(min_p=0.6), [0.5714, 0, 0.4286, 0]),
        (plain(top_k=3, min_p=0.3), [0.4444, 0, 0.3333, 0.2222]),
    ],
)
def test_distributions_follow_the_sampling_parameters(sampling: Sampling, expected: list[float]) -> None:
    assert row_of([math.log(share) for share in (0.4, 0.1, 0.3, 0.2)], sampling) == expected


def test_rules_are_those_of_sglangs_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    generator = torch.Generator().manual_seed(3)
    rows = 256
    logits = torch.randn(rows, 1, 40, generator=generator)
    sampling = Sampling(
        torch.rand(rows, generator=generator) + 0.3,
        torch.randint(1, 41, (rows,), generator=generator),
        torch.rand(rows, generator=generator),
        torch.rand(rows, generator=generator) * 0.2,
    )
    weights: list[torch.Tensor] = []

    def multinomial(found: torch.Tensor, num_samples: int) -> torch.Tensor:
        weights.append(found.clone())
        return torch.zeros(len(found), num_samples, dtype=torch.int64)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    scaled = (logits[:, 0] / sampling.temperatures[:, None]).softmax(-1)
    top_k_top_p_min_p_sampling_from_probs_torch(
        scaled, sampling.top_ks, sampling.top_ps, sampling.min_ps, True, None, torch.zeros(rows)
    )
    theirs = weights[0] / weights[0].sum(-1, keepdim=True)
    ours = distribution(logits, sampling)[:, 0].sort(-1, descending=True).values
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert len(theirs.gt(0).sum(-1).unique()) > 10


def test_requests_of_a_batch_keep_their_own_parameters() -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().expand(3, 2, 4)
    mixed = Sampling(
        torch.tensor([1.0, 1.0, 0.5]),
        torch.tensor([1, 2, 4]),
        torch.tensor([1.0, 1.0, 0.5]),
        torch.zeros(3),
    )
    found = distribution(logits, mixed)
    assert found[:, 0].mul(1e4).round().tolist() == [[10000, 0, 0, 0], [5714, 0, 4286, 0], [10000, 0, 0, 0]]
    assert torch.equal(found[:, 0], found[:, 1])


def test_a_greedy_request_takes_the_first_of_equal_logits_beside_one_that_samples() -> None:
    logits = torch.zeros(2, 50, 8)
    mixed = Sampling(torch.ones(2), torch.tensor([1, 8]), torch.ones(2), torch.zeros(2))
    decided = decide(logits, mixed, torch.Generator().manual_seed(0))
    assert decided[0].unique().tolist() == [0]
    assert len(decided[1].unique()) == 8
    assert decide(logits, None).unique().tolist() == [0]


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Return the chance of counts at least this far from a law (chi-square)."""
    expected = law.double() * counts.sum()
    assert expected.min() >= 5, "a cell is too rare for the test"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2, dtype=torch.float64), statistic / 2))


def test_draws_have_their_law() -> None:
    law = torch.tensor([0.5, 0.3, 0.15, 0.0499, 0.0001])
    drawn = draw(law.expand(SAMPLES, -1), torch.Generator().manual_seed(1))
    assert p_value(drawn.bincount(minlength=5).double(), law) > SIGNIFICANCE
    never = draw(torch.tensor([0.0, 1e-30, 0.0]).expand(1000, -1), torch.Generator().manual_seed(1))
    assert never.unique().tolist() == [1]


class Language:
    """A target whose law is known: the next token's logits depend on the last two."""

    def __init__(self) -> None:
        """Make up the law."""
        generator = torch.Generator().manual_seed(7)
        self.logits = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator)

    def law(self, start: tuple[int, int], sampling: Sampling) -> torch.Tensor:
        """Return the probability of each text of LENGTH tokens, in lexical order."""
        table = distribution(self.logits, sampling)
        found = []
        for text in product(range(VOCABULARY), repeat=LENGTH):
            whole = (*start, *text)
            found.append(math.prod(float(table[whole[at : at + 3]]) for at in range(LENGTH)))
        return torch.tensor(found)


def texts(language: Language, sampling: Sampling, budget: int, *, biased: bool = False) -> torch.Tensor:
    """Return how often each text comes out of rounds with trees, in lexical order.

    Args:
        language: the target.
        sampling: how tokens are drawn.
        budget: nodes of the trees.
        biased: accept a drafted token whether or not it was decided, as a broken walk would.
    """
    generator = torch.Generator().manual_seed(budget)
    shape = Shape(budget, depth=LENGTH, top_k=VOCABULARY)
    builder = Builder(shape, "cpu")
    table = distribution(language.logits, sampling)
    lengths = []
    # Each request's text: two tokens it starts with, then what rounds bring; the last round may bring more than asked.
    text = torch.full((SAMPLES, 2 + 2 * LENGTH), NONE)
    text[:, :2] = torch.tensor(START)
    ends = torch.full((SAMPLES, 1), 2)
    for _ in range(LENGTH):
        # A drafter of its own mind: what it thinks has nothing to do with the target.
        drafted = torch.randn(SAMPLES, LENGTH, VOCABULARY, generator=generator).log_softmax(-1)
        marginals, tokens = drafted.sort(-1, descending=True)
        tree = builder.build(marginals, tokens, text.gather(1, ends - 1).squeeze(1))
        seen = visible(tree.parents, shape.longest)
        previous = tree.tokens.gather(1, tree.parents.clamp(min=0))
        previous[:, :1] = text.gather(1, ends - 2)
        decided = draw(table[previous, tree.tokens], generator)
        if biased:
            decided[:, 0] = torch.where(decided[:, 0] == 0, tokens[:, 0, 0], decided[:, 0])
        found = walk(tree.tokens, tree.parents, tree.depths, seen, decided, shape.longest)
        lengths.append(found.lengths)
        emitted = decided.gather(1, found.nodes.clamp(min=0)).masked_fill(found.nodes == NONE, NONE)
        room = (ends + torch.arange(emitted.shape[1])).clamp(max=text.shape[1] - 1)
        text.scatter_(1, room, emitted)
        ends = (ends + found.lengths.unsqueeze(1)).clamp(max=2 + LENGTH)
    assert torch.cat(lengths).unique().tolist() == list(range(1, shape.longest + 2))
    done = text[:, 2 : 2 + LENGTH]
    places = done @ torch.tensor([VOCABULARY**power for power in reversed(range(LENGTH))])
    return places.bincount(minlength=VOCABULARY**LENGTH).double()


@pytest.mark.parametrize(
    ("budget", "sampling"),
    [(1, plain()), (4, plain()), (20, plain(temperature=1.4)), (20, plain(top_p=0.999, temperature=1.1))],
)
def test_texts_have_the_targets_law(budget: int, sampling: Sampling) -> None:
    language = Language()
    law = language.law(START, sampling)
    possible = law > 0
    counts = texts(language, sampling, budget)
    assert counts[~possible].sum() == 0
    assert p_value(counts[possible], law[possible]) > SIGNIFICANCE


def test_a_biased_walk_is_found_out() -> None:
    language = Language()
    assert p_value(texts(language, plain(), 4, biased=True), language.law(START, plain())) < 1e-12
