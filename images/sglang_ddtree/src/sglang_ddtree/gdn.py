"""Gated delta networks under a tree, without a state of every node.

A head's state after a node is the parent's, decayed, and a product of rank one:

    S = d S_p + u k^T        d = exp(g)        u = beta (v - d S_p k)        output = S q

So a node's state is the root's and one pair (u, k) of each node on its path, and for a block of rows (`blocks`) all u
are the solution of one triangular system, with G the sum of g on a path and i below j:

    (I + A) U = beta (V - e^G K S_0^T)        A_ij = beta_i e^(G_i - G_j) k_i k_j

A holds no pair of one depth. The inverse of I + A is put together from those of halves of the depths, doubling their
number: what arises on the way are inverses of parts of it, as bounded as the whole, which powers of A are not.

What a node leaves behind for the commit is the input of its convolution, g and beta: `Scratch`. The commit runs the
recurrence over the accepted path anew, one step after another in float32 as plain decoding does, and no rounding of the
verification gets into a state.
"""

from dataclasses import dataclass

import torch
import triton

from sglang_ddtree import gdn_kernels
from sglang_ddtree.blocks import Blocks


@dataclass(frozen=True)
class Heads:
    """Heads of a layer, on one rank.

    Attributes:
        keys: heads of queries and keys.
        values: heads of values; each head of keys serves as many of them.
        key: dimensions of a query and a key.
        value: dimensions of a value.
        taps: inputs that the convolution before them sees.
    """

    keys: int
    values: int
    key: int
    value: int
    taps: int

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot do."""
        if self.keys < 1 or self.values % self.keys:
            raise ValueError(f"values is {self.values}: it must be a multiple of keys, {self.keys}")
        for name in ("key", "value"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}: it must be a power of two of at least 16")
        if self.taps < 2:
            raise ValueError(f"taps is {self.taps}: it must be at least 2")

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys * self.key + self.values * self.value


@dataclass(frozen=True)
class Scratch:
    """What nodes leave behind for the commit.

    Attributes:
        inputs: [layers, requests, width, channels] of the convolutions.
        decays: [layers, requests, heads of values, width] g of the nodes.
        rates: beta of the nodes.
    """

    inputs: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor

    @staticmethod
    def bytes_per_node(heads: Heads, layers: int, activations: torch.dtype) -> int:
        """Return what one node of one request takes.

        Args:
            heads: of a layer.
            layers: of this kind in the model.
            activations: type of the convolutions' inputs.
        """
        return layers * (heads.channels * activations.itemsize + 2 * heads.values * torch.float32.itemsize)

    @classmethod
    def empty(
        cls, heads: Heads, layers: int, requests: int, width: int, activations: torch.dtype, device: torch.device | str
    ) -> "Scratch":
        """Return scratch memory.

        Args:
            heads: of a layer.
            layers: of this kind in the model.
            requests: most in one pass.
            width: nodes of every tree with its root.
            activations: type of the convolutions' inputs.
            device: where it is.
        """
        inputs = torch.empty(layers, requests, width, heads.channels, dtype=activations, device=device)
        decays = torch.empty(layers, requests, heads.values, width, device=device)
        return cls(inputs, decays, torch.empty_like(decays))


@dataclass(frozen=True)
class Convolution:
    """A short convolution's parameters, of one layer or of all, with the layers first.

    Attributes:
        weights: [..., channels, taps], the oldest input's first.
        bias: [..., channels], or None.
        silu: the outputs are activated.
    """

    weights: torch.Tensor
    bias: torch.Tensor | None
    silu: bool = True


@dataclass(frozen=True)
class Gates:
    """What decides a layer's decay and rate.

    Attributes:
        decay_logs: [heads of values] A_log.
        decay_biases: [heads of values] dt_bias.
    """

    decay_logs: torch.Tensor
    decay_biases: torch.Tensor


@dataclass(frozen=True)
class Track:
    """States to keep on the way, for a cache of prefixes.

    Attributes:
        slots: [batch] where.
        lengths: [batch] after how many nodes of the path; below one, not at all.
    """

    slots: torch.Tensor
    lengths: torch.Tensor


def convolve(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    slots: torch.Tensor,
    parameters: Convolution,
    trees: Blocks,
    kept: torch.Tensor,
) -> torch.Tensor:
    """Return each node's convolution over its own path, [batch, width, channels], and keep its input.

    Args:
        inputs: [batch, width, channels]; the channels of a node lie together.
        windows: [slots, channels, taps - 1] last inputs before the roots, the oldest first.
        slots: [batch] of the requests, below zero for those that are padding.
        parameters: of the layer.
        trees: of the batch.
        kept: [requests, width, channels] of a layer's scratch.
    """
    batch, width, channels = inputs.shape
    taps = parameters.weights.shape[-1]
    out = torch.empty(batch, width, channels, dtype=inputs.dtype, device=inputs.device)
    nodes, block = min(8, triton.next_power_of_2(width)), 256
    gdn_kernels.convolve[(triton.cdiv(channels, block), triton.cdiv(width, nodes), batch)](
        inputs,
        kept,
        out,
        windows,
        slots,
        parameters.weights,
        parameters.weights if parameters.bias is None else parameters.bias,
        trees.parents,
        width,
        channels,
        inputs.stride(0),
        inputs.stride(1),
        kept.stride(0),
        *windows.stride(),
        TAPS=taps,
        HAS_BIAS=parameters.bias is not None,
        HAS_SILU=parameters.silu,
        NODES=nodes,
        CHANNELS=block,
    )
    return out


def verify(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    parameters: Gates,
    states: torch.Tensor,
    slots: torch.Tensor,
    heads: Heads,
    trees: Blocks,
    scratch: Scratch,
    layer: int,
) -> torch.Tensor:
    """Return each node's output, [batch, width, heads of values, value]; states stay as they are.

    Args:
        mixed: [batch, width, channels] queries, keys and values, from `convolve`.
        gates: [batch, width, heads of values] inputs of the decays.
        betas: inputs of the rates, of the same shape.
        parameters: of the layer.
        states: [slots, heads of values, value, key], each slot's together.
        slots: [batch] of the requests, below zero for those that are padding.
        heads: of the layer.
        trees: of the batch.
        scratch: where g and beta are kept.
        layer: which of the scratch's layers this is.
    """
    batch, width, _ = mixed.shape
    out = torch.empty(batch, width, heads.values, heads.value, dtype=mixed.dtype, device=mixed.device)
    how = trees.cut
    columns = min(heads.value, _columns(heads, how.blocks * batch))
    gdn_kernels.verify[(heads.values * (heads.value // columns), how.blocks, batch)](
        mixed,
        gates,
        betas,
        parameters.decay_logs,
        parameters.decay_biases,
        states,
        slots,
        trees.rows,
        trees.firsts,
        trees.ends,
        trees.depths,
        out,
        scratch.decays[layer],
        scratch.rates[layer],
        width,
        heads.key**-0.5,
        gates.stride(-2),
        betas.stride(-2),
        states.stride(0),
        KEY_HEADS=heads.keys,
        VALUE_HEADS=heads.values,
        KEY=heads.key,
        VALUE=heads.value,
        ROWS=how.rows,
        PATH=how.path,
        LEVELS=how.levels,
        COLUMNS=columns,
        EXACT=mixed.dtype != torch.bfloat16,
        num_warps=4 if how.rows <= 64 else 8,
    )
    return out


def _columns(heads: Heads, blocks: int) -> int:
    """Return the columns of values that a program takes: all, unless that leaves processors without work."""
    return 64 if heads.values * blocks >= 256 else 32


def commit(
    states: torch.Tensor,
    windows: torch.Tensor,
    slots: torch.Tensor,
    heads: Heads,
    parameters: Convolution,
    scratch: Scratch,
    paths: torch.Tensor,
    lengths: torch.Tensor,
    track: Track | None = None,
) -> None:
    """Move the states and windows of all layers to the end of the accepted paths, in place.

    Args:
        states: [layers, slots, heads of values, value, key], each slot's together.
        windows: [layers, slots, channels, taps - 1].
        slots: [batch] of the requests, below zero for those that are padding.
        heads: of the layers.
        parameters: of all layers.
        scratch: what the nodes of the last verification left behind.
        paths: [batch, longest] places of the accepted nodes, the root first.
        lengths: [batch] how many there are; none where a request is to stay as it is.
        track: states to keep on the way.
    """
    layers, batch = states.shape[0], slots.shape[0]
    columns, block = min(heads.value, 32), 256
    flags = {"TAPS": heads.taps, "HAS_TRACK": track is not None}
    tracked = (slots, lengths) if track is None else (track.slots, track.lengths)
    gdn_kernels.commit_states[(heads.values * (heads.value // columns), batch, layers)](
        scratch.inputs,
        scratch.decays,
        scratch.rates,
        states,
        windows,
        slots,
        parameters.weights,
        parameters.weights if parameters.bias is None else parameters.bias,
        paths,
        lengths,
        *tracked,
        scratch.inputs.shape[2],
        paths.stride(0),
        scratch.inputs.stride(0),
        scratch.decays.stride(0),
        states.stride(0),
        states.stride(1),
        *windows.stride(),
        KEY_HEADS=heads.keys,
        VALUE_HEADS=heads.values,
        KEY=heads.key,
        VALUE=heads.value,
        HAS_BIAS=parameters.bias is not None,
        HAS_SILU=parameters.silu,
        COLUMNS=columns,
        **flags,
    )
    gdn_kernels.commit_windows[(triton.cdiv(heads.channels, block), batch, layers)](
        scratch.inputs,
        windows,
        slots,
        paths,
        lengths,
        *tracked,
        scratch.inputs.shape[2],
        heads.channels,
        paths.stride(0),
        scratch.inputs.stride(0),
        *windows.stride(),
        TAPS_UP=triton.next_power_of_2(heads.taps - 1),
        CHANNELS=block,
        **flags,
    )
