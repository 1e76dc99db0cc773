"""How long building, masking and accepting a tree take, beside the heap of the reference on the CPU.

Needs torch alone: `python -m benchmarks.ddtree` with images/sglang_ddtree/src on PYTHONPATH. On a GPU each phase is
replayed as a CUDA graph, which also shows that it never waits for the host. Figures are medians of one run; compare
ratios across machines. Every shape's trees are compared with the reference's as well.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang_ddtree import accept, tree

from tests.ddtree import reference

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "build" / "bench-ddtree.json"
BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
BATCHES = (1, 8, 32)
DEPTH, TOP_K = 15, 64
"""A block of 16 with the root's place, as Qwen3.6-27B's drafter has."""
REPEATS, WARM_UPS = 50, 5


def drafted(batch: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log marginals that fall as a trained drafter's do, and candidates, each [batch, DEPTH, TOP_K]."""
    source = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(batch, DEPTH, 4096, generator=source, device=device) * 3
    marginals, tokens = logits.log_softmax(-1).topk(TOP_K, dim=-1)
    return marginals, tokens


def captured(work: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the replay of some work as a CUDA graph, which fails where it waits for the host; on a CPU the work."""
    if device == "cpu":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(work: Callable[[], Any], device: str) -> float:
    """Return the median time of some work, each call by itself."""
    times = []
    for turn in range(WARM_UPS + REPEATS):
        begin = time.perf_counter()
        if device == "cpu":
            work()
            took = time.perf_counter() - begin
        else:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            took = first.elapsed_time(last) / 1000
        if turn >= WARM_UPS:
            times.append(took * 1e6)
    return statistics.median(times)


def reference_microseconds(marginals: torch.Tensor, budget: int) -> float:
    """Return the median time that the heap takes for a batch on the CPU."""
    rows = marginals.cpu().tolist()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for one in rows:
            reference.best_first(one, budget, seed_chain=True)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def differences(built: tree.Tree, marginals: torch.Tensor, budget: int) -> int:
    """Return how many requests' trees are not the reference's, node by node."""
    wrong = 0
    for parents, one in zip(built.parents.tolist(), marginals.cpu().tolist(), strict=True):
        wanted = [node.parent for node in reference.best_first(one, budget, seed_chain=True)]
        wrong += parents[1:] != wanted
    return wrong


def measure(budget: int, batch: int, device: str) -> dict[str, float]:
    """Return the times of one shape in microseconds, and in how many requests it differs from the reference."""
    builder = tree.Builder(tree.Shape(budget, DEPTH, TOP_K), device)
    marginals, tokens = drafted(batch, budget * 100 + batch, device)
    roots = torch.zeros(batch, dtype=torch.int64, device=device)
    built = builder.build(marginals, tokens, roots)
    longest = builder.shape.longest
    seen = tree.visible(built.parents, longest)
    decided = torch.randint(0, 4096, built.tokens.shape, device=device)

    def build() -> Any:
        return builder.build(marginals, tokens, roots)

    def mask() -> Any:
        return tree.visible(built.parents, longest)

    def decide() -> Any:
        return accept.walk(built.tokens, built.parents, built.depths, seen, decided, longest)

    return {
        "budget": budget,
        "batch": batch,
        "build_eager": microseconds(build, device),
        "build": microseconds(captured(build, device), device),
        "mask": microseconds(captured(mask, device), device),
        "walk": microseconds(captured(decide, device), device),
        "reference_cpu": reference_microseconds(marginals, budget),
        "differ": differences(built, marginals, budget),
    }


def main() -> None:
    """Measure, print a table and write JSON; end with 1 where a tree differs from the reference's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULT, help="file of the figures")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where trees are built")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.ddtree: torch finds no GPU here. Run it on a machine with one, or with --device cpu.")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    rows = [measure(budget, batch, args.device) for batch in BATCHES for budget in BUDGETS]
    print(f"{where}, torch {torch.__version__}, block {DEPTH + 1}, top-k {TOP_K}, microseconds")
    columns = list(rows[0])
    print("  ".join(f"{name:>13}" for name in columns))
    for row in rows:
        print("  ".join(f"{row[name]:>13.0f}" for name in columns))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": rows}))
    wrong = sum(row["differ"] for row in rows)
    if wrong:
        sys.exit(f"benchmarks.ddtree: {wrong:.0f} trees differ from the reference's")


if __name__ == "__main__":
    main()
