"""Checkpoints made by hand: by the safetensors library or byte by byte, never by the package under test."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write one safetensors file with the safetensors library.

    Args:
        path: File to write; its folder is made if it is missing.
        tensors: Contiguous tensors by name.
        metadata: The header's ``__metadata__``; ``{"format": "pt"}`` by default, left out if it is empty.

    Returns:
        ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata={"format": "pt"} if metadata is None else dict(metadata) or None)
    return path


def write_raw_safetensors(
    path: Path, header: Mapping[str, Any] | bytes, body: bytes = b"", header_length: int | None = None
) -> Path:
    """Write a file in the form of safetensors without any check, so that it can be malformed in any way.

    Args:
        path: File to write; its folder is made if it is missing.
        header: A value to write as JSON, or the bytes themselves.
        body: The bytes after the header.
        header_length: What the first 8 bytes say; the header's true length by default.

    Returns:
        ``path``.
    """
    encoded = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    length = len(encoded) if header_length is None else header_length
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(length.to_bytes(8, "little") + encoded + body)
    return path


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a llama model, and from them its config.json and the names and shapes of its tensors.

    Attributes:
        layers: Decoder layers.
        hidden: Hidden size E.
        heads: Query heads H.
        kv_heads: KV heads G.
        head_dim: Size D of one head.
        intermediate: Width of the MLP.
        vocab: Tokens in the vocabulary.
        bias: Whether the four attention projections have a bias.
        tied: Whether the output layer is the embedding, and is then not stored.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    bias: bool = False
    tied: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name, in the model's order. Weights are (out, in)."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer().items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def _layer(self) -> dict[str, tuple[int, ...]]:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (self.hidden,)}
        for name, rows, columns in (
            ("q_proj", query, self.hidden),
            ("k_proj", key, self.hidden),
            ("v_proj", key, self.hidden),
            ("o_proj", self.hidden, query),
        ):
            shapes[f"self_attn.{name}.weight"] = (rows, columns)
            if self.bias:
                shapes[f"self_attn.{name}.bias"] = (rows,)
        shapes["post_attention_layernorm.weight"] = (self.hidden,)
        for name, rows, columns in (
            ("gate_proj", self.intermediate, self.hidden),
            ("up_proj", self.intermediate, self.hidden),
            ("down_proj", self.hidden, self.intermediate),
        ):
            shapes[f"mlp.{name}.weight"] = (rows, columns)
        return shapes

    def parameters(self) -> int:
        """Return the number of stored parameters."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return config.json as stock transformers reads it, with ``head_dim`` stated."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": self.bias,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "torch_dtype": _DTYPE_NAMES[dtype],
            "vocab_size": self.vocab,
        }


def llama_checkpoint(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 36,
    heads: int = 6,
    kv_heads: int = 6,
    head_dim: int | None = 8,
    intermediate: int = 56,
    vocab: int = 64,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    tied: bool = False,
    shards: int = 1,
    seed: int = 0,
    extra_sidecars: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write a small llama checkpoint of random weights that stock transformers loads.

    The default sizes keep mistakes apart: H * D is not the hidden size, and all heads differ.

    Args:
        folder: Folder to write to; made if it is missing.
        layers: Decoder layers.
        hidden: Hidden size E.
        heads: Query heads H.
        kv_heads: KV heads G.
        head_dim: Size D of one head; None for E / H, and then config.json does not state it.
        intermediate: Width of the MLP.
        vocab: Tokens in the vocabulary.
        dtype: Of all tensors.
        bias: Whether the attention projections have a bias.
        tied: Whether the output layer is the embedding.
        shards: Files to write; from 2 on with ``model.safetensors.index.json``. As many as there are tensors
            puts every tensor in a file of its own.
        seed: Same seed and sizes, same values, whatever the shards and the dtype (up to rounding).
        extra_sidecars: Contents of further files, by path in the folder.

    Returns:
        ``folder``.
    """
    size = hidden // heads if head_dim is None else head_dim
    shape = LlamaShape(layers, hidden, heads, kv_heads, size, intermediate, vocab, bias, tied)
    config = shape.config(dtype)
    if head_dim is None:
        del config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random_tensor(name, sizes, generator).to(dtype) for name, sizes in shape.tensors().items()}
    _write_json(folder / "config.json", config)
    files = _split({name: tensor.nbytes for name, tensor in tensors.items()}, shards)
    for filename, names in files.items():
        write_safetensors(folder / filename, {name: tensors[name] for name in names})
    _write_index(folder, files, sum(tensor.nbytes for tensor in tensors.values()))
    for name, content in (extra_sidecars or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def big_llama_checkpoint(folder: Path, gib: float, shards: int = 1) -> Path:
    """Write a bfloat16 llama checkpoint of a given size, for benchmarks, in little memory.

    Multi-head attention in Llama-2-7B's proportions, heads of size 128 (64 below a hidden size of 512):
    hidden size 4096 if at least two layers fit, else the next smaller power of two. The number of layers and
    then the vocabulary are chosen to meet the size. The values are random but repeat every 8 MiB, out of step
    with heads and tensors: fit for measuring time and memory, not for judging a merge.

    Args:
        folder: Folder to write to; made if it is missing.
        gib: Bytes of all tensors together, in GiB; at least 0.001. Met to within 4 rows of the hidden size.
        shards: Files to write, with an index from 2 on.

    Returns:
        ``folder``.

    Raises:
        ValueError: ``gib`` is too small.
    """
    shape = _fitting_shape(round(gib * 2**29))
    shapes = shape.tensors()
    sizes = {name: 2 * math.prod(dimensions) for name, dimensions in shapes.items()}
    files = _split(sizes, shards)
    pattern = _random_bfloat16(4_194_301)  # prime, so that tensors and heads start at different offsets of it
    offset = 0
    folder.mkdir(parents=True, exist_ok=True)
    for filename, names in files.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name in names:
            stop = start + sizes[name]
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [start, stop]}
            start = stop
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / filename).open("wb") as stream:
            stream.write(len(encoded).to_bytes(8, "little") + encoded)
            for piece in _repeated(pattern, offset, start):
                stream.write(piece)
        offset += start
    _write_json(folder / "config.json", shape.config(torch.bfloat16))
    _write_index(folder, files, sum(sizes.values()))
    return folder


def _fitting_shape(parameters: int) -> LlamaShape:
    """Return the shape of Llama-2-7B's proportions that has as many parameters, to within two rows."""
    for hidden in (4096, 2048, 1024, 512, 256, 128):
        head_dim = 128 if hidden > 256 else 64
        heads = hidden // head_dim
        intermediate = round(hidden * 11008 / 4096 / 8) * 8
        least = LlamaShape(0, hidden, heads, heads, head_dim, intermediate, vocab=256)
        layer = LlamaShape(1, hidden, heads, heads, head_dim, intermediate, vocab=256).parameters()
        layer -= least.parameters()
        layers = (parameters - least.parameters()) // layer
        if layers >= 2:
            rest = parameters - least.parameters() - layers * layer
            vocab = least.vocab + rest // (2 * hidden)
            return LlamaShape(layers, hidden, heads, heads, head_dim, intermediate, vocab)
    raise ValueError(f"{parameters} parameters are too few for a llama model; ask for at least 0.001 GiB")


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + values / 10
    if name.endswith("bias"):
        return values / 2
    return values / math.sqrt(shape[-1])


def _random_bfloat16(count: int) -> bytes:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    return values.view(torch.uint8).numpy().tobytes()


def _repeated(pattern: bytes, offset: int, length: int) -> Iterator[memoryview]:
    """Yield the bytes from ``offset`` to ``offset + length`` of the pattern repeated for ever."""
    view = memoryview(pattern)
    position = offset % len(pattern)
    while length:
        piece = view[position : position + length]
        yield piece
        length -= len(piece)
        position = 0


def _split(sizes: Mapping[str, int], shards: int) -> dict[str, list[str]]:
    """Return the tensors of each file: runs of neighbours of about equal size, as savers write them."""
    if not 1 <= shards <= len(sizes):
        raise ValueError(f"{len(sizes)} tensors do not fill {shards} shards")
    if shards == 1:
        return {"model.safetensors": list(sizes)}
    total = sum(sizes.values())
    runs: list[list[str]] = [[] for _ in range(shards)]
    current, filled = 0, 0
    for position, (name, size) in enumerate(sizes.items()):
        left = len(sizes) - position
        full = filled >= total * (current + 1) / shards
        if runs[current] and current + 1 < shards and (full or left == shards - 1 - current):
            current += 1
        runs[current].append(name)
        filled += size
    return {f"model-{number:05}-of-{shards:05}.safetensors": run for number, run in enumerate(runs, start=1)}


def _write_index(folder: Path, files: Mapping[str, list[str]], total_size: int) -> None:
    if len(files) == 1:
        return
    weight_map = {name: filename for filename, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
