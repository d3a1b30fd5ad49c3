"""The one family of exceptions that Featherweight raises on purpose."""

from __future__ import annotations


class FeatherweightError(Exception):
    """Something the user can put right.

    `str(error)` is one line: what was given, what is allowed, what to do next.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}; {hint}" if hint else message)


class RecipeError(FeatherweightError):
    """A recipe that cannot be read, or whose techniques contradict one another."""


class ModelError(FeatherweightError):
    """A model that cannot be found, fetched or read."""


class UnsupportedError(FeatherweightError):
    """A technique that this model, device or machine cannot have."""


class VerificationError(FeatherweightError):
    """The changed model no longer answers as the original did."""


class MissingExtraError(FeatherweightError):
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed",
            hint=f"pip install 'featherweight[{extra}]'",
        )


class NativeError(FeatherweightError):
    """The native library is missing, cannot be loaded, or cannot do what was asked of it."""
