"""`python -m sglang_ddtree check`: whether a target and a drafter fit, before anything is loaded."""

import argparse
import sys
from pathlib import Path

from sglang_ddtree import check


def main() -> int:
    """Print each fault on a line of its own and return 1, or say that there is none and return 0."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ddtree", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="compare configurations and weight headers of a target and a drafter")
    checking.add_argument("--target", type=Path, required=True, help="folder of the model that decides")
    checking.add_argument("--drafter", type=Path, required=True, help="folder of the DFlash model that proposes")
    args = parser.parse_args()
    found = check.faults(args.target, args.drafter)
    for fault in found:
        print(fault, file=sys.stderr)
    if not found:
        print(f"{args.drafter} fits {args.target}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
