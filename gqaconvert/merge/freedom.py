"""What a family's structure allows a merge to change without changing the function. No torch."""

from dataclasses import dataclass

from gqaconvert.families import Family, Part, Position
from gqaconvert.families.config import ModelConfig
from gqaconvert.families.sites import AttentionSite
from gqaconvert.merge.heads import KeyFreedom, Rotary

_BETWEEN_VALUE_AND_OUTPUT = ("attn_sub_norm", "inner_attn_ln")


@dataclass(frozen=True)
class Freedom:
    """For one attention site: the rotary description, and why anything in it is not free.

    Attributes:
        rotary: what may be rotated.
        limits: one sentence for each restriction.
        order: why heads may not be reordered, None if they may.
    """

    rotary: Rotary
    limits: tuple[str, ...]
    order: str | None


def freedom_of(site: AttentionSite, family: Family, config: ModelConfig, names: frozenset[str]) -> Freedom:
    """The freedom of a site.

    A layer without positions among rotated ones (NoPE) counts as rotated: that is right, if less than is allowed.

    Args:
        site: the attention module.
        family: its family.
        config: of the model.
        names: the names inside the attention module, also those of tensors that are never touched.
    """
    parts = {tensor.part for tensor in site.tensors}
    limits: list[str] = []
    keys, values_free = KeyFreedom.ROTATION, True
    if Part.KEY_NORM in parts or Part.KEY_NORM_LIST in parts:
        keys = KeyFreedom.FIXED
        limits.append("each KV head has its own key norm: K is pooled by the mean, V is merged")
    elif Part.KEY_NORM_SHARED in parts:
        has_bias = any(tensor.part is Part.KEY_NORM_SHARED and tensor.leaf == "bias" for tensor in site.tensors)
        keys = KeyFreedom.FIXED if has_bias else KeyFreedom.SIGN
        limits.append("a norm follows the key projection: K keeps its directions but for signs, V is merged freely")
    inner = config.text.get("attn_config")  # MPT's level of its own
    if config.text.get("clip_qkv") or (isinstance(inner, dict) and inner.get("clip_qkv")):
        keys, values_free = KeyFreedom.FIXED, False
        limits.append("clip_qkv clamps q, k and v: neither K nor V can be rotated, both are pooled by the mean")
    if names.intersection(_BETWEEN_VALUE_AND_OUTPUT):
        values_free = False
        limits.append("a norm stands before the output projection: V cannot be rotated, it is pooled by the mean")
    rotary = Rotary(
        dim=_rotary_dim(site, family, config),
        interleaved=family.position is Position.ROPE_PAIRS,
        keys=keys,
        values_free=values_free,
    )
    order = None
    if family.position in (Position.ALIBI, Position.RELATIVE) or config.text.get("alibi"):
        order = "its position bias belongs to the query head's index"
    elif "sinks" in names:
        order = "its attention sinks belong to the query head's index"
    elif keys is KeyFreedom.FIXED and parts.intersection((Part.KEY_NORM, Part.KEY_NORM_LIST)):
        order = "its query and key norms belong to single heads"
    return Freedom(rotary, tuple(limits), order)


def _rotary_dim(site: AttentionSite, family: Family, config: ModelConfig) -> int:
    fraction = family.rotary_part(config, site.geometry.head_dim)
    return 0 if fraction is None else int(site.geometry.head_dim * fraction) // 2 * 2
