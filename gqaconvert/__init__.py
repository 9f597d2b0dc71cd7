"""gqaconvert: turn a multi-head-attention checkpoint into a grouped-query or multi-query one, and prove the result.

The public functions mirror the commands and return typed results; importing the package imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gqaconvert.conversion import ConversionResult, convert, convert_plan
    from gqaconvert.errors import GqaConvertError
    from gqaconvert.inspection import Inspection, inspect_checkpoint
    from gqaconvert.kvcache.estimate import Estimate, Question, estimate
    from gqaconvert.policies.apply import apply_policy, make_cache
    from gqaconvert.policies.spec import KVPolicy
    from gqaconvert.validation.run import validate
    from gqaconvert.validation.types import Settings, ValidationReport

_PUBLIC = {
    "ConversionResult": "gqaconvert.conversion",
    "Estimate": "gqaconvert.kvcache.estimate",
    "GqaConvertError": "gqaconvert.errors",
    "Inspection": "gqaconvert.inspection",
    "KVPolicy": "gqaconvert.policies.spec",
    "apply_policy": "gqaconvert.policies.apply",
    "convert": "gqaconvert.conversion",
    "convert_plan": "gqaconvert.conversion",
    "Question": "gqaconvert.kvcache.estimate",
    "estimate": "gqaconvert.kvcache.estimate",
    "inspect_checkpoint": "gqaconvert.inspection",
    "make_cache": "gqaconvert.policies.apply",
    "Settings": "gqaconvert.validation.types",
    "ValidationReport": "gqaconvert.validation.types",
    "validate": "gqaconvert.validation.run",
}

__all__ = [
    "ConversionResult",
    "Estimate",
    "GqaConvertError",
    "Inspection",
    "KVPolicy",
    "Question",
    "Settings",
    "ValidationReport",
    "__version__",
    "apply_policy",
    "convert",
    "convert_plan",
    "estimate",
    "inspect_checkpoint",
    "make_cache",
    "validate",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
