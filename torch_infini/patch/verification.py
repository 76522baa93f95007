"""What patch_model(verify=True) measures: the model's logits before and after, beside what its dtype costs anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .report import Verification

TOKENS = 64


class Measurement:
    """The logits of a model for random tokens, to be compared with those that it gives later."""

    def __init__(self, model: nn.Module) -> None:
        embedding = model.get_input_embeddings().weight
        generator = torch.Generator("cpu").manual_seed(0)
        self.ids = torch.randint(embedding.shape[0], (1, TOKENS), generator=generator, device="cpu")
        self.ids = self.ids.to(embedding.device)
        self.before = self.logits(model)
        self.exact = self.before
        if self.before.dtype != torch.float32:
            with in_float32(model):
                self.exact = self.logits(model)

    def logits(self, model: nn.Module) -> Tensor:
        """[TOKENS, vocabulary]; of a model without a head its hidden states."""
        with torch.no_grad():
            output = model(self.ids, use_cache=False)
        return (output.logits if "logits" in output else output.last_hidden_state)[0]

    def compare(self, model: nn.Module) -> Verification:
        """How the model's logits now differ from those before."""
        difference, agreement = differences(self.logits(model), self.before)
        return Verification(difference, agreement, *differences(self.before, self.exact), TOKENS)


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
    """(the largest difference, the share of rows with the same largest element)."""
    return float((a.float() - b.float()).abs().max()), float((a.argmax(-1) == b.argmax(-1)).float().mean())
