"""The modelling file of an output whose stock class cannot hold fewer KV heads: one source, and a few lines a family.

``gqaconvert/shipped/grouped_query.py`` is the whole mechanism. The file that goes into an output is that source,
followed by classes that name the family's attention modules; config.json's ``auto_map`` points to them.
"""

import re
from collections.abc import Mapping
from typing import Any

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import read_json
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.families import family_of
from gqaconvert.families.config import ModelConfig
from gqaconvert.families.family import Family, Layout, Part

MODULE = "modeling_gqaconvert"
FILE = f"{MODULE}.py"
PREFIX = "GroupedQuery"

_ARRANGEMENTS = {Layout.SEPARATE: "separate", Layout.BLOCKS: "blocks", Layout.GROUPS: "groups"}
_SHARED = (Part.KEY, Part.VALUE, Part.QKV)


def attributes(family: Family) -> dict[str, Any]:
    """The class attributes by which `GroupedQueryMixin` finds what it replaces."""
    modules = "|".join(map(re.escape, family.attentions))
    return {
        "attention_modules": rf"(.*\.)?{re.escape(family.stack)}\.\d+\.({modules})",
        "projections": {
            name: _ARRANGEMENTS[family.layout] for name, part in family.parts.items() if part in _SHARED
        },
        "heads_key": family.heads[0],
        "kv_heads_key": next(key for form in family.forms if form.shipped for key in form.config),
    }  # fmt: skip


def modelling_source(family: Family) -> str:
    """The text of the modelling file for a family's classes."""
    from importlib.resources import files  # imports tempfile, for inspect in vain

    mechanism = files("gqaconvert.shipped").joinpath("grouped_query.py").read_text(encoding="utf-8")
    stock = sorted(set(family.classes.values()))
    lines = [f"from transformers import {', '.join(stock)}  # noqa: E402"]
    for name in stock:
        lines += ["", "", f"class {PREFIX}{name}(GroupedQueryMixin, {name}):  # type: ignore[misc]"]
        lines += [f'    """{name} whose attention shares KV heads."""', ""]
        lines += [f"    {key} = {value!r}" for key, value in attributes(family).items()]
    return f"# Written by gqaconvert (Apache License 2.0).\n{mechanism}\n\n" + "\n".join(lines) + "\n"


def shipped_keys(family: Family, config: ModelConfig) -> dict[str, Any]:
    """What config.json must say so that transformers loads the modelling file.

    Raises:
        UnsupportedModelError: no class of ours stands for the one that the checkpoint was saved with.
    """
    stock = stock_class(config.raw) or _usual(family)
    if stock not in family.classes.values():
        raise UnsupportedModelError(
            f"its class {stock} has no setting for fewer KV heads, and there is no modelling file of ours for it",
            hint=f"there is one for {', '.join(family.classes.values())}; --expanded writes the stock class",
        )
    return {
        "architectures": [PREFIX + stock],
        "auto_map": {auto: f"{MODULE}.{PREFIX}{name}" for auto, name in family.classes.items()},
    }


def stock_class(raw: Mapping[str, Any]) -> str | None:
    """The class that config.json names; of our own classes, the one it stands for."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        return None
    return architectures[0].removeprefix(PREFIX)


def _usual(family: Family) -> str:
    """The class with a language-modelling head: the first but the bare model."""
    return next(name for auto, name in family.classes.items() if auto != "AutoModel")


def has_shipped_code(config: ModelConfig) -> bool:
    """Whether an earlier conversion gave the checkpoint our modelling file."""
    auto_map = config.raw.get("auto_map")
    return isinstance(auto_map, dict) and any(str(value).startswith(f"{MODULE}.") for value in auto_map.values())


def model_class(family: Family, config: ModelConfig) -> Any:  # noqa: ANN401
    """The class that the modelling file would give, made from this package and never from a checkpoint's files.

    Needs transformers.
    """
    import transformers

    from gqaconvert.shipped.grouped_query import GroupedQueryMixin

    stock = stock_class(config.raw) or _usual(family)
    if stock not in family.classes.values():
        raise UnsupportedModelError(f"there is no modelling file of ours for the class {stock}")
    return type(PREFIX + stock, (GroupedQueryMixin, getattr(transformers, stock)), attributes(family))


def class_of_ours(folder: LocalFolder) -> Any | None:  # noqa: ANN401
    """For a folder with a modelling file of ours, the same class from this package; else None.

    So a folder's code is never run. Needs transformers.

    Raises:
        CheckpointError: the folder has no readable config.json.
    """
    config = ModelConfig.of(read_json(folder, "config.json"))
    return model_class(family_of(config), config) if has_shipped_code(config) else None
