"""Recurrent layers under a tree, in Triton's interpreter where there is no GPU, against their definition."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_ddtree import blocks, gdn
from sglang_ddtree.tree import NONE, visible

from tests.ddtree import recurrent, reference, trees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = gdn.Heads(keys=2, values=6, key=16, value=32, taps=4)


def blocks_of(batch: list[list[int]], longest: int | None = None) -> blocks.Blocks:
    parents = torch.tensor(batch, device=DEVICE)
    depths = torch.tensor([[len(reference.path(row, node)) - 1 for node in range(len(row))] for row in batch])
    longest = int(depths.max()) if longest is None else longest
    how = blocks.cut(parents.shape[1], longest)
    return blocks.split(parents, depths.to(DEVICE), visible(parents, longest), how)


class Case:
    """Layers, requests and their inputs, all random."""

    def __init__(
        self, batch: list[list[int]], heads: gdn.Heads = HEADS, layers: int = 1, seed: int = 0, bias: bool = True
    ) -> None:
        """Draw everything in float32, more slots than requests, and none of them in order."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source).to(DEVICE)

        self.parents, self.heads, self.layers = batch, heads, layers
        count, width = len(batch), len(batch[0])
        self.slots = (torch.randperm(count + 3, generator=source)[:count]).to(DEVICE)
        self.inputs = normal(layers, count, width, heads.channels)
        self.gates, self.betas = normal(layers, count, width, heads.values), normal(layers, count, width, heads.values)
        self.states = normal(layers, count + 3, heads.values, heads.value, heads.key)
        self.windows = normal(layers, count + 3, heads.channels, heads.taps - 1)
        self.weights = normal(layers, heads.channels, heads.taps)
        self.bias = normal(layers, heads.channels) if bias else None
        self.decay_logs, self.decay_biases = normal(layers, heads.values), normal(layers, heads.values)
        self.scratch = gdn.Scratch.empty(heads, layers, count + 1, width, self.inputs.dtype, DEVICE)

    def verified(self, cut: blocks.Blocks, layer: int = 0) -> torch.Tensor:
        """Return the outputs of the nodes, [batch, width, heads, value]."""
        bias = None if self.bias is None else self.bias[layer]
        mixed = gdn.convolve(
            self.inputs[layer],
            self.windows[layer],
            self.slots,
            gdn.Convolution(self.weights[layer], bias),
            cut,
            self.scratch.inputs[layer],
        )
        gates = gdn.Gates(self.decay_logs[layer], self.decay_biases[layer])
        return gdn.verify(
            mixed,
            self.gates[layer],
            self.betas[layer],
            gates,
            self.states[layer],
            self.slots,
            self.heads,
            cut,
            self.scratch,
            layer,
        )

    def commit(self, paths: list[list[int]], track: gdn.Track | None = None) -> None:
        """Commit a path of each request."""
        longest = max(map(len, paths))
        padded = torch.tensor([path + [NONE] * (longest - len(path)) for path in paths], device=DEVICE)
        lengths = torch.tensor([len(path) for path in paths], device=DEVICE)
        parameters = gdn.Convolution(self.weights, self.bias)
        gdn.commit(self.states, self.windows, self.slots, self.heads, parameters, self.scratch, padded, lengths, track)

    def expected(self, row: int, layer: int = 0) -> list[recurrent.Node]:
        """Return a request's nodes by the definition, in float64."""

        def exact(one: torch.Tensor) -> torch.Tensor:
            return one.double().cpu()

        bias = None if self.bias is None else exact(self.bias[layer])
        parameters = recurrent.Layer(
            exact(self.weights[layer]), bias, exact(self.decay_logs[layer]), exact(self.decay_biases[layer])
        )
        slot = int(self.slots[row])
        return recurrent.tree(
            self.parents[row],
            exact(self.inputs[layer, row]),
            exact(self.gates[layer, row]),
            exact(self.betas[layer, row]),
            exact(self.states[layer, slot]),
            exact(self.windows[layer, slot]),
            parameters,
            self.heads.keys,
            self.inputs.dtype,
        )


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=2e-4, atol=2e-4)


def check(case: Case, longest: int | None = None) -> None:
    """Outputs of all nodes, and states and windows after a path to any of them."""
    cut = blocks_of(case.parents, longest)
    source = random.Random(len(case.parents[0]))  # noqa: S311
    before = case.states.clone(), case.windows.clone()
    wanted = [[case.expected(row, layer) for row in range(len(case.parents))] for layer in range(case.layers)]
    for layer in range(case.layers):
        found = case.verified(cut, layer)
        for row, nodes in enumerate(wanted[layer]):
            near(found[row], torch.stack([node.output for node in nodes]))
    assert torch.equal(case.states, before[0])
    assert torch.equal(case.windows, before[1])
    ends = [source.randrange(len(row)) for row in case.parents]
    case.commit([reference.path(row, end) for row, end in zip(case.parents, ends, strict=True)])
    for layer in range(case.layers):
        for row, end in enumerate(ends):
            near(case.states[layer, case.slots[row]], wanted[layer][row][end].state)
            near(case.windows[layer, case.slots[row]], wanted[layer][row][end].window)
    others = [slot for slot in range(case.states.shape[1]) if slot not in case.slots.tolist()]
    assert torch.equal(case.states[:, others], before[0][:, others])
    assert torch.equal(case.windows[:, others], before[1][:, others])


@pytest.mark.parametrize("name", trees.ADVERSARIAL)
def test_hard_trees(name: str) -> None:
    check(Case([trees.ADVERSARIAL[name]]))
    check(Case([trees.ADVERSARIAL[name], *trees.same_width(len(trees.ADVERSARIAL[name]), 1, seed=1)], bias=False))


@given(trees.parents, st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_any_tree(parents: list[int], seed: int) -> None:
    check(Case([parents], seed=seed))


def shallow(width: int, longest: int, seed: int) -> list[int]:
    """Return a random tree whose paths are not longer."""
    source = random.Random(seed)  # noqa: S311
    parents, depths = [NONE], [0]
    while len(parents) < width:
        parent = source.choice([node for node, depth in enumerate(depths) if depth < longest][-20:])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


@pytest.mark.parametrize(("width", "longest"), [(65, 15), (130, 15), (97, 20), (257, 40), (66, 1)])
def test_trees_of_several_blocks(width: int, longest: int) -> None:
    check(Case([shallow(width, longest, seed) for seed in (1, 2)], gdn.Heads(1, 2, 16, 16, 4)), longest)


def test_a_chain_over_several_blocks() -> None:
    check(Case([list(range(-1, 79))], gdn.Heads(1, 1, 16, 16, 2)))


def test_layers_and_keys_that_repeat() -> None:
    """Equal keys, no decay and full rates: what powers of the system's matrix lose to cancellation."""
    case = Case([list(range(-1, 31))], layers=2)
    case.inputs[:] = case.inputs[:, :, :1]
    case.windows[:] = case.inputs[:, 0, 0, None, :, None]
    case.gates[:], case.betas[:] = -30.0, 30.0
    check(case)


def test_other_heads_and_types_of_states() -> None:
    case = Case([trees.COMB], gdn.Heads(keys=4, values=4, key=64, value=16, taps=3))
    case.states = case.states.bfloat16()
    wanted = case.expected(0)
    near(case.verified(blocks_of([trees.COMB]))[0], torch.stack([node.output for node in wanted]))
    case.commit([[0, 1, 3]])
    found = case.states[0, case.slots[0]].double().cpu()
    # The interpreter cuts bfloat16 off where a GPU rounds.
    torch.testing.assert_close(found, wanted[3].state, rtol=2**-7, atol=1e-5)


def test_padding_stays_out() -> None:
    case = Case([trees.COMB, trees.STAR, trees.CHAIN])
    cut = blocks_of(case.parents)
    alone = case.verified(cut)
    before = case.states.clone(), case.windows.clone()
    slots = case.slots.clone()
    case.slots[1] = -1
    found = case.verified(cut)
    assert torch.equal(found[[0, 2]], alone[[0, 2]])
    assert found.isfinite().all()
    case.commit([[0, 1], [0], [0, 1, 2]])
    moved = (case.states != before[0]).flatten(2).any(2)[0]
    assert moved.tolist() == [slot in (int(slots[0]), int(slots[2])) for slot in range(len(moved))]


@given(st.integers(1, 9), st.integers(-1, 9))
@settings(max_examples=20, deadline=None)
def test_states_on_the_way_are_kept_where_they_are_tracked(length: int, tracked: int) -> None:
    case = Case([trees.CHAIN])
    wanted = case.expected(0)
    case.verified(blocks_of(case.parents))
    spare = next(slot for slot in range(4) if slot != int(case.slots[0]))
    before = case.states[0, spare].clone()
    if tracked > length:
        tracked = -1
    where = torch.tensor([spare], device=DEVICE), torch.tensor([tracked], device=DEVICE)
    case.commit([list(range(length))], gdn.Track(*where))
    near(case.states[0, case.slots[0]], wanted[length - 1].state)
    if tracked < 1:
        assert torch.equal(case.states[0, spare], before)
    else:
        near(case.states[0, spare], wanted[tracked - 1].state)
        near(case.windows[0, spare], wanted[tracked - 1].window)


def test_a_path_at_once_is_the_same_as_its_parts() -> None:
    """Committing some nodes, then verifying and committing the rest as another tree, ends where one commit does."""
    whole, parts = Case([trees.CHAIN], seed=3), Case([trees.CHAIN], seed=3)
    whole.verified(blocks_of([trees.CHAIN]))
    whole.commit([list(range(9))])
    parts.verified(blocks_of([trees.CHAIN]))
    parts.commit([list(range(4))])
    for name in ("inputs", "gates", "betas"):
        setattr(parts, name, getattr(parts, name).roll(-4, 2))
    parts.verified(blocks_of([trees.CHAIN]))
    parts.commit([list(range(5))])
    assert torch.equal(whole.states, parts.states)
    assert torch.equal(whole.windows, parts.windows)


@pytest.mark.parametrize("width", [1, 17, 64, 65, 200])
def test_every_node_has_one_row_behind_its_whole_path(width: int) -> None:
    batch = [shallow(width, 15, seed) for seed in range(3)]
    cut = blocks_of(batch, 15)
    for row, parents in enumerate(batch):
        own = [node for block in cut.rows[row, :, cut.cut.path :].tolist() for node in block if node >= 0]
        assert sorted(own) == list(range(width))
        for block in cut.rows[row].tolist():
            present = set(block) - {NONE}
            assert all(set(reference.path(parents, node)) <= present for node in block[cut.cut.path :] if node >= 0)


def test_nothing_in_a_split_depends_on_values() -> None:
    parents = torch.empty(2, 100, dtype=torch.int64, device="meta")
    seen = torch.empty(2, 100, 100, dtype=torch.bool, device="meta")
    assert blocks.split(parents, parents, seen, blocks.cut(100, 15)).rows.shape == (2, 3, 64)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^longest is 113: recurrent layers take paths of at most 112 nodes$"):
        blocks.cut(200, 113)
    with pytest.raises(ValueError, match=r"^values is 5: it must be a multiple of keys, 2$"):
        gdn.Heads(2, 5, 16, 16, 4)
    with pytest.raises(ValueError, match=r"^key is 24: it must be a power of two of at least 16$"):
        gdn.Heads(2, 4, 24, 16, 4)
    with pytest.raises(ValueError, match=r"^taps is 1: it must be at least 2$"):
        gdn.Heads(2, 4, 16, 16, 1)


def test_scratch_of_a_node() -> None:
    """Qwen3.6-27B: 10240 channels of bfloat16 and two numbers of 48 heads, in 48 layers, not 144 MiB of states."""
    heads = gdn.Heads(keys=16, values=48, key=128, value=128, taps=4)
    assert gdn.Scratch.bytes_per_node(heads, 48, torch.bfloat16) == 48 * (20480 + 384) == 1001472
    scratch = gdn.Scratch.empty(heads, 2, 3, 5, torch.bfloat16, "meta")
    held = sum(one.numel() * one.itemsize for one in (scratch.inputs, scratch.decays, scratch.rates))
    assert held == 15 * gdn.Scratch.bytes_per_node(heads, 2, torch.bfloat16)
