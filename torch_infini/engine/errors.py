"""described: an exception of other libraries, as the end of a sentence."""

from __future__ import annotations


def described(error: Exception) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}"
