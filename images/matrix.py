"""Reads images/matrix.yml, the table of CUDA variants."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("matrix.yml")
REQUIRED = ("torch", "sglang", "sglang-kernel", "flashinfer-python", "triton")
"""Packages whose version every variant gives, beside NCCL of its CUDA."""


class MatrixError(Exception):
    """The matrix is wrong, or has not what is asked of it; the text says where and what to do."""


@dataclass(frozen=True)
class Stack:
    """What an environment of a variant is for.

    Attributes:
        name: such as serve.
        requires: packages that are asked for; all others follow from them.
        locked: whether images/locks has its lock.
        packages: exact versions by package, the variant's own ones included.
    """

    name: str
    requires: tuple[str, ...]
    locked: bool
    packages: Mapping[str, str]


@dataclass(frozen=True)
class Variant:
    """One row of the matrix.

    Attributes:
        name: such as cu130.
        cuda: CUDA's version, major and minor.
        python: Python's, likewise.
        indexes: package index by package, for what the default index does not have for this CUDA.
        architectures: compute capabilities that its packages are built for.
        driver_floor: oldest driver by class of GPU (data_center, workstation, geforce).
        refused: reason by speculative algorithm that it cannot run.
        foreign: reason by package that is of another CUDA and belongs here all the same.
        excludes: packages that others ask for and that do not belong here, such as those of an extra for another CUDA.
        stacks: by name.
    """

    name: str
    cuda: str
    python: str
    indexes: Mapping[str, str]
    architectures: tuple[str, ...]
    driver_floor: Mapping[str, str]
    refused: Mapping[str, str]
    foreign: Mapping[str, str]
    excludes: tuple[str, ...]
    stacks: Mapping[str, Stack]

    @property
    def major(self) -> str:
        """CUDA's major version, as the names of packages end with it: 13 of -cu13."""
        return self.cuda.split(".")[0]

    @property
    def tag(self) -> str:
        """CUDA's version as local versions of packages have it: cu129 of 2.11.0+cu129."""
        return "cu" + self.cuda.replace(".", "")

    def stack(self, name: str) -> Stack:
        """Return a stack.

        Raises:
            MatrixError: the variant has none of that name.
        """
        if name not in self.stacks:
            raise MatrixError(f"{self.name} has no stack {name!r}. It has {', '.join(sorted(self.stacks))}.")
        return self.stacks[name]

    def require_algorithm(self, algorithm: str) -> None:
        """Refuse a speculative algorithm that this variant cannot run.

        Raises:
            MatrixError: with the reason.
        """
        if algorithm.upper() in self.refused:
            raise MatrixError(f"{self.name} refuses {algorithm.upper()}: {self.refused[algorithm.upper()]}.")


class _Fields:
    """Takes fields out of a mapping, each with its type; `close` refuses what is left."""

    def __init__(self, place: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise MatrixError(f"{place} is {value!r}. Make it a mapping.")
        self.place, self.left = place, dict(value)

    def take(self, name: str, kind: type) -> Any:
        if name not in self.left:
            raise MatrixError(f"{self.place} has no {name}. Add it.")
        value = self.left.pop(name)
        if not isinstance(value, kind):
            hint = " Put it in quotes." if kind is str else ""
            raise MatrixError(f"{self.place}.{name} is {value!r}, not of the type {kind.__name__}.{hint}")
        return value

    def version(self, name: str) -> str:
        text: str = self.take(name, str)
        if not re.fullmatch(r"\d+\.\d+", text):
            raise MatrixError(f"{self.place}.{name} is {text!r}. Write major and minor, such as 13.0.")
        return text

    def texts(self, name: str) -> dict[str, str]:
        inner = _Fields(f"{self.place}.{name}", self.take(name, dict))
        return {str(key): inner.take(key, str) for key in list(inner.left)}

    def items(self, name: str) -> tuple[str, ...]:
        values = self.take(name, list)
        if not values or not all(isinstance(value, str) for value in values):
            raise MatrixError(f"{self.place}.{name} is {values!r}. Make it a list of texts that is not empty.")
        return tuple(values)

    def close(self) -> None:
        if self.left:
            raise MatrixError(f"{self.place} has the unknown field {sorted(map(str, self.left))[0]}. Take it out.")


def _stack(place: str, name: str, value: Any, packages: Mapping[str, str]) -> Stack:
    fields = _Fields(place, value)
    own = fields.texts("packages") if "packages" in fields.left else {}
    stack = Stack(name, fields.items("requires"), fields.take("locked", bool), {**packages, **own})
    fields.close()
    if missing := [package for package in stack.requires if package not in stack.packages]:
        raise MatrixError(f"{place}.requires names {missing[0]}, which has no version. Add it to packages.")
    return stack


def _variant(name: str, value: Any) -> Variant:
    place = f"variants.{name}"
    fields = _Fields(place, value)
    packages = fields.texts("packages")
    stacks = fields.take("stacks", dict)
    variant = Variant(
        name=name,
        cuda=fields.version("cuda"),
        python=fields.version("python"),
        indexes=fields.texts("indexes"),
        architectures=fields.items("architectures"),
        driver_floor=fields.texts("driver_floor"),
        refused=fields.texts("refused"),
        foreign=fields.texts("foreign"),
        excludes=fields.items("excludes") if "excludes" in fields.left else (),
        stacks={},
    )
    fields.close()
    for package in (*REQUIRED, f"nvidia-nccl-cu{variant.major}"):
        if package not in packages:
            raise MatrixError(f"{place}.packages has no {package}. Add its version.")
    for package in variant.indexes:
        if package not in packages:
            raise MatrixError(f"{place}.indexes names {package}, which has no version. Add it to packages.")
    if not stacks:
        raise MatrixError(f"{place}.stacks is empty. Say what the variant is for, such as serve.")
    if not variant.driver_floor:
        raise MatrixError(f"{place}.driver_floor is empty. Give the oldest driver of each class of GPU.")
    made = {stack: _stack(f"{place}.stacks.{stack}", stack, given, packages) for stack, given in stacks.items()}
    return replace(variant, stacks=made)


def parse(text: str) -> dict[str, Variant]:
    """Return the variants of a matrix by name.

    Args:
        text: the file's content.

    Raises:
        MatrixError: a field is missing, unknown or of the wrong type.
    """
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise MatrixError(f"The matrix is not YAML: {error}") from error
    fields = _Fields("matrix", loaded)
    variants = {str(name): _variant(str(name), value) for name, value in fields.take("variants", dict).items()}
    fields.close()
    return variants


def read() -> dict[str, Variant]:
    """Return the variants of this project."""
    return parse(FILE.read_text())


def find(variants: Mapping[str, Variant], name: str) -> Variant:
    """Return a variant.

    Raises:
        MatrixError: there is none of that name.
    """
    if name not in variants:
        raise MatrixError(f"There is no variant {name!r}. Use one of {', '.join(variants)}.")
    return variants[name]


def find_stack(variants: Mapping[str, Variant], name: str) -> tuple[Variant, Stack]:
    """Return a stack and its variant by VARIANT-STACK, the name of its lock.

    Raises:
        MatrixError: there is none of that name.
    """
    variant_name, _, kind = name.rpartition("-")
    variant = find(variants, variant_name)
    return variant, variant.stack(kind)
