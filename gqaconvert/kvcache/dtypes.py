"""Element types of a cache: bytes of one head's vector, with its scales. No torch."""

from dataclasses import dataclass

from gqaconvert.errors import InputError


@dataclass(frozen=True)
class CacheDtype:
    """How one head's key or value of one token is stored.

    Attributes:
        name: as on the command line.
        bits: of an element.
        vector_bytes: scale and zero point for each head and token.
        block: elements that share a block scale, 0 if there is none.
        block_bytes: bytes of that scale.
    """

    name: str
    bits: int
    vector_bytes: int = 0
    block: int = 0
    block_bytes: int = 0

    def vector(self, width: int) -> int:
        """Bytes of a vector of ``width`` elements.

        Raises:
            InputError: the width is no multiple of the type's block.
        """
        scales = self.vector_bytes
        if self.block:
            if width % self.block:
                raise InputError(f"{self.name} stores blocks of {self.block} elements, and a head has {width}")
            scales += width // self.block * self.block_bytes
        return (width * self.bits + 7) // 8 + scales


_ALL = (
    CacheDtype("float32", 32),
    CacheDtype("float16", 16),
    CacheDtype("bfloat16", 16),
    CacheDtype("fp8", 8),  # one scale a tensor: nothing that grows
    CacheDtype("int8", 8, vector_bytes=4),  # vLLM: one float32 scale for each token and head
    CacheDtype("int4", 4, vector_bytes=4),  # float16 scale and zero point for each token and head
    CacheDtype("q8_0", 8, block=32, block_bytes=2),  # llama.cpp: 34 bytes for 32 elements
    CacheDtype("q4_0", 4, block=32, block_bytes=2),  # llama.cpp: 18 bytes for 32 elements
    CacheDtype("nvfp4", 4, block=16, block_bytes=1),
)
CACHE_DTYPES = {dtype.name: dtype for dtype in _ALL}
_SHORT = {"fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"}


def cache_dtype(name: str) -> CacheDtype:
    """The type with this name.

    Raises:
        InputError: there is none.
    """
    found = CACHE_DTYPES.get(_SHORT.get(name.lower(), name.lower()))
    if found is None:
        raise InputError(f"no cache type {name!r}", hint=f"one of: {', '.join(CACHE_DTYPES)}")
    return found
