"""Command line of the environments and images: `python -m images --help`."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from images import lock, lock_check
from images.matrix import MatrixError, Variant, find_stack, read


def rows(variants: Mapping[str, Variant]) -> list[str]:
    """Return a line for each stack of each variant."""
    return [
        f"{variant.name:<14}{stack.name:<9}CUDA {variant.cuda}  "
        f"torch {stack.packages['torch']:<14}sglang {stack.packages['sglang']:<14}"
        f"driver {max(variant.driver_floor.values())}  {'locked' if stack.locked else 'not locked'}"
        for variant in variants.values()
        for stack in variant.stacks.values()
    ]


def check(variants: Mapping[str, Variant], file: Path) -> list[str]:
    """Return what is wrong with a lock, by its name VARIANT-STACK.txt.

    Raises:
        MatrixError: the matrix has no such variant or stack.
    """
    variant, stack = find_stack(variants, file.stem)
    if not file.is_file():
        return [f"{file.name}: is not there. Make it with `python -m images lock`, or give the stack locked: false."]
    return [f"{file.name}: {one}" for one in lock_check.problems(variant, stack, file.read_text())]


def names(variants: Mapping[str, Variant]) -> list[str]:
    """Return VARIANT-STACK of each stack that has a lock."""
    return [f"{v.name}-{stack.name}" for v in variants.values() for stack in v.stacks.values() if stack.locked]


def show(variants: Mapping[str, Variant], _: argparse.Namespace) -> None:
    """Print the matrix."""
    print("\n".join(rows(variants)))


def check_all(variants: Mapping[str, Variant], args: argparse.Namespace) -> None:
    """Hold locks against the matrix."""
    expected = {lock_check.FOLDER / f"{name}.txt" for name in names(variants)}
    locks = args.locks or sorted(expected | set(lock_check.FOLDER.glob("cu*.txt")))
    if found := [problem for file in locks for problem in check(variants, file)]:
        sys.exit("\n".join(found))
    print("These agree with the matrix: " + ", ".join(file.name for file in locks))


def lock_all(variants: Mapping[str, Variant], args: argparse.Namespace) -> None:
    """Write locks."""
    for name in args.stacks or names(variants):
        variant, stack = find_stack(variants, name)
        lock.write(variant, stack, lock_check.FOLDER / f"{name}.txt", args.upgrade)


def main(words: list[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m images", description="Environments per CUDA version.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the variants and their stacks")
    checking = commands.add_parser("check", help="hold locks against the matrix")
    checking.add_argument(
        "locks", nargs="*", type=Path, metavar="LOCK", help="VARIANT-STACK.txt; all where none is given"
    )
    locking = commands.add_parser("lock", help="resolve stacks and write their locks")
    locking.add_argument(
        "stacks", nargs="*", metavar="VARIANT-STACK", help="such as cu130-serve; every locked one else"
    )
    locking.add_argument("--upgrade", action="store_true", help="to the newest versions that the matrix allows")
    args = parser.parse_args(words)
    try:
        {"list": show, "check": check_all, "lock": lock_all}[args.command](read(), args)
    except (MatrixError, lock.LockError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
