"""Whether a target and a DFlash drafter fit each other, from their configurations and the headers of their weights.

A drafter that does not fit often loads and drafts: at an acceptance of a hundredth. What is compared here is what
SGLang 0.5.17 reads (speculative/dflash_utils.py, models/dflash.py) and what it takes on trust.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ddtree.checkpoint import Checkpoint, CheckpointError, read

ARCHITECTURES = ("DFlashDraftModel",)
"""Drafters that propose a block from mask tokens and the target's hidden states."""

MASK_TOKEN = "<|MASK|>"  # noqa: S105
"""What SGLang takes where a drafter names none."""

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Drafter:
    """What a DFlash drafter's configuration says, None or empty where it is silent.

    Attributes:
        block_sizes: tokens of a block, by the place that says so.
        mask_id: token that stands for what is not known yet.
        mask_token: its text.
        layer_ids: layers of the target after which hidden states are taken, from 0.
        target_layers: layers of the target that it was trained with.
    """

    block_sizes: dict[str, int]
    mask_id: int | None
    mask_token: str
    layer_ids: list[int] | None
    target_layers: int | None

    @property
    def block_size(self) -> int | None:
        """Tokens of a block, None where it is unknown or said differently in two places."""
        sizes = set(self.block_sizes.values())
        return sizes.pop() if len(sizes) == 1 else None


def drafter_of(config: dict[str, Any]) -> Drafter:
    """Return what a drafter's config.json says.

    Args:
        config: its content.
    """
    own = config.get("dflash_config") or {}

    def value(name: str) -> Any:
        return own.get(name, config.get(name))

    places = {"dflash_config.block_size": own.get("block_size"), "block_size": config.get("block_size")}
    return Drafter(
        block_sizes={place: size for place, size in places.items() if size is not None},
        mask_id=own.get("mask_token_id"),
        mask_token=own.get("mask_token") or MASK_TOKEN,
        layer_ids=value("target_layer_ids"),
        target_layers=value("num_target_layers"),
    )


def spread(target_layers: int, draft_layers: int) -> list[int]:
    """Return the layers that DFlash takes hidden states after where nothing else is said.

    Args:
        target_layers: of the target, at least 4.
        draft_layers: of the drafter.
    """
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + place * (target_layers - 4) / (draft_layers - 1)) for place in range(draft_layers)]


def faults(target: Path, drafter: Path) -> list[str]:
    """Return what is wrong, a line for each fault, nothing where the two fit.

    Args:
        target: folder of the model that decides.
        drafter: folder of the DFlash model that proposes.
    """
    found: list[str] = []
    models = []
    for folder in (target, drafter):
        try:
            models.append(read(folder))
        except CheckpointError as error:
            found.append(str(error))
    if found:
        return found
    base, draft = models
    architectures = draft.config.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        named = ", ".join(architectures) or "no architecture"
        return [f"drafter: {named} is not a DFlash drafter ({', '.join(ARCHITECTURES)})"]
    missing = [
        f"{role}: {name} is missing in config.json"
        for role, text, names in (
            ("target", base.text, ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")),
            ("drafter", draft.text, ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")),
        )
        for name in names
        if not isinstance(text.get(name), int)
    ]
    if missing:
        return missing
    said = drafter_of(draft.config)
    return [
        *_target(base),
        *_sizes(base, draft),
        *_block(said),
        *_mask(said, base, target),
        *_layers(said, base, draft),
        *_attention(draft),
        *_weights(said, draft),
    ]


def _target(base: Checkpoint) -> Iterator[str]:
    """Yield the target's own faults: the drafter reads its embedding and uses its head."""
    hidden, vocabulary = base.text["hidden_size"], base.text["vocab_size"]
    wanted = {"embed_tokens.weight": "embedding"}
    if not base.config.get("tie_word_embeddings", base.text.get("tie_word_embeddings", False)):
        wanted["lm_head.weight"] = "head"
    for ending, what in wanted.items():
        shapes = [shape for name, shape in base.shapes.items() if f".{name}".endswith(f".{ending}")]
        if not shapes:
            yield f"target: no tensor {ending}, which the drafter needs as its {what}"
        elif shapes[0][1:] != (hidden,) or shapes[0][0] < vocabulary:
            yield f"target: {ending} is {list(shapes[0])}, config.json says [{vocabulary}, {hidden}]"


def _sizes(base: Checkpoint, draft: Checkpoint) -> Iterator[str]:
    """Yield differences of what both must agree on."""
    for name, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        theirs, ours = base.text[name], draft.text.get(name)
        if ours is not None and ours != theirs:
            yield f"drafter: {what} {ours}, the target has {theirs}"


def _block(said: Drafter) -> Iterator[str]:
    """Yield faults of the block size."""
    if not said.block_sizes:
        yield "drafter: block_size is missing in config.json; a guess would cost acceptance"
    elif said.block_size is None:
        sizes = " and ".join(f"{place} {size}" for place, size in said.block_sizes.items())
        yield f"drafter: block size different in two places: {sizes}"
    elif not isinstance(said.block_size, int) or said.block_size < 2:
        yield f"drafter: block_size {said.block_size}: a block holds its root and at least one more token"


def _known_tokens(folder: Path) -> dict[str, int]:
    """Return the tokens of tokenizer.json by their text, nothing where there is no such file."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text())
    except (OSError, ValueError):
        return {}
    known: dict[str, int] = {}
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        known.update(vocabulary)
    return known | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def _mask(said: Drafter, base: Checkpoint, target: Path) -> Iterator[str]:
    """Yield faults of the mask token."""
    vocabulary = base.text["vocab_size"]
    known = _known_tokens(target)
    number = known.get(said.mask_token)
    if said.mask_id is None and number is None:
        yield f"drafter: dflash_config.mask_token_id is missing and the target's tokenizer has no {said.mask_token}"
    elif said.mask_id is not None and not (isinstance(said.mask_id, int) and 0 <= said.mask_id < vocabulary):
        yield f"drafter: mask id {said.mask_id} is outside the target's vocabulary of {vocabulary}"
    elif said.mask_id is not None and number is not None and number != said.mask_id:
        yield f"drafter: mask id {said.mask_id}, but {said.mask_token} is {number} in the target's tokenizer"


def _layers(said: Drafter, base: Checkpoint, draft: Checkpoint) -> Iterator[str]:
    """Yield faults of where hidden states are taken."""
    layers, own = base.text["num_hidden_layers"], draft.text["num_hidden_layers"]
    if said.target_layers is not None and said.target_layers != layers:
        yield f"drafter: trained on a target of {said.target_layers} layers (num_target_layers), this one has {layers}"
    ids = said.layer_ids
    if ids is None:
        if layers < 4:
            yield f"drafter: target_layer_ids is missing, and layers cannot be chosen among {layers}"
        return
    if not isinstance(ids, list) or not ids or not all(isinstance(number, int) for number in ids):
        yield f"drafter: target_layer_ids {ids} is not a list of layers"
    elif outside := [number for number in ids if not 0 <= number < layers]:
        yield f"drafter: target_layer_ids {outside} are outside the target's {layers} layers, which count from 0"
    elif layers - 1 in ids:
        yield f"drafter: target_layer_ids has the last layer {layers - 1}, after which SGLang takes no hidden states"
    elif ids != sorted(set(ids)):
        yield f"drafter: target_layer_ids {ids} do not rise; SGLang joins hidden states in the order of layers"
    elif layers >= 4 and own == len(ids) and ids == [number + 1 for number in spread(layers, own)]:
        yield (
            f"drafter: target_layer_ids {ids} count from 1, as a list of hidden states with the embedding first does; "
            f"SGLang counts layers from 0: {[number - 1 for number in ids]}"
        )


def _attention(draft: Checkpoint) -> Iterator[str]:
    """Yield faults of the drafter's layer types and heads."""
    text, own = draft.text, draft.text["num_hidden_layers"]
    types = text.get("layer_types")
    if types is not None and len(types) != own:
        yield f"drafter: layer_types has {len(types)} entries for {own} layers"
    for kind in sorted(set(types or ()) - set(LAYER_TYPES)):
        yield f"drafter: layer type {kind} is none of {', '.join(LAYER_TYPES)}"
    if "sliding_attention" in (types or ()) and not isinstance(text.get("sliding_window"), int):
        yield "drafter: sliding_attention layers, but sliding_window is missing in config.json"
    heads, groups = text["num_attention_heads"], text.get("num_key_value_heads", text["num_attention_heads"])
    if heads % groups:
        yield f"drafter: {heads} heads do not divide among {groups} key-value heads"


def _weights(said: Drafter, draft: Checkpoint) -> Iterator[str]:
    """Yield differences between the drafter's weights and its configuration."""
    text = draft.text
    hidden, own, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    size = text.get("head_dim") or hidden // heads
    queries, values = heads * size, text.get("num_key_value_heads", heads) * size
    features = len(said.layer_ids) if isinstance(said.layer_ids, list) else own
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    inner = text["intermediate_size"]
    for layer in range(own):
        expected |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (values, hidden),
                "self_attn.v_proj": (values, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (size,),
                "self_attn.k_norm": (size,),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    held = {name.removeprefix("model."): shape for name, shape in draft.shapes.items()}
    for name, shape in expected.items():
        if draft.quantized and name.startswith("layers.") and len(shape) > 1:
            continue
        if name not in held:
            yield f"drafter: tensor {name} is missing"
        elif held[name] != shape:
            yield f"drafter: tensor {name} is {list(held[name])}, config.json says {list(shape)}"
    numbers = {int(parts[1]) for parts in (name.split(".") for name in held) if parts[0] == "layers"}
    if beyond := sorted(number for number in numbers if number >= own):
        yield f"drafter: weights of layers {beyond}, config.json says {own} layers"
