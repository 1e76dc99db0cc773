"""Tiny targets and DFlash drafters with random weights, for SGLang to load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lab import model

LAYERS, BLOCK, LAYER_IDS = 2, 8, [0, 2]
MASK_ID = model.VOCABULARY - 1
INNER = model.INTERMEDIATE
QUERIES, VALUES = model.HEADS * model.HEAD_SIZE, model.KV_HEADS * model.HEAD_SIZE


def drafter_config() -> dict[str, Any]:
    """Return config.json of a drafter for the lab's model."""
    return {
        **model.config(),
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": LAYERS,
        "num_target_layers": model.LAYERS,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": LAYER_IDS},
    }


def drafter_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's tensors by name."""
    hidden, size = model.HIDDEN, model.HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(LAYER_IDS) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.input_layernorm.weight": (hidden,),
            f"layers.{layer}.post_attention_layernorm.weight": (hidden,),
            f"layers.{layer}.self_attn.q_proj.weight": (QUERIES, hidden),
            f"layers.{layer}.self_attn.k_proj.weight": (VALUES, hidden),
            f"layers.{layer}.self_attn.v_proj.weight": (VALUES, hidden),
            f"layers.{layer}.self_attn.o_proj.weight": (hidden, QUERIES),
            f"layers.{layer}.self_attn.q_norm.weight": (size,),
            f"layers.{layer}.self_attn.k_norm.weight": (size,),
            f"layers.{layer}.mlp.gate_proj.weight": (INNER, hidden),
            f"layers.{layer}.mlp.up_proj.weight": (INNER, hidden),
            f"layers.{layer}.mlp.down_proj.weight": (hidden, INNER),
        }
    return shapes


def write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int = 1) -> None:
    """Write a model with random matrices and norms of one."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {
            name: np.ones(shape, np.float32)
            if len(shape) == 1
            else (random.standard_normal(shape) * model.DEVIATION).astype(np.float32)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def make_drafter(folder: Path) -> None:
    """Write a drafter for the lab's model."""
    write(folder, drafter_config(), drafter_shapes())
