"""Trees that are hard on masks, links and walks, and any others."""

import random

from hypothesis import strategies as st

STAR = [-1] + [0] * 8
CHAIN = list(range(-1, 8))
COMB = [-1, 0, 0, 1, 1, 3, 3, 5, 5]
"""A spine with a tooth at each of its nodes."""
BACK_TO_FRONT = [-1, 0, 0, 0, 3, 2, 1, 1, 2, 3]
"""Children in the opposite order of their parents."""
FULL = [-1, *[(node - 1) // 3 for node in range(1, 40)]]
ALONE = [-1]

ADVERSARIAL = {"star": STAR, "chain": CHAIN, "comb": COMB, "back to front": BACK_TO_FRONT, "full": FULL, "root": ALONE}


def same_width(width: int, count: int, seed: int) -> list[list[int]]:
    """Return random trees of one width."""
    source = random.Random(seed)  # noqa: S311
    return [[-1, *[source.randrange(node) for node in range(1, width)]] for _ in range(count)]


parents = st.integers(1, 24).flatmap(
    lambda width: st.tuples(*[st.just(-1)] + [st.integers(0, node - 1) for node in range(1, width)]).map(list)
)
