"""ImportOnly: the base of names that scripts import but that have no function in this engine."""

from __future__ import annotations

from typing import Any, ClassVar


class ImportOnly:
    """A name that scripts import.

    Attributes:
        reason: Why it cannot be instantiated, and what to use instead.

    Raises:
        NotImplementedError: If it is instantiated.
    """

    reason: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = f"infinilm.llm.{type(self).__name__}"
        raise NotImplementedError(f"{name}: it must not be instantiated, for {self.reason}")
