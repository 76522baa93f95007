"""fused_experts: the gated MLPs of a mixture of experts, for the experts that a router has chosen.

The kernel is in csrc/infiniop/fused_experts. patch_model replaces the experts of transformers' models by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec

ACTIVATIONS = {"swiglu": 0, "geglu": 1}


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weights: Tensor,
    activation: str = "swiglu",
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the gated MLPs of each token's experts, and their weighted sum.

    y[t] = sum_j weights[t, j] * (act(x[t] @ gate[e]^T) * (x[t] @ up[e]^T)) @ down[e]^T with e = index[t, j], where
    gate_up[e] is gate[e] above up[e]. Only the weights of chosen experts are read, each once for up to 1024 tokens.
    Products are linear's; with scales, those of linear_group8 and linear_table4, which quantize their input. Gate, up,
    their gated product and each expert's result are rounded to the dtype of x; the sum over j is taken in float32, in
    order, and rounded once.

    Args:
        x: [tokens, hidden]; stride 1 in the last dimension.
        gate_up: [experts, 2 * inner, hidden] in the dtype of x; stride 1 in the last dimension.
        down: [experts, hidden, inner] in the dtype of x; likewise.
        index: [tokens, k] int64 or int32, from 0 to experts - 1.
        weights: [tokens, k] in the dtype of x or float32; NaN gives NaN for that token alone.
        activation: "swiglu", silu(gate) * up, or "geglu", gelu(gate) * up with gelu by tanh.
        gate_up_scales: [experts, 2 * inner] float32, if gate_up is quantized: [experts, panels, blocks, bytes] uint8,
            contiguous, of each expert what quantize_group8 or quantize_table4 writes. Given with down_scales.
        down_scales: [experts, hidden] float32, for a down that is quantized likewise, also in the other format.
        out: [tokens, hidden], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [tokens, hidden] in the dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or an index that is no expert.
        NotImplementedError: For tensors that are not on the CPU.
        ValueError: For an unknown activation.

    Equivalent to:
        >>> gate, up = torch.einsum("tkih,th->tki", gate_up[index.long()], x).chunk(2, -1)
        >>> h = torch.nn.functional.silu(gate) * up  # geglu: torch.nn.functional.gelu(gate, approximate="tanh") * up
        >>> results = torch.einsum("tkhi,tki->tkh", down[index.long()], h)
        >>> y = (results * weights[..., None]).sum(1).to(x.dtype)

    Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; gated as in arXiv:2002.05202.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"infini::fused_experts: activation must be 'swiglu' or 'geglu', got {activation!r}")
    op = torch.ops.infini.fused_experts
    of = (x, gate_up, down, index, weights, ACTIVATIONS[activation], gate_up_scales, down_scales)
    return op.default(*of) if out is None else op.out(*of, out=out)


def fake(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weights: Tensor,
    activation: int = 0,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape)


SPEC = OpSpec(
    fused_experts,
    schema="(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weights, int activation=0, "
    "Tensor? gate_up_scales=None, Tensor? down_scales=None) -> Tensor",
    fake=fake,
    devices=("cpu",),
)
