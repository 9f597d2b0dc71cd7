"""Every error that gqaconvert raises on purpose, and the exit code that the command line gives it.

    GqaConvertError
    ├── CheckFailedError          1   a verdict, not a fault: something that was checked is not as it should be
    ├── InputError                2   bad usage or bad input
    │   ├── SourceNotFoundError       no such folder, repository or revision
    │   ├── UnsupportedFormatError    the weights are not plain safetensors (pickle, GGUF, adapters, quantised ...)
    │   ├── CheckpointError           the files are damaged, incomplete, hostile or contradict each other
    │   ├── UnsupportedModelError     no known family, or one that cannot be converted
    │   ├── HeadCountError            the asked KV-head count is not legal here
    │   └── DestinationError          the output folder cannot be used
    └── EnvironmentFailure        3   the machine, not the input
        ├── StorageError              disk full, permissions, I/O
        ├── HubError                  network, or access to a repository
        └── MissingExtraError         an optional dependency is not installed

Anything else that escapes is a bug and keeps its traceback.
"""

from typing import ClassVar


class GqaConvertError(Exception):
    """Base of all deliberate errors: one line of what happened, and a hint of what to do."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckFailedError(GqaConvertError):
    """A check came out negative."""

    exit_code = 1


class InputError(GqaConvertError):
    """Bad usage or bad input."""


class SourceNotFoundError(InputError):
    """The source is neither a folder nor a repository that can be seen."""


class UnsupportedFormatError(InputError):
    """The weights are stored in a form that is never read, with advice how to get safetensors."""


class CheckpointError(InputError):
    """The checkpoint's files are damaged, incomplete, hostile or contradict each other."""


class UnsupportedModelError(InputError):
    """The architecture is unknown, or known and not convertible."""


class HeadCountError(InputError):
    """The asked number of KV heads is not legal for this model."""


class DestinationError(InputError):
    """The output folder cannot be used."""


class EnvironmentFailure(GqaConvertError):  # noqa: N818  (the tree reads better so)
    """The machine failed, not the input."""

    exit_code = 3


class StorageError(EnvironmentFailure):
    """Disk full, missing permission, I/O error."""


class HubError(EnvironmentFailure):
    """The Hub cannot be reached, or does not let us in."""


class MissingExtraError(EnvironmentFailure):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package!r}, which is not installed",
            hint=f"pip install 'gqaconvert[{extra}]'",
        )
