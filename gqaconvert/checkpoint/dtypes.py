"""The element types of safetensors files, by their names there. Sizes only: no torch."""

BITS: dict[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

TORCH_NAMES: dict[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that heads can be pooled in, with torch's name (which is also what config.json says)."""

SAFETENSORS_NAMES: dict[str, str] = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


def nbytes(dtype: str, numel: int) -> int:
    """Bytes of ``numel`` elements; sub-byte types are packed without gaps."""
    return (BITS[dtype] * numel + 7) // 8
