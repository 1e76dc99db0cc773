"""Command line: `python -m images list`, `python -m images check [LOCK...]`."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from images import lock_check
from images.matrix import MatrixError, Variant, find, read


def rows(variants: Mapping[str, Variant]) -> list[str]:
    """Return a line for each stack of each variant."""
    return [
        f"{variant.name:<14}{stack.name:<9}CUDA {variant.cuda}  "
        f"torch {stack.packages['torch']:<14}sglang {stack.packages['sglang']:<14}"
        f"driver {max(variant.driver_floor.values())}  {'locked' if stack.locked else 'not locked'}"
        for variant in variants.values()
        for stack in variant.stacks.values()
    ]


def check(variants: Mapping[str, Variant], lock: Path) -> list[str]:
    """Return what is wrong with a lock and the declaration beside it, by its name VARIANT-STACK.txt.

    Raises:
        MatrixError: the matrix has no such variant or stack.
    """
    name, _, kind = lock.stem.rpartition("-")
    variant = find(variants, name)
    stack = variant.stack(kind)
    found = []
    for file in (lock, lock.with_suffix(".in")):
        if not file.is_file():
            found.append(f"{file.name}: is not there. Make it, or give the stack locked: false.")
            continue
        text = file.read_text()
        wrong = (
            lock_check.problems(variant, stack, text) if file is lock else lock_check.declaration_problems(stack, text)
        )
        found += [f"{file.name}: {one}" for one in wrong]
    return found


def main(words: list[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m images", description="Environments per CUDA version.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the variants and their stacks")
    checking = commands.add_parser("check", help="hold locks against the matrix")
    checking.add_argument(
        "locks", nargs="*", type=Path, metavar="LOCK", help="VARIANT-STACK.txt; all where none is given"
    )
    args = parser.parse_args(words)
    try:
        variants = read()
        if args.command == "list":
            print("\n".join(rows(variants)))
            return
        stacks = [(variant.name, stack) for variant in variants.values() for stack in variant.stacks.values()]
        expected = {lock_check.FOLDER / f"{name}-{stack.name}.txt" for name, stack in stacks if stack.locked}
        locks = args.locks or sorted(expected | set(lock_check.FOLDER.glob("cu*.txt")))
        found = [problem for lock in locks for problem in check(variants, lock)]
    except MatrixError as error:
        sys.exit(str(error))
    if found:
        sys.exit("\n".join(found))
    print("These agree with the matrix: " + ", ".join(lock.name for lock in locks))


if __name__ == "__main__":
    main()
