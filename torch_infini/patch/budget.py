"""weights="auto:BITS": chooses each layer's integer format, for a mean number of bits a weight and the least error.

Sensitivity is measured. Errors of layers are assumed to be independent: their squares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._core.progress import DELAY, track
from ..weights import FORMATS, served
from .checks.trial import Logits, labelled, rms
from .decoder import Decoder, table_of
from .layers.experts import Experts
from .layers.experts import weights_of as names_of
from .options import PREFIX
from .report import SKIPPED, Budget

TOKENS = 64  # random tokens, used without a text for calibration
MOST_TOKENS = 512  # of a text for calibration
NAME = "torch_infini.patch_model"


class QuantizableLayer(NamedTuple):
    """A linear layer or experts: the formats by their names in `weights=`, or the reason why there is none.

    `op` is what computes it without a format.
    """

    name: str
    module: nn.Module
    formats: dict[str, str]
    reason: str
    op: str = SKIPPED


class Step(NamedTuple):
    """A move of a group of layers to a larger format: the squared error that it saves, the bits that it costs."""

    group: int
    to: int
    gain: float
    bits: int


def tokens_of(calibrate: Tensor | None, vocabulary: int) -> Tensor:
    """Return the tokens [1, S] by which sensitivity is measured.

    Raises:
        ValueError: If a token is not in the vocabulary.
    """
    if calibrate is None:
        return torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    ids = calibrate.detach().cpu()
    if ids.min() < 0 or ids.max() >= vocabulary:
        given = f"{int(ids.min())} to {int(ids.max())}"
        raise ValueError(f"{NAME}: calibrate must have token ids from 0 to {vocabulary - 1}, got {given}")
    return ids[None, :MOST_TOKENS].long()


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights to quantize: [n, k] of a linear layer, [experts, n, k] of experts."""
    if isinstance(module, Experts):
        return {name: module.rows(name) for name in names_of(module)}
    return {"weight": module.get_parameter("weight").detach()}


@contextmanager
def weights_as(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the body with other weights in a layer, as weights_of returns them."""
    old = {name: module._parameters[name] for name in weights}
    for name, weight in weights.items():
        stored = module.as_stored(weight) if isinstance(module, Experts) else weight
        module._parameters[name] = nn.Parameter(stored, requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(old)


def size_of(weight: Tensor, name: str) -> int:
    """Return the size of a weight [..., n, k] in a format, in bits."""
    format, (*outer, n, k) = FORMATS[name], weight.shape
    kinds = format.kinds(n, k, format.group(k), weight.dtype).values()
    return 8 * math.prod(outer) * sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds)


def quantized(weight: Tensor, name: str) -> Tensor:
    """Return a weight [..., n, k] quantized to a format and dequantized."""
    if weight.dim() > 2:
        return torch.stack([quantized(one, name) for one in weight])
    format, (n, k) = FORMATS[name], weight.shape
    new = lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=weight.device)
    integers = format.empty(n, k, format.group(k), weight.dtype, new)
    format.quantize(weight.contiguous(), integers)
    return format.dequantize(integers, 0, n, k, weight.dtype)


def choose(
    model: nn.Module,
    decoder: Decoder,
    layers: Sequence[QuantizableLayer],
    groups: Sequence[Sequence[int]],
    bits: float,
    ids: Tensor,
) -> tuple[dict[str, str], Budget]:
    """Choose the format of each layer, by its name in `weights=`.

    For each group, the tokens go through the model once with this group in its smallest format and all others in full
    precision: e is the mean squared error of the logits over their mean square. The e of another format is that times
    the ratio of the weights' squared errors. Every group begins with its smallest format; then groups move to larger
    formats, the largest (e - e') / bits first, while the budget lasts.

    Args:
        model: The patched model, whose layers have float weights.
        decoder: The model's decoder.
        layers: The layers to quantize.
        groups: Indices of layers that must have one format, because one product computes them.
        bits: The mean bits a weight over all layers.
        ids: [1, S] tokens.

    Raises:
        ValueError: If the smallest formats need more bits.
    """
    with labelled():
        logits = Logits(model, decoder, ids.to(table_of(decoder.embed_tokens).device))
    before = logits.values.float()
    finite = before.isfinite()
    scale = rms(before[finite]) or 1.0
    options: list[list[str]] = []  # formats of each group, the smallest first
    sizes: list[list[int]] = []
    errors: list[list[float]] = []
    for group in track(groups, "measuring", [1] * len(groups), unit="group", delay=DELAY):
        members = [layers[i] for i in group]
        weights = [weights_of(layer.module) for layer in members]
        taken = {
            name: sum(
                size_of(weight, layer.formats[name])
                for layer, of_layer in zip(members, weights, strict=True)
                for weight in of_layer.values()
            )
            for name in served()
            if all(name in layer.formats for layer in members)
        }
        names = sorted(taken, key=lambda name: taken[name])
        squares: list[float] = []  # squared errors of the weights, by format
        e = 0.0
        for name in names:
            rounded = [
                {key: quantized(weight, layer.formats[name]) for key, weight in of_layer.items()}
                for layer, of_layer in zip(members, weights, strict=True)
            ]
            squares.append(
                sum(
                    float((found[key].float() - weight.float()).square().sum())
                    for found, of_layer in zip(rounded, weights, strict=True)
                    for key, weight in of_layer.items()
                )
            )
            if name == names[0]:
                with labelled(), ExitStack() as stack:
                    for layer, found in zip(members, rounded, strict=True):
                        stack.enter_context(weights_as(layer.module, found))
                    e = rms((logits.again().float() - before)[finite]) / scale
        options.append(names)
        sizes.append([taken[name] for name in names])
        errors.append([e**2 * square / (squares[0] or 1.0) for square in squares])
    count = sum(weight.numel() for layer in layers for weight in weights_of(layer.module).values())
    chosen = spend(sizes, errors, bits * count)
    total = sum(size[i] for size, i in zip(sizes, chosen, strict=True))
    if total > bits * count:
        raise ValueError(
            f"{NAME}: weights must be at least '{PREFIX}{total / count:.2f}' for this model, the smallest format of "
            f"each layer, got '{PREFIX}{bits:g}'"
        )
    formats = {layers[i].name: options[g][chosen[g]] for g, group in enumerate(groups) for i in group}
    expected = sum(error[i] for error, i in zip(errors, chosen, strict=True)) ** 0.5
    return formats, Budget(bits, total / count, expected)


def spend(sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Return the index of each group's format: steps are taken in the order of gain per bit, within the budget.

    Args:
        sizes: Bits of each format of each group, ascending.
        errors: Squared errors, likewise.
        budget: Bits of all groups.
    """
    chosen = [0] * len(sizes)
    left = budget - sum(size[0] for size in sizes)
    while True:
        steps = [
            Step(g, to, errors[g][at] - errors[g][to], sizes[g][to] - sizes[g][at])
            for g, at in enumerate(chosen)
            for to in range(at + 1, len(sizes[g]))
            if sizes[g][to] - sizes[g][at] <= left
        ]
        if not steps:
            return chosen
        step = max(steps, key=lambda step: step.gain / max(step.bits, 1))
        chosen[step.group] = step.to
        left -= step.bits
