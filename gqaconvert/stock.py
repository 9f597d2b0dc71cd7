"""Loading models by the stock classes of transformers, in float32. Needs transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.errors import CheckpointError, MissingExtraError
from gqaconvert.families.shipped import class_of_ours


@contextmanager
def quiet() -> Iterator[None]:
    """No advice and no bars of transformers on the terminal; its errors remain."""
    from transformers.utils import logging

    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_stock(
    folder: LocalFolder, *, attention: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, list[str]]:
    """(the model of a folder in float32, in evaluation mode; what its loader had to make up or drop).

    A folder with a modelling file of ours gets the same class from this package. No other code of a checkpoint is run,
    unless ``trust_remote_code``. ``attention`` is an implementation's name ("eager", "sdpa"), None for the default.

    Raises:
        MissingExtraError: transformers is not installed.
        CheckpointError: transformers refuses the folder.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    except ImportError:
        raise MissingExtraError("transformers", "transformers") from None
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder.root, local_files_only=True, trust_remote_code=trust_remote_code)
            auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            chosen = class_of_ours(folder)
            options: dict[str, Any] = {} if chosen else {"trust_remote_code": trust_remote_code}
            if attention is not None:
                options["attn_implementation"] = attention
            model, info = (chosen or auto).from_pretrained(
                folder.root, dtype=torch.float32, local_files_only=True, use_safetensors=True,
                output_loading_info=True, **options,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"transformers cannot load {folder.root}: {' '.join(str(error).split())[:300]}"
        ) from error
    faults = [f"{kind.replace('_', ' ')}: {key}" for kind, keys in info.items() for key in sorted(map(str, keys or ()))]
    return model.eval(), faults
