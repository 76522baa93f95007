"""TORCH_INFINI_VLLM: which parts of the plugin are on.

No other module of the package is imported to read it.
"""

from __future__ import annotations

VARIABLE = "TORCH_INFINI_VLLM"
PARTS = ("ops", "linear", "attention")


def parts_of(value: str) -> tuple[str, ...]:
    """Return the parts that a value of TORCH_INFINI_VLLM turns on, in the order of PARTS.

    Args:
        value: "" or "0": none; "1": all; otherwise names of PARTS with commas between.

    Raises:
        ValueError: For a name that is no part.
    """
    if value in ("", "0"):
        return ()
    if value == "1":
        return PARTS
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise ValueError(f"torch_infini: {VARIABLE} must be 0, 1 or parts of {known} with commas, got {value!r}")
    return tuple(part for part in PARTS if part in names)
