"""Errors a user can act on. Each names the thing, the value, what was expected and what to do.

A class exists only where a caller acts differently: `UsageError` ends a command with exit code 2, every
other `Ds4Error` with 1; the server answers `RequestError` with a 4xx and the rest with a 5xx.
"""


class Ds4Error(Exception):
    """Base of every error that is meant for the user; its text is the whole message."""


class UsageError(Ds4Error):
    """A flag, argument or setting is wrong. Exit code 2."""


class FileFormatError(Ds4Error):
    """A file is broken, truncated, or says something that we do not know. Names file and place."""


class ConfigError(FileFormatError):
    """A model configuration has a missing, unknown or impossible value. Names the key."""


class MissingTensorError(FileFormatError):
    """Tensors are absent, extra or misshapen; `problems` has one line a tensor."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class DeviceError(Ds4Error):
    """The CUDA driver (NVIDIA's or ours) refused or failed a call."""


class BuildError(DeviceError):
    """A kernel did not compile, or there is no compiler."""


class RequestError(Ds4Error):
    """A request is invalid: its field, its value, what is allowed."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CapacityError(Ds4Error):
    """Not enough memory, disk, context or queue for what was asked."""


def kind_of(value: object) -> str:
    """What JSON calls the type of `value`, for messages."""
    if value is None:
        return "null"
    for kinds, name in ((bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (list, "a list")):
        if isinstance(value, kinds):
            return name
    return "an object"
