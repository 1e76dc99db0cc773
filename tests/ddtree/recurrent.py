"""The recurrent layers of a tree as they are defined: one node after another, each from its parent's state."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layer:
    """A layer's parameters: [channels, taps], [channels] or None, [heads], [heads]."""

    weights: torch.Tensor
    bias: torch.Tensor | None
    decay_logs: torch.Tensor
    decay_biases: torch.Tensor


@dataclass(frozen=True)
class Node:
    """What a node has: its output [heads, value], state [heads, value, key] and window [channels, taps - 1]."""

    output: torch.Tensor
    state: torch.Tensor
    window: torch.Tensor


def convolved(window: torch.Tensor, inputs: torch.Tensor, layer: Layer, rounding: torch.dtype) -> torch.Tensor:
    """Return the activated convolution of a window and the input after it, [channels]."""
    seen = torch.cat([window, inputs.unsqueeze(1)], 1).to(layer.weights.dtype)
    total = (seen * layer.weights).sum(1)
    if layer.bias is not None:
        total = total + layer.bias
    return torch.nn.functional.silu(total).to(rounding).to(total.dtype)


def step(
    before: torch.Tensor, mixed: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, layer: Layer, key_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a node's output and state, from its parent's state [heads, value, key]."""
    heads, value, key = before.shape
    q, k, v = mixed.split([key_heads * key, key_heads * key, heads * value])

    def directions(flat: torch.Tensor) -> torch.Tensor:
        rows = flat.view(key_heads, key)
        rows = rows / (rows.square().sum(1, keepdim=True) + 1e-6).sqrt()
        return rows.repeat_interleave(heads // key_heads, 0)

    decay = (-layer.decay_logs.exp() * torch.nn.functional.softplus(gate + layer.decay_biases)).exp()
    state = before * decay[:, None, None]
    k = directions(k)
    update = beta.sigmoid()[:, None] * (v.view(heads, value) - torch.einsum("hvk,hk->hv", state, k))
    state = state + torch.einsum("hv,hk->hvk", update, k)
    return torch.einsum("hvk,hk->hv", state, directions(q) * key**-0.5), state


def tree(
    parents: list[int],
    inputs: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    state: torch.Tensor,
    window: torch.Tensor,
    layer: Layer,
    key_heads: int,
    rounding: torch.dtype,
) -> list[Node]:
    """Return what every node has.

    Args:
        parents: of the nodes, each before its children; the root's is -1.
        inputs: [width, channels] of the convolution.
        gates: [width, heads].
        betas: [width, heads].
        state: before the root.
        window: before the root.
        layer: its parameters; all is computed in their type.
        key_heads: heads of queries and keys.
        rounding: type of the convolution's outputs.
    """
    done: list[Node] = []
    for node, parent in enumerate(parents):
        before = Node(state[..., 0], state, window) if parent < 0 else done[parent]
        mixed = convolved(before.window, inputs[node], layer, rounding)
        output, after = step(before.state, mixed, gates[node], betas[node], layer, key_heads)
        moved = torch.cat([before.window, inputs[node].unsqueeze(1)], 1)[:, 1:]
        done.append(Node(output, after, moved))
    return done
