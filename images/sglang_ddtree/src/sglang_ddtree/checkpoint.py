"""What a folder with a model says of itself: its configuration and the headers of its weights. Nothing is loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A folder that is no model; the message is one line."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's description.

    Attributes:
        config: config.json.
        text: the part of it that describes the language model.
        shapes: of the tensors, by name.
        bytes: of all tensors.
    """

    config: dict[str, Any]
    text: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    bytes: int

    @property
    def quantized(self) -> bool:
        """Whether weights are packed, so that their shapes are not those of the layers."""
        return "quantization_config" in self.config or "quantization_config" in self.text


def _json(file: Path) -> dict[str, Any]:
    """Return an object from a file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{file} cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no object")
    return content


def config_of(folder: Path) -> dict[str, Any]:
    """Return config.json of a model.

    Raises:
        CheckpointError: there is no such folder or file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: a model is checked where it lies, so download it first")
    return _json(folder / CONFIG)


def read(folder: Path) -> Checkpoint:
    """Return the description of a model.

    Args:
        folder: with config.json and *.safetensors, as transformers writes them.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    config = config_of(folder)
    if (folder / INDEX).is_file():
        indexed: dict[str, str] = _json(folder / INDEX).get("weight_map", {})
        files = sorted({folder / name for name in indexed.values()})
    else:
        indexed = {}
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    lost = sorted(set(indexed) - set(shapes))
    if lost:
        raise CheckpointError(f"{folder / INDEX} names {lost[0]}, which no file holds ({len(lost)} such tensors)")
    size = sum(file.stat().st_size for file in files)
    return Checkpoint(config, config.get("text_config", config), shapes, size)
