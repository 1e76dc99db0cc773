"""A tiny Qwen3-type model with random weights and a byte-level tokenizer, so that a server has something real to load.

Its text means nothing; its shapes, files and code paths are those of a real model. Weights are normal with a standard
deviation of 0.2, large enough for greedy answers to vary with the prompt.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SEED = 0
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE = 4, 128, 4, 2, 32, 256
VOCABULARY = 640
"""Rows of the embedding; the tokenizer uses the first ones, as models with a padded vocabulary do."""

DEVIATION = 0.2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """Return the printable character that stands for each of the 256 bytes in byte-level tokenizers.

    The table is GPT-2's: printable Latin-1 characters stand for themselves, the others for 256 onwards.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """Return tokenizer.json: one token per byte, then the special tokens."""
    vocabulary = {character: number for number, character in enumerate(byte_characters())}
    added = [
        {"id": 256 + n, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for n, text in enumerate(SPECIAL)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None, "byte_fallback": False},
    }


def config() -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 258,
    }


def weights() -> dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]:
    """Return the tensors by name: matrices [out, in] normal, norms [size] one."""
    random = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        return (random.standard_normal((rows, columns)) * DEVIATION).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE),
            f"{prefix}.self_attn.q_norm.weight": np.ones(HEAD_SIZE, np.float32),
            f"{prefix}.self_attn.k_norm.weight": np.ones(HEAD_SIZE, np.float32),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
    # Only printable ASCII can win, so that an answer is text of the asked length: a byte is one token here.
    printable = np.isin(np.arange(VOCABULARY), [byte_characters().index(chr(code)) for code in range(33, 127)])
    tensors["lm_head.weight"][~printable] = 0
    return tensors


def make(target: Path) -> None:
    """Write the model to a folder that appears complete or not at all; one that is there stays.

    Args:
        target: the model's folder.
    """
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {
        "config.json": config(),
        "generation_config.json": {"eos_token_id": 258, "pad_token_id": 256},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (partial / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    save_file(weights(), partial / "model.safetensors", metadata={"format": "pt"})
    for file in partial.iterdir():
        file.chmod(0o644)
    partial.rename(target)
