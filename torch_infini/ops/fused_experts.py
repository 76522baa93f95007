"""fused_experts: the gated MLPs of a mixture of experts, for the experts that a router has chosen.

The kernel is in csrc/infiniop/fused_experts. patch_model replaces the experts of transformers' models by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import KINDS
from ._registry import OpSpec

ACTIVATIONS = {"swiglu": 0, "geglu": 1, "swiglu_oai": 2, "swiglu_clamped": 3, "relu2_no_mul": 4}


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weights: Tensor,
    activation: str = "swiglu",
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_kind: str | int = -1,
    down_kind: str | int = -1,
    weights_on_input: bool = False,
    first_expert: int = 0,
    total_experts: int = -1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the gated MLPs of each token's experts, and their weighted sum.

    y[t] = sum_j weights[t, j] * (h @ down[e]^T + down_bias[e]) with e = index[t, j] and h = act(gate, up), where gate
    and up are the first and second half of x[t] @ gate_up[e]^T + gate_up_bias[e], or its even and odd columns. Only
    the weights of chosen experts are read, each once for up to 1024 tokens. Products are linear's, or matmul's for
    weights of adjacent columns; of quantized weights those of linear_group8 and linear_table4, which quantize their
    input, and of linear_blocks and linear_block_panels, which do not. Gate, up, h and each expert's result are rounded
    to the dtype of x; the sum over j is taken in float32, in order, and rounded once.

    Args:
        x: [tokens, hidden]; stride 1 in the last dimension.
        gate_up: [experts, 2 * inner, hidden] in the dtype of x; stride 1 in one of the last two dimensions, so that a
            weight [experts, hidden, 2 * inner] is given as its view `.transpose(1, 2)`, and read in place. Without a
            gate it is up alone, [experts, inner, hidden], and so are its scales and bias.
        down: [experts, hidden, inner] in the dtype of x; likewise.
        index: [tokens, k] int64 or int32, from 0 to experts - 1, or to total_experts - 1.
        weights: [tokens, k] in the dtype of x or float32; NaN gives NaN for that token alone.
        activation: act(gate, up), where g = min(gate, limit), and u is up clamped to -limit ... limit: "swiglu",
            silu(gate) * up; "geglu", gelu(gate) * up with gelu by tanh; "swiglu_oai", g * sigmoid(alpha * g) * (u + 1),
            as gpt-oss has it; "swiglu_clamped", silu(g) * u; or without a gate, "relu2_no_mul", relu(up)**2.
        gate_up_scales: [experts, 2 * inner] float32, if gate_up is in panels: [experts, panels, blocks, bytes] uint8,
            contiguous, of each expert what quantize_group8 or quantize_table4 writes.
        down_scales: [experts, hidden] float32, for a down in panels; down may be stored otherwise than gate_up.
        gate_up_bias: [experts, 2 * inner] in the dtype of x, in the order of the rows of gate_up; stride 1 in the last
            dimension.
        down_bias: [experts, hidden], likewise.
        interleaved: Whether gate is the even rows of gate_up and up the odd ones, instead of gate above up.
        alpha: Of "swiglu_oai".
        limit: Of "swiglu_oai" and "swiglu_clamped": at least 0; infinity clamps nothing.
        gate_up_kind: A kind of block of linear_blocks, such as "mxfp4", or its number, if gate_up is in blocks:
            [experts, 2 * inner, hidden / elements, bytes] uint8, the blocks of a row adjacent; or of each expert what
            pack_blocks writes, [experts, 2 * inner / 16, hidden / elements, 16 * bytes] uint8, contiguous.
        down_kind: The kind of a down [experts, hidden, inner / elements, bytes] in blocks, or in panels of them.
        weights_on_input: Multiply the experts' inputs by weights, rounded to the dtype of x, instead of their results,
            as Llama 4 does.
        first_expert: The number of the first expert given, where ranks share the experts. The sum leaves out those that
            are not given: the sum of the ranks' results is the whole one.
        total_experts: How many experts index may name; -1: those given.
        out: [tokens, hidden], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [tokens, hidden] in the dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or an index that is no expert; on CUDA, where the
            kernel reads the index, such a token's result is NaN.
        NotImplementedError: On CUDA, for quantized weights or more than 4096 experts.
        ValueError: For an unknown activation or name of a kind.

    Equivalent to:
        >>> given = (x[:, None] * (weights[..., None] if weights_on_input else 1)).to(x.dtype)
        >>> both = torch.einsum("tkih,tkh->tki", gate_up[index.long()], given.expand(*index.shape, -1))
        >>> both = both if gate_up_bias is None else both + gate_up_bias[index.long()]
        >>> gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        >>> if activation in ("swiglu_oai", "swiglu_clamped"):
        ...     gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        >>> if activation == "geglu":
        ...     h = torch.nn.functional.gelu(gate, approximate="tanh") * up
        ... elif activation == "relu2_no_mul":
        ...     h = torch.nn.functional.relu(both) ** 2
        ... elif activation == "swiglu_oai":
        ...     h = gate * torch.sigmoid(alpha * gate) * (up + 1)
        ... else:
        ...     h = torch.nn.functional.silu(gate) * up
        >>> results = torch.einsum("tkhi,tki->tkh", down[index.long()], h)
        >>> results = results if down_bias is None else results + down_bias[index.long()]
        >>> y = (results * (1 if weights_on_input else weights[..., None])).sum(1).to(x.dtype)

    Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; gated as in arXiv:2002.05202;
        "swiglu_oai" and its parameters: OpenAI, gpt-oss model card, arXiv:2508.10925.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"infini::fused_experts: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    kinds = [kind_number(name, kind) for name, kind in (("gate_up_kind", gate_up_kind), ("down_kind", down_kind))]
    op = torch.ops.infini.fused_experts
    of = (x, gate_up, down, index, weights, ACTIVATIONS[activation], gate_up_scales, down_scales, gate_up_bias)
    more = (down_bias, interleaved, alpha, limit, *kinds, weights_on_input, first_expert, total_experts)
    return op.default(*of, *more) if out is None else op.out(*of, *more, out=out)


def kind_number(name: str, kind: str | int) -> int:
    """Return the number of a kind of block; -1: not in blocks."""
    if isinstance(kind, str):
        if kind not in KINDS:
            raise ValueError(f"infini::fused_experts: {name} must be one of {', '.join(KINDS)}, got {kind!r}")
        return KINDS[kind].number
    return kind


def fake(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weights: Tensor,
    activation: int = 0,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_kind: int = -1,
    down_kind: int = -1,
    weights_on_input: bool = False,
    first_expert: int = 0,
    total_experts: int = -1,
) -> Tensor:
    return x.new_empty(x.shape)


SPEC = OpSpec(
    fused_experts,
    schema="(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weights, int activation=0, "
    "Tensor? gate_up_scales=None, Tensor? down_scales=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, "
    "bool interleaved=False, float alpha=1.702, float limit=7.0, int gate_up_kind=-1, int down_kind=-1, "
    "bool weights_on_input=False, int first_expert=0, int total_experts=-1) -> Tensor",
    fake=fake,
)
