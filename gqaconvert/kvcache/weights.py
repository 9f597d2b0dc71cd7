"""Bytes and parameters of the weights beside the cache: from headers, or from the config where that is exact."""

from dataclasses import dataclass

from gqaconvert.checkpoint import dtypes
from gqaconvert.families.config import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, ModelConfig
from gqaconvert.families.family import Part
from gqaconvert.inspection import Checkpoint

# Gated MLP, two norms a layer, a final norm; the model types whose parameters follow from the config in closed form.
_CLOSED_FORM = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}


@dataclass(frozen=True)
class Weights:
    """Weights of one checkpoint.

    Attributes:
        nbytes: of all tensors, at the present KV heads.
        parameters: the same, counted.
        kv_bytes: of that, what scales with the number of KV heads.
        kv_parameters: the same, counted.
        idle_bytes: embedding rows that a decoding step does not read (an input table that is not the output's too).
        idle_parameters: the same, counted.
        source: "headers" or "config".
    """

    nbytes: int
    parameters: int
    kv_bytes: int
    kv_parameters: int
    idle_bytes: int
    idle_parameters: int
    source: str

    def at(self, kv_heads: int, present: int) -> tuple[int, int]:
        """(bytes, parameters) with another number of KV heads; exact, as the heads are alike."""
        return (
            self.nbytes + self.kv_bytes * kv_heads // present - self.kv_bytes,
            self.parameters + self.kv_parameters * kv_heads // present - self.kv_parameters,
        )


def weights_of_checkpoint(checkpoint: Checkpoint) -> Weights:
    """From the headers: exact."""
    entries = checkpoint.index.entries
    kv_bytes = kv_parameters = 0
    for site in checkpoint.sites:
        heads, present = site.geometry.num_attention_heads, site.geometry.num_key_value_heads
        for tensor in site.tensors:
            if tensor.part in (Part.KEY, Part.VALUE, Part.KEY_NORM, Part.KEY_NORM_LIST):
                kv_bytes += tensor.entry.nbytes
                kv_parameters += tensor.entry.numel
            elif tensor.part is Part.QKV:
                kv_bytes += tensor.entry.nbytes * 2 * present // (heads + 2 * present)
                kv_parameters += tensor.entry.numel * 2 * present // (heads + 2 * present)
    untied = any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in entries)
    tables = [
        entry for name, entry in entries.items() if untied and name.endswith(("embed_tokens.weight", "wte.weight"))
    ]
    return Weights(
        checkpoint.index.total_size, sum(entry.numel for entry in entries.values()), kv_bytes, kv_parameters,
        sum(entry.nbytes for entry in tables), sum(entry.numel for entry in tables), "headers",
    )  # fmt: skip


def weights_of_config(config: ModelConfig, dtype: str) -> Weights | None:
    """From a bare config; None where the architecture's parameters have no closed form here."""
    text, kind = config.text, config.model_type
    hidden, layers, heads = config.count(HIDDEN), config.count(LAYERS), config.count(HEADS)
    inner, words = text.get("intermediate_size"), text.get("vocab_size")
    if kind not in _CLOSED_FORM or not (
        hidden and layers and heads and isinstance(inner, int) and isinstance(words, int)
    ):
        return None
    kv_heads = config.count(KV_HEADS) or _CLOSED_FORM[kind] or heads
    dim = config.count(HEAD_DIM) or (128 if kind == "qwen3" else hidden // heads)
    biased = bool(text.get("attention_bias", False))
    kv = 2 * kv_heads * dim * (hidden + int(biased or kind == "qwen2"))
    layer = kv + 2 * hidden * heads * dim + 3 * hidden * inner + 2 * hidden
    layer += (heads * dim if biased or kind == "qwen2" else 0) + (hidden if biased and kind != "qwen2" else 0)
    layer += 2 * inner + hidden if text.get("mlp_bias", False) and kind == "llama" else 0
    layer += 2 * dim if kind == "qwen3" else 0
    table = words * hidden
    tied = bool(text.get("tie_word_embeddings", False))
    total = layers * layer + hidden + table * (1 if tied else 2)
    size = dtypes.BITS[dtypes.SAFETENSORS_NAMES[dtype]] // 8
    idle = 0 if tied else table
    return Weights(total * size, total, layers * kv * size, layers * kv, idle * size, idle, "config")
