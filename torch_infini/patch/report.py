"""PatchReport: which modules patch_model replaced, and which it left and why."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

SKIPPED = "left"
IN_PARTS = "in parts"  # not replaced as a whole, but all that computes in it is


def pattern(name: str) -> str:
    """Replace the layer numbers in a module's name by *: model.layers.*.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


@dataclass(frozen=True)
class Row:
    """One module.

    Attributes:
        name: Its name in the model.
        module_class: Its class.
        op: The ops that compute it, "in parts", or "left".
        reason: Why it was left, or is not computed as a whole.
        parameters: Parameters in it, without those of modules that have a row of their own.
        bytes: Memory of these parameters.
    """

    name: str
    module_class: str
    op: str
    reason: str = ""
    parameters: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Verification:
    """What `verify=True` measured on one prompt of random tokens.

    Attributes:
        difference: The largest difference of a logit between the patched model and the original.
        agreement: The share of positions at which both have the same largest logit.
        original_difference: The largest difference of a logit between the original and the same model in float32; 0 for
            a model in float32.
        original_agreement: The share of positions at which these two have the same largest logit.
        tokens: How many positions.
        error: The root mean square of the differences between the patched model's logits and the original's.
        explained: The error that rounding explains; with quantized weights, the largest error that is not a fault.
        original_nan: The number of positions at which the original's logits have NaN.
        nan: The number of positions at which the patched model's have NaN.
    """

    difference: float
    agreement: float
    original_difference: float
    original_agreement: float
    tokens: int
    error: float = 0.0
    explained: float = 0.0
    original_nan: int = 0
    nan: int = 0

    @property
    def fault(self) -> str:
        """A sentence about what is wrong with the patched model's logits; empty if nothing is."""
        if self.nan or self.original_nan:
            return (
                f"the logits have NaN at {self.nan} of {self.tokens} tokens, and those of the original at "
                f"{self.original_nan}; they should have none, and those with NaN could not be compared"
            )
        if self.error <= self.explained:
            return ""
        return (
            f"the logits differ from the original's by {self.error:.3g} (root mean square; {self.difference:.3g} at "
            f"most) over {self.tokens} tokens, and it should be at most {self.explained:.3g}"
        )

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.difference:.3g}, top-1 agreement {self.agreement:.1%} over {self.tokens} "
            f"tokens (the original against float32: {self.original_difference:.3g}, {self.original_agreement:.1%})"
        )


@dataclass(frozen=True)
class Budget:
    """The result of weights="auto:BITS".

    Attributes:
        asked: BITS.
        bits: The mean bits a weight over the quantized layers, with scales.
        error: The expected error of the logits, root mean square, over their own root mean square.
    """

    asked: float
    bits: float
    error: float

    def __str__(self) -> str:
        return f"{self.bits:.2f} bits a weight of {self.asked:g}, expected error of the logits {self.error:.2%}"


@dataclass(frozen=True)
class PatchReport:
    """What patch_model did to one model; print it for a table.

    Attributes:
        family: The model's type as its config calls it.
        model_class: The model's class.
        rows: One for each module that could have been replaced.
        already_patched: The model was patched before this call, which changed nothing.
        reason: Why nothing was patched (no model of transformers, for example); else empty.
        verification: What verify=True measured.
        untried: Why the whole model was not run for two tokens before and after; empty if it was.
        products: What computed the dense products of the model's dtype on this machine when it was patched.
        budget: The result of weights="auto:BITS".
        towers_left: (name, reason) of each model inside, as one that reads images, in which nothing was replaced.
    """

    family: str
    model_class: str
    rows: tuple[Row, ...]
    already_patched: bool = False
    reason: str = ""
    verification: Verification | None = None
    untried: str = ""
    products: str = ""
    budget: Budget | None = None
    towers_left: tuple[tuple[str, str], ...] = ()

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The rows of modules that infini ops compute now."""
        return tuple(row for row in self.rows if row.op not in (SKIPPED, IN_PARTS))

    @property
    def in_parts(self) -> tuple[Row, ...]:
        """The rows of `left` whose forward stays, but calls replaced modules for all that needs weights."""
        return tuple(row for row in self.rows if row.op == IN_PARTS)

    @property
    def left(self) -> tuple[Row, ...]:
        """The rows of modules that stay as they were, each with its reason; also those that are replaced in parts."""
        return tuple(row for row in self.rows if row.op in (SKIPPED, IN_PARTS))

    @property
    def counts(self) -> dict[str, int]:
        """How many modules each op (or group of ops) computes, and how many were left."""
        return dict(Counter(row.op for row in self.rows))

    def __str__(self) -> str:
        if self.reason:
            return f"{self.model_class} not patched: {self.reason}"
        verb = "was patched already" if self.already_patched else "patched"
        lines = [
            f"{self.model_class} ({self.family}) {verb}: {len(self.replaced)} modules replaced, {len(self.left)} left"
            + (f" ({len(self.in_parts)} replaced in parts)" if self.in_parts else "")
        ]
        kinds: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in self.rows:
            kinds[pattern(row.name), row.module_class, row.op, row.reason].append(row)
        cells = [(f"{len(rows)} x", name, kind, op, *amounts(rows)) for (name, kind, op, _), rows in kinds.items()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for cell, (*_, reason) in zip(cells, kinds, strict=True):
            line = "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip()
            lines.append(f"  {line}: {reason}" if reason else f"  {line}")
        if self.products:
            lines.append(f"  dense products of {self.products}")
        if self.budget:
            lines.append(f"  {self.budget}")
        lines += [f"  {name} stays as it was: {reason}" for name, reason in self.towers_left]
        if self.untried:
            lines.append(f"  not tried as a whole: {self.untried}")
        if self.verification:
            lines.append(f"  {'not ' if self.verification.fault else ''}verified: {self.verification}")
        return "\n".join(lines)


def amounts(rows: list[Row]) -> tuple[str, str]:
    """Format the parameters and bytes of modules for the table."""
    parameters, size = sum(row.parameters for row in rows), sum(row.bytes for row in rows)
    if not parameters:
        return "", ""
    return f"{shortened(parameters).rstrip()} parameters", f"{shortened(size)}B"


def shortened(number: int) -> str:
    """Format a number with three digits and a unit: 1234567 is "1.23 M"."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} "
