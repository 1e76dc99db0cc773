"""A target and a drafter that fit, and one fault at a time."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_ddtree import check

from lab import model
from tests.ddtree import models

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    model.make(target)
    models.make_drafter(drafter)
    return target, drafter


def edit(folder: Path, change: Callable[[Config], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def run(target: Path, drafter: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "sglang_ddtree", "check", "--target", str(target), "--drafter", str(drafter)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_pair_that_fits(pair: tuple[Path, Path]) -> None:
    assert check.faults(*pair) == []
    done = run(*pair)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_prints_a_line_for_each_fault_and_fails(pair: tuple[Path, Path]) -> None:
    edit(pair[1], lambda config: config.update(vocab_size=1000, block_size=1))
    done = run(*pair)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "drafter: vocabulary 1000, the target has 640",
        "drafter: block_size 1: a block holds its root and at least one more token",
    ]


def own(**values: Any) -> Callable[[Config], Any]:
    """Return a change of dflash_config; None takes a key away."""

    def change(config: Config) -> None:
        inner = config["dflash_config"] | values
        config["dflash_config"] = {name: value for name, value in inner.items() if value is not None}

    return change


def deep(ids: list[int]) -> tuple[Callable[[Config], Any], Callable[[Config], Any]]:
    """Return changes to a target of 64 layers and to a drafter that takes the states after these."""

    def change(config: Config) -> None:
        own(target_layer_ids=ids)(config)
        config["num_target_layers"] = 64

    return lambda config: config.update(num_hidden_layers=64), change


def keep(_config: Config) -> None:
    pass


LINES: dict[str, tuple[Callable[[Config], Any], Callable[[Config], Any], str]] = {
    "no DFlash drafter": (
        keep,
        lambda c: c.update(architectures=["LlamaForCausalLMEagle3"]),
        "drafter: LlamaForCausalLMEagle3 is not a DFlash drafter (DFlashDraftModel)",
    ),
    "target is silent": (lambda c: c.pop("num_hidden_layers"), keep, "target: num_hidden_layers is missing"),
    "drafter is silent": (keep, lambda c: c.pop("hidden_size"), "drafter: hidden_size is missing"),
    "embedding": (
        lambda c: c.update(vocab_size=641),
        lambda c: c.update(vocab_size=641),
        "target: embed_tokens.weight is [640, 128], config.json says [641, 128]",
    ),
    "vocabulary": (keep, lambda c: c.update(vocab_size=700), "drafter: vocabulary 700, the target has 640"),
    "no block size": (keep, lambda c: c.pop("block_size"), "drafter: block_size is missing"),
    "two block sizes": (
        keep,
        own(block_size=16),
        "drafter: block size different in two places: dflash_config.block_size 16 and block_size 8",
    ),
    "mask id": (keep, own(mask_token_id=640), "drafter: mask id 640 is outside the target's vocabulary of 640"),
    "mask id below": (keep, own(mask_token_id=-1), "drafter: mask id -1 is outside"),
    "no mask": (keep, own(mask_token_id=None), "drafter: dflash_config.mask_token_id is missing and the target's"),
    "two masks": (
        keep,
        own(mask_token="<|im_end|>"),  # noqa: S106
        "drafter: mask id 639, but <|im_end|> is 258 in the target's tokenizer",
    ),
    "other target": (
        keep,
        lambda c: c.update(num_target_layers=36),
        "drafter: trained on a target of 36 layers (num_target_layers), this one has 4",
    ),
    "layer outside": (keep, own(target_layer_ids=[0, 4]), "drafter: target_layer_ids [4] are outside the target's 4"),
    "last layer": (keep, own(target_layer_ids=[0, 3]), "drafter: target_layer_ids has the last layer 3"),
    "order": (keep, own(target_layer_ids=[2, 0]), "drafter: target_layer_ids [2, 0] do not rise"),
    "no list": (keep, own(target_layer_ids="0,2"), "drafter: target_layer_ids 0,2 is not a list of layers"),
    "convention": (*deep([2, 62]), "drafter: target_layer_ids [2, 62] count from 1"),
    "number of layer types": (
        keep,
        lambda c: c.update(layer_types=["full_attention"]),
        "drafter: layer_types has 1 entries for 2 layers",
    ),
    "layer type": (
        keep,
        lambda c: c.update(layer_types=["full_attention", "linear_attention"]),
        "drafter: layer type linear_attention is none of full_attention, sliding_attention",
    ),
    "window": (
        keep,
        lambda c: c.update(layer_types=["full_attention", "sliding_attention"]),
        "drafter: sliding_attention layers, but sliding_window is missing",
    ),
    "groups": (
        keep,
        lambda c: c.update(num_attention_heads=3, num_key_value_heads=2),
        "drafter: 3 heads do not divide among 2 key-value heads",
    ),
    "head size": (
        keep,
        lambda c: c.update(head_dim=16),
        "drafter: tensor layers.0.self_attn.q_norm.weight is [32], config.json says [16]",
    ),
    "features": (
        keep,
        own(target_layer_ids=[0, 1, 2]),
        "drafter: tensor fc.weight is [128, 256], config.json says [128, 384]",
    ),
    "fewer layers": (
        keep,
        lambda c: c.update(num_hidden_layers=1),
        "drafter: weights of layers [1], config.json says 1",
    ),
    "more layers": (
        keep,
        lambda c: c.update(num_hidden_layers=3),
        "drafter: tensor layers.2.input_layernorm.weight is missing",
    ),
    "hidden size": (keep, lambda c: c.update(hidden_size=64), "drafter: hidden size 64, the target has 128"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_fault_is_named(pair: tuple[Path, Path], name: str) -> None:
    in_target, in_drafter, line = LINES[name]
    edit(pair[0], in_target)
    edit(pair[1], in_drafter)
    found = check.faults(*pair)
    assert any(fault.startswith(line) for fault in found), found


def test_layers_by_the_rule_of_dflash_are_right(pair: tuple[Path, Path]) -> None:
    in_target, in_drafter = deep([1, 61])
    edit(pair[0], in_target)
    edit(pair[1], in_drafter)
    assert check.faults(*pair) == []
    assert check.spread(64, 5) == [1, 16, 31, 46, 61]


def test_a_tied_head_is_the_embedding(pair: tuple[Path, Path]) -> None:
    shapes: Shapes = {"model.embed_tokens.weight": (model.VOCABULARY, model.HIDDEN)}
    folder = pair[0].with_name("tied")
    models.write(folder, model.config(), shapes)
    assert check.faults(folder, pair[1]) == ["target: no tensor lm_head.weight, which the drafter needs as its head"]
    edit(folder, lambda config: config.update(tie_word_embeddings=True))
    assert check.faults(folder, pair[1]) == []


def test_a_language_model_inside_another_is_found(pair: tuple[Path, Path]) -> None:
    shapes: Shapes = {
        "model.language_model.embed_tokens.weight": (model.VOCABULARY, model.HIDDEN),
        "lm_head.weight": (model.VOCABULARY, model.HIDDEN),
    }
    folder = pair[0].with_name("outer")
    models.write(folder, {"model_type": "qwen3_5", "text_config": model.config()}, shapes)
    assert check.faults(folder, pair[1]) == []


def test_packed_weights_have_other_shapes(pair: tuple[Path, Path]) -> None:
    folder = pair[0].with_name("packed")
    shapes = {name: shape for name, shape in models.drafter_shapes().items() if "proj" not in name}
    models.write(folder, models.drafter_config(), shapes)
    assert check.faults(pair[0], folder)
    edit(folder, lambda config: config.update(quantization_config={"quant_method": "awq"}))
    assert check.faults(pair[0], folder) == []


@pytest.mark.parametrize("broken", ["folder", "config", "json", "weights", "header", "index"])
def test_files_that_are_missing_or_broken(pair: tuple[Path, Path], broken: str) -> None:
    target, drafter = pair
    weights = drafter / "model.safetensors"
    if broken == "folder":
        drafter = drafter / "org" / "name"
    elif broken == "config":
        (drafter / "config.json").unlink()
    elif broken == "json":
        (drafter / "config.json").write_text("{")
    elif broken == "weights":
        weights.unlink()
    elif broken == "header":
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        index = {"weight_map": dict.fromkeys(["fc.weight", "gone.weight"], weights.name)}
        (drafter / "model.safetensors.index.json").write_text(json.dumps(index))
    found = check.faults(target, drafter)
    assert len(found) == 1
    assert str(drafter) in found[0]
    assert "\n" not in found[0]
