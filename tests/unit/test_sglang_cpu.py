"""The stand-in for torchvision can be imported from and not be used."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "images" / "sglang_cpu" / "src"


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(SOURCE)
    yield importlib.import_module("torchvision")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


def test_functions_can_be_named_and_refuse_to_be_called(torchvision: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"torchvision\.io\.decode_jpeg: the CPU profile serves text only"):
        torchvision.io.decode_jpeg(b"")
    v2 = importlib.import_module("torchvision.transforms.v2.functional")
    with pytest.raises(NotImplementedError, match=r"torchvision\.transforms\.v2\.functional\.resize"):
        v2.resize(None)


def test_enumerations_have_torchvisions_values(torchvision: Any) -> None:
    assert torchvision.io.ImageReadMode.RGB.value == 3
    assert torchvision.transforms.InterpolationMode.BICUBIC.value == "bicubic"


def test_no_special_attribute_is_made_up(torchvision: Any) -> None:
    assert not hasattr(torchvision.io, "__wrapped__")
