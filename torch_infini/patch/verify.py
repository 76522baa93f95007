"""Checks a module that was just patched against its original forward, on a small input.

Names and shapes say that a module looks like one we know; only its numbers say that it computes the same.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .swap import Patched

# Relative error (of the Euclidean norm) that another order of rounding may cause.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def likeness(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that compute the same formula: class, attributes, shapes, and those of their submodules."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    plain.pop("layer_idx", None)
    shapes = tuple((name, p.shape, p.dtype) for name, p in module._parameters.items() if p is not None)
    children = tuple((name, likeness(child)) for name, child in module._modules.items())
    return (type(module), tuple(sorted(plain.items())), shapes, children)


class Verifier:
    """Compares the forwards of one decoder's modules; one module of each likeness, so that many layers cost as one."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        self.answers: dict[tuple[Any, ...], str | None] = {}

    @cached_property
    def hidden(self) -> Tensor:
        """Hidden states of two sequences of three tokens, the same at every call."""
        weight = self.decoder.embed_tokens.weight
        generator = torch.Generator("cpu").manual_seed(0)
        return torch.randn(2, 3, weight.shape[-1], generator=generator, device="cpu").to(weight.dtype)

    @cached_property
    def position_embeddings(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the first positions: far ones would make a dynamic embedding grow its tables."""
        return self.decoder.rotary_emb(self.hidden, torch.arange(3, device="cpu").unsqueeze(0))

    # Far positions and all the same: they must have no effect but through cos and sin. No mask: causal.
    position_ids = torch.tensor([[0, 100_003, 50_000_017]], device="cpu")
    attention_mask = None

    def refusal(self, module: Patched) -> str | None:
        """Why the patched forward may not stand for the original one; None if both give the same."""
        if not module.infini_probe:
            return None
        kind = likeness(module)
        if kind not in self.answers:
            self.answers[kind] = self.compare(module)
        return self.answers[kind]

    def compare(self, module: Patched) -> str | None:
        arguments = {name: getattr(self, name) for name in module.infini_probe[1:]}
        try:
            expected, actual = (
                forward(module, self.hidden, **arguments)
                for forward in (module.infini_original.forward, type(module).forward)
            )
        except Exception as error:  # whatever the original needs that the probe lacks
            return f"it cannot be checked against its own forward: {error}"
        if isinstance(expected, tuple):
            expected, actual = expected[0], actual[0]
        # Weights that were never loaded may give inf or NaN, from which nothing can be told.
        if expected.isfinite().all() and not self.close(actual.float(), expected.float(), module.infini_precision):
            return "its own forward computes something else"
        return None

    def close(self, actual: Tensor, expected: Tensor, precision: float) -> bool:
        limit = TOLERANCES[self.hidden.dtype] * precision * expected.norm()
        return actual.shape == expected.shape and bool((actual - expected).norm() <= limit)
