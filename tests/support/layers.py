"""Which parameters of a test `make test` leaves to `make test-full`: levels of the CPU below an op's highest."""

from __future__ import annotations

from typing import Any

import pytest

from torch_infini.testing import kernel_levels


def at_level(op: str, level: str, *before: Any) -> Any:
    """The parameters of a test of an op at a level: (*before, level)."""
    return pytest.param(*before, level, marks=() if level == kernel_levels(op)[-1] else pytest.mark.full)
