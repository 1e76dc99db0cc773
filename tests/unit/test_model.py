"""The lab's model is the same each time and has the shapes its configuration claims."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lab import model


def test_two_makings_are_equal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model.make(tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_shapes_follow_the_configuration(tmp_path: Path) -> None:
    model.make(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    heads, hidden = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], hidden)
    assert tensors["model.layers.3.self_attn.q_proj.weight"].shape == (heads, hidden)
    assert len(tensors) == 3 + 11 * config["num_hidden_layers"]


def test_only_printable_characters_can_be_answered() -> None:
    rows = np.flatnonzero(np.any(model.weights()["lm_head.weight"] != 0, axis=1))
    characters = model.byte_characters()
    assert [characters[row] for row in rows] == [chr(code) for code in range(33, 127)]


def test_every_byte_is_one_token() -> None:
    vocabulary = model.tokenizer()["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == ord("A")
    assert vocabulary["Ġ"] == ord(" ")
