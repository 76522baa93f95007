"""Fingerprints of modules: one check of the patched forward covers all modules with the same fingerprint.

A fingerprint covers everything that a forward can read from the instance; other objects are compared by identity.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..._core.devices import on_cpu
from .probe import PROBE_SEED

PLAIN = (bool, int, str, bytes, type(None), type, torch.dtype, torch.device, Enum)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # of every module: parameters, submodules, hooks, training
LARGEST = 1 << 12  # elements of a tensor that is compared by value


class Fingerprints:
    """Computes fingerprints; keeps objects that are compared by identity alive, so that no id is reused."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Any, Hashable]] = {}

    def of_value(self, value: Any) -> Hashable:
        """Return the fingerprint of an attribute's value."""
        kind = type(value)
        if isinstance(value, PLAIN):
            return kind, value
        if isinstance(value, float | complex):
            return kind, repr(value)  # tells 0.0 from -0.0
        if isinstance(value, list | tuple):
            return kind, tuple(map(self.of_value, value))
        if isinstance(value, set | frozenset):
            return kind, frozenset(map(self.of_value, value))
        if id(value) in self.kept:
            return self.kept[id(value)][1]
        self.kept[id(value)] = value, (kind, id(value))  # before the recursion: it may contain itself
        if isinstance(value, dict):
            found: Hashable = (
                kind,
                tuple((self.of_value(key), self.of_value(item)) for key, item in value.items()),
            )
        elif isinstance(value, PretrainedConfig):
            found = kind, self.of_value(vars(value))
        elif isinstance(value, nn.Module):
            found = self.of_module(value)
        elif isinstance(value, Tensor) and on_cpu(value) and not value.is_sparse and value.numel() <= LARGEST:
            raw = value.detach().contiguous().view(-1).view(torch.uint8) if value.numel() else value
            found = kind, value.dtype, value.shape, value.requires_grad, bytes(raw.tolist())
        else:  # functions, objects of other classes, large tensors
            found = kind, id(value)
        self.kept[id(value)] = value, found
        return found

    def of_module(self, module: nn.Module, *ignored: str) -> Hashable:
        """Return the fingerprint of class, attributes (except `ignored`), parameters, buffers and submodules."""
        attributes = {
            name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES.union(ignored)
        }
        tensors: dict[str, Any] = {**module._parameters, **module._buffers}
        if PROBE_SEED in attributes:  # random weights that follow from seed and shapes
            tensors = {name: None if tensor is None else tuple(tensor.shape) for name, tensor in tensors.items()}
        return (
            type(module),
            self.of_value(attributes),
            self.of_value(tensors),
            self.of_value(dict(module._modules)),
        )
