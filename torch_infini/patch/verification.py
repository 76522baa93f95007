"""What patch_model(verify=True) measures: the model's logits before and after, beside what its dtype costs anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .report import Verification
from .trial import Logits, labelled, rms

TOKENS = 64
HALF_ERRORS = 4.0  # a half type's differences up to so many times the original's own error are roundings


class Measurement:
    """The logits of a model for random tokens, to be compared with those that it gives later."""

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        embedding = model.get_input_embeddings().weight
        generator = torch.Generator("cpu").manual_seed(0)
        ids = torch.randint(embedding.shape[0], (1, TOKENS), generator=generator, device="cpu")
        with labelled():
            self.logits = Logits(model, decoder, ids.to(embedding.device))
            self.exact = self.before = self.logits.values
            if self.before.dtype != torch.float32:
                with in_float32(model):
                    self.exact = self.logits.again()

    def compare(self, quantised: bool) -> Verification:
        """How the model's logits now differ from those before.

        Args:
            quantised: Whether weights became integers, whose error is wanted as long as logits are still like logits.
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
        if quantised:  # as far apart as the logits of two tokens that have nothing to do with each other
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
    """Run the body with the model's numbers in float32. The parameters themselves are put aside, and come back.

    Not a copy of the model: in one of transformers' tensor parallelism the original's modules would be called.
    """
    places = [
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
            tensors[name] = wide[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor  # type: ignore[assignment]


def differences(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(the largest difference, the share of rows with the same largest element, which rows with NaN have not)."""
    same = (a.argmax(-1) == b.argmax(-1)) & ~(a.isnan() | b.isnan()).any(-1)
    return float((a.float() - b.float()).abs().max()), float(same.float().mean())


def rows_with_nan(x: Tensor) -> int:
    return int(x.isnan().any(-1).sum())
