"""Apertus, whose activation has parameters in each layer, which files have as fields."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..architecture import Architecture, Metadata, decoder
from ..method import NAME

_PARAMETERS = {"alpha_p": 1, "alpha_n": 1, "beta": 0, "eps": 0}  # of xIELU, and their dimensions


def _apertus(m: Metadata) -> dict[str, Any]:
    return {**decoder(m, "apertus"), "hidden_act": "xielu"}


def _activations(m: Metadata) -> dict[str, Tensor]:
    found = {}
    for name, dimensions in _PARAMETERS.items():
        values: Any = m.fields.get(f"xielu.{name}")
        if not isinstance(values, list) or [type(value) in (int, float) for value in values] != [True] * m.layers:
            raise ValueError(
                f"{NAME}: xielu.{name} in {m.path} must have a number for each of {m.layers} layers, got {values!r}"
            )
        for layer, value in enumerate(values):
            own = torch.full((1,) * dimensions, float(value), dtype=torch.float32)
            found[f"model.layers.{layer}.mlp.act_fn.{name}"] = own
    return found


_NAMES = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}

ARCHITECTURES = (Architecture("apertus", _apertus, _NAMES, from_fields=_activations),)
