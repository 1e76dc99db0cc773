"""What of a tree is accepted: the target decides after every node, and the walk follows a child that was decided.

Each decision is the target's own, greedy or a draw from the distribution that it would be drawn from without a tree.
The walk only reads decisions of nodes whose path was decided, so what comes out has the target's distribution, whatever
the drafter's was.
"""

from dataclasses import dataclass

import torch

from sglang_ddtree.tree import NONE


@dataclass(frozen=True)
class Walk:
    """What of the trees of a batch is accepted.

    Attributes:
        nodes: [batch, longest path with its root] places of the accepted nodes, the root first, NONE after the last.
        lengths: [batch] how many there are, the root among them: the tokens that this round decided.
    """

    nodes: torch.Tensor
    lengths: torch.Tensor


def walk(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    seen: torch.Tensor,
    decided: torch.Tensor,
    longest: int,
) -> Walk:
    """Return the accepted nodes: those on whose path every node is what was decided after its parent.

    Args:
        tokens: [batch, width] of the nodes; siblings differ.
        parents: places of the parents, NONE for the root.
        depths: distances to the root.
        seen: [batch, width, width], from `tree.visible`.
        decided: [batch, width] token that the target decided after each node.
        longest: nodes beside the root that a path can have.
    """
    right = tokens == decided.gather(1, parents.clamp(min=0))
    right |= parents == NONE
    accepted = (right.unsqueeze(1) | ~seen).all(2)
    # Accepted nodes are on one path, so each has a depth of its own. What is not goes to a column that is cut off.
    columns = depths.masked_fill(~accepted, longest + 1)
    nodes = torch.full((tokens.shape[0], longest + 2), NONE, dtype=torch.int64, device=tokens.device)
    nodes.scatter_(1, columns, torch.arange(tokens.shape[1], device=tokens.device).expand_as(columns))
    return Walk(nodes[:, :-1], accepted.sum(1))


@dataclass(frozen=True)
class Sampling:
    """How requests want their tokens drawn.

    Attributes:
        temperatures: [batch].
        top_ks: [batch] most candidates; 1 is greedy.
        top_ps: [batch] share of the mass that the candidates before the last one kept do not exceed.
        min_ps: [batch] least probability as a share of the highest.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the probabilities of the tokens after each node, [batch, width, vocabulary].

    The rules are those of SGLang's sampler on PyTorch: each is applied to the probabilities at the temperature, sorted,
    and the rest of them is scaled up to one.

    Args:
        logits: the target's, [batch, width, vocabulary].
        sampling: how requests want their tokens drawn.
    """

    def per_request(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1, 1, 1)

    ordered, tokens = (logits.float() / per_request(sampling.temperatures)).softmax(-1).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.arange(logits.shape[-1], device=logits.device) < per_request(sampling.top_ks)
    kept = kept & (before <= per_request(sampling.top_ps))
    kept &= ordered >= ordered[..., :1] * per_request(sampling.min_ps)
    ordered = ordered.masked_fill(~kept, 0)
    return torch.zeros_like(ordered).scatter_(-1, tokens, ordered / ordered.sum(-1, keepdim=True))


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return one token for each row, by a race: waiting times with the probabilities as rates, and the first one wins.

    Args:
        probabilities: [..., vocabulary]; rows need not sum to one.
        generator: where the numbers come from.
    """
    times = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / times.clamp_(min=torch.finfo(times.dtype).tiny)).argmax(-1)


def decide(logits: torch.Tensor, sampling: Sampling | None, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return what the target decides after each node, [batch, width].

    Args:
        logits: the target's, [batch, width, vocabulary].
        sampling: how requests want their tokens drawn; None where all are greedy.
        generator: where the numbers come from.
    """
    greedy = logits.argmax(-1)
    if sampling is None:
        return greedy
    return torch.where(sampling.top_ks.unsqueeze(1) <= 1, greedy, draw(distribution(logits, sampling), generator))
