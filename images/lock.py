"""Resolves a stack's environment with uv and writes its lock."""

import subprocess
import sys
import tempfile
from pathlib import Path

from images.lock_check import COMPILERS
from images.matrix import Stack, Variant

PLATFORM = "x86_64-manylinux_2_36"
"""Debian 12's C library; a wheel for an older one is taken too."""


class LockError(Exception):
    """No lock was made; the text says why and what to do."""


def declaration(variant: Variant, stack: Stack) -> str:
    """Return the pyproject.toml that a stack is resolved from.

    A package with an index of its own comes from there only: the index is explicit, so it supplies nothing else, and
    the default index is not asked for the package. uv applies an index to named requirements, so they are named.
    """
    named = [name for name in stack.packages if name in stack.requires or name in variant.indexes]
    pins = {**stack.packages, **dict.fromkeys(COMPILERS[variant.major], f"{variant.cuda}.*")}
    lines = [
        "[project]",
        f'name = "{variant.name}-{stack.name}"',
        'version = "0"',
        f'requires-python = "=={variant.python}.*"',
        f"dependencies = {[f'{name}=={stack.packages[name]}' for name in named]}",
        "[tool.uv]",
        f"constraint-dependencies = {[f'{name}=={version}' for name, version in pins.items()]}",
        "[tool.uv.sources]",
        *(f'{name} = {{ index = "{name}" }}' for name in variant.indexes),
    ]
    for name, url in variant.indexes.items():
        lines += ["[[tool.uv.index]]", f'name = "{name}"', f'url = "{url}"', "explicit = true"]
    return "\n".join(lines) + "\n"


def write(variant: Variant, stack: Stack, target: Path, upgrade: bool) -> None:
    """Resolve a stack and write its lock; where that fails the former lock stays.

    Args:
        variant: the row.
        stack: the stack.
        target: the lock.
        upgrade: take the newest versions that are allowed, not those of the former lock.

    Raises:
        LockError: no set of versions fits, or an index does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "pyproject.toml").write_text(declaration(variant, stack))
        (work / "excludes.txt").write_text("\n".join(variant.excludes))
        made = work / target.name
        if target.exists():
            made.write_text(target.read_text())
        words = ["--quiet", "--generate-hashes", "--no-header", "--no-emit-index-url", "--python-platform", PLATFORM]
        words += [
            "--excludes",
            "excludes.txt",
            "--python-version",
            variant.python,
            "--output-file",
            made.name,
            *(["--upgrade"] if upgrade else []),
        ]
        uv = Path(sys.executable).with_name("uv")
        done = subprocess.run(
            [uv, "pip", "compile", "pyproject.toml", *words], cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode:
            own = "; ".join(f"{name} from {url}" for name, url in variant.indexes.items())
            raise LockError(
                f"{target.name} was not made" + (f" ({own})" if own else "") + f": {done.stderr.strip()}\n"
                "Correct the row in images/matrix.yml, or run it where its indexes answer."
            )
        target.write_text(made.read_text())
