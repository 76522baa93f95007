"""patch_model(verify=True): compares the model's logits before and after, relative to the error of its own dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..decoder import Decoder, table_of
from ..report import Verification
from .trial import Logits, labelled, rms

TOKENS = 64
HALF_ERRORS = 4.0  # in half types, rounding explains this multiple of the original's own error


class Measurement:
    """Logits of a model for random tokens, to compare with later ones."""

    def __init__(self, model: nn.Module, decoder: Decoder) -> None:
        table = table_of(decoder.embed_tokens)
        generator = torch.Generator("cpu").manual_seed(0)
        ids = torch.randint(table.rows, (1, TOKENS), generator=generator, device="cpu")
        with labelled():
            self.logits = Logits(model, decoder, ids.to(table.device))
            self.exact = self.before = self.logits.values
            if self.before.dtype != torch.float32:
                with in_float32(model):
                    self.exact = self.logits.again()

    def compare(self, quantized: bool) -> Verification:
        """Compare the model's logits now with those before.

        Args:
            quantized: Whether weights were quantized; then errors up to the spread of the logits are no fault.
        """
        with labelled():
            after = self.logits.again()
        difference, agreement = differences(after, self.before)
        finite = self.before.isfinite()
        before = self.before.float()
        error = rms((after.float() - before)[finite])
        explained = self.logits.rounding
        if self.exact is not self.before:
            explained = HALF_ERRORS * rms((before - self.exact)[finite & self.exact.isfinite()])
        if quantized:  # the difference between the logits of unrelated tokens
            explained = max(explained, rms((before - before.mean(-1, keepdim=True))[finite]))
        return Verification(
            difference,
            agreement,
            *differences(self.before, self.exact),
            TOKENS,
            error,
            explained,
            rows_with_nan(self.before),
            rows_with_nan(after),
        )


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Run the body with the model's tensors in float32, and restore the original tensors afterwards.

    This does not copy the model: under transformers' tensor parallelism a copy calls the original's modules.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_floating_point()
    ]
    wide: dict[int, Tensor] = {}
    try:
        for tensors, name, tensor in places:
            if id(tensor) not in wide:
                value = tensor.detach().float()
                wide[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
            tensors[name] = wide[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor


def differences(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return (largest difference, share of rows with the same argmax, where rows with NaN count as different)."""
    same = (a.argmax(-1) == b.argmax(-1)) & ~(a.isnan() | b.isnan()).any(-1)
    return float((a.float() - b.float()).abs().max()), float(same.float().mean())


def rows_with_nan(x: Tensor) -> int:
    return int(x.isnan().any(-1).sum())
