"""Holds a lock against the matrix."""

import re
from collections.abc import Iterator
from pathlib import Path

from images.matrix import Stack, Variant

FOLDER = Path(__file__).with_name("locks")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.+!-]+)(?:\s*;.*)?")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?!\S)")
SUFFIX = re.compile(r"-cu(\d{2})(\d?)(?=-|$)")
COMPILERS = {
    "12": ("nvidia-cuda-nvcc-cu12",),
    "13": ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"),
}
"""CUDA's compiler by major version: what a newer one writes (PTX), the driver of an older CUDA does not read."""
OF_CUDA = re.compile(r"cuda-toolkit|nvidia-cuda-(runtime|nvrtc|cupti)(-cu\d+)?|nvidia-nv(jitlink|tx)(-cu\d+)?")
"""What the variant's torch requires of CUDA itself. Disassembler and headers may be newer."""


def requirements(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of a requirements file without options, joined, without comments, and whether it is hashed."""
    lines = (line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))
    for line in filter(str.strip, lines):
        yield line.split(" --hash")[0].split(" #")[0].strip(), bool(HASH.search(line))


def cuda_problems(variant: Variant, name: str, version: str) -> Iterator[str]:
    """Yield in what a locked package belongs to another CUDA than the variant's."""
    local = re.search(r"\+(?:.*\.)?(cu\d+)", version)
    if local and local[1] != variant.tag:
        yield f"{name}=={version} is built for {local[1]}, not {variant.tag}. Lock it from its own index."
    suffix = SUFFIX.search(name)
    of_other = suffix and (suffix[1] != variant.major or (suffix[2] and f"cu{suffix[1]}{suffix[2]}" != variant.tag))
    if of_other and name not in variant.foreign:
        yield f"{name} is of another CUDA than {variant.cuda}. Find what requires it, or give the reason in foreign."
    if version.startswith(f"{variant.cuda}."):
        return
    if OF_CUDA.fullmatch(name):
        yield f"{name}=={version} is not CUDA {variant.cuda}. Lock what the variant's torch requires."
    if name in COMPILERS[variant.major]:
        yield (
            f"{name}=={version} compiles for a newer or older CUDA than {variant.cuda}, which the variant's driver may "
            "not read. Lock it with `python -m images lock`."
        )


def problems(variant: Variant, stack: Stack, text: str) -> list[str]:
    """Return what is wrong with a lock, each with its remedy.

    Args:
        variant: the variant that it is for.
        stack: the stack, likewise.
        text: its content.
    """
    found, locked = [], dict[str, str]()
    for line, hashed in requirements(text):
        match = REQUIREMENT.fullmatch(line)
        if match is None:
            found.append(f"{line!r} is no requirement of one exact version. A lock has neither options nor addresses.")
            continue
        name, version = re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"]
        if not hashed:
            found.append(f"{name}=={version} has no sha256 hash. Make the lock with --generate-hashes.")
        if name in locked:
            found.append(f"{name} is there twice, {locked[name]} and {version}. Lock one platform at a time.")
        locked[name] = version
        found += cuda_problems(variant, name, version)
    for name, version in stack.packages.items():
        other = locked.get(name)
        if other is None:
            found.append(f"{name} is missing; the matrix has {version}. Lock again.")
        elif other != version:
            index = variant.indexes.get(name)
            wrong = bool(index) and other == version.split("+")[0]
            found.append(
                f"{name}=={other} is from the wrong index: {version} is wanted, from {index}. Lock it from there."
                if wrong
                else f"{name}=={other}, but the matrix has {version}. Lock again, or change the matrix."
            )
    return found
