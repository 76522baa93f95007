"""infinicore's ops called with the samples of the C operators that serve them, for the tests of ops and of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

import torch_infini.compat.infinicore as ic
from torch_infini.compat.infinicore import utils
from torch_infini.compat.infinicore.lib import _infinicore as raw
from torch_infini.testing.c_ops import COp, CSample, Described, as_tensor, clone
from torch_infini.testing.ops import all_c_ops

F = ic.nn.functional
ALGOS = (raw.RoPEAlgo.GPT_J, raw.RoPEAlgo.GPT_NEOX)

# Of each C operator: the call of infinicore that writes the same outputs, and the raw call; `a` has the arguments by
# the names that the C header gives them, tensors as infinicore's.
CALLS: dict[str, Callable[[Any], object]] = {
    "Add": lambda a: ic.add(a.a, a.b, out=a.c),
    "Mul": lambda a: ic.mul(a.a, a.b, out=a.c),
    "Gemm": lambda a: ic.matmul(a.a, a.b, alpha=a.alpha, out=a.c),
    "Linear": lambda a: F.linear(a.x, a.weight, a.bias, out=a.out),
    "RMSNorm": lambda a: F.rms_norm(a.x, a.w.shape, a.w, a.epsilon, out=a.y),
    "AddRMSNorm": lambda a: ic.add_rms_norm_(a.y, a.residual_out, a.a, a.b, a.weight, a.epsilon),
    "Attention": lambda a: ic.attention(a.q, a.k, a.v, a.k_cache, a.v_cache, a.pos, out=a.out),
    "CausalSoftmax": lambda a: F.causal_softmax(a.x, out=a.y),
    "Embedding": lambda a: F.embedding(a.ids, a.weight, out=a.out),
    "RoPE": lambda a: F.rope(a.x, a.pos_ids, a.sin_table, a.cos_table, ALGOS[a.algo], out=a.y),
    "RandomSample": lambda a: F.random_sample(a.probs, a.random_val, a.topp, a.topk, a.temperature, out=a.result),
    "Silu": lambda a: F.silu(a.input, out=a.output),
    "SwiGLU": lambda a: F.swiglu(a.a, a.b, out=a.c),
    "Rearrange": lambda a: ic.rearrange(a.src, out=a.dst),
    "PagedAttention": lambda a: ic.paged_attention(
        a.q, a.k_cache, a.v_cache, a.block_tables, a.seq_lens, a.alibi_slopes, a.scale, out=a.out
    ),
    "PagedAttentionPrefill": lambda a: ic.paged_attention_prefill(
        a.q, a.k_cache, a.v_cache, a.block_tables, a.seq_lens, a.cum_seq_lens_q, a.alibi_slopes, a.scale, out=a.out
    ),
    "PagedCaching": lambda a: ic.paged_caching(a.k_cache, a.v_cache, a.k, a.v, a.slot_mapping),
}
# The same calls that make their result; those of CALLS without one here always write to their arguments.
RESULTS: dict[str, Callable[[Any], Any]] = {
    "Add": lambda a: ic.add(a.a, a.b),
    "Mul": lambda a: ic.mul(a.a, a.b),
    "Gemm": lambda a: ic.matmul(a.a, a.b, alpha=a.alpha),
    "Linear": lambda a: F.linear(a.x, a.weight, a.bias),
    "RMSNorm": lambda a: F.rms_norm(a.x, a.w.shape, a.w, a.epsilon),
    "AddRMSNorm": lambda a: ic.add_rms_norm(a.a, a.b, a.weight, a.epsilon),
    "Attention": lambda a: ic.attention(a.q, a.k, a.v, a.k_cache, a.v_cache, a.pos),
    "CausalSoftmax": lambda a: F.causal_softmax(a.x),
    "Embedding": lambda a: F.embedding(a.ids, a.weight),
    "RoPE": lambda a: F.rope(a.x, a.pos_ids, a.sin_table, a.cos_table, ALGOS[a.algo]),
    "RandomSample": lambda a: F.random_sample(a.probs, a.random_val, a.topp, a.topk, a.temperature),
    "Silu": lambda a: F.silu(a.input),
    "SwiGLU": lambda a: F.swiglu(a.a, a.b),
    "Rearrange": lambda a: ic.rearrange(a.src),
    "PagedAttention": lambda a: ic.paged_attention(
        a.q, a.k_cache, a.v_cache, a.block_tables, a.seq_lens, a.alibi_slopes, a.scale
    ),
    "PagedAttentionPrefill": lambda a: ic.paged_attention_prefill(
        a.q, a.k_cache, a.v_cache, a.block_tables, a.seq_lens, a.cum_seq_lens_q, a.alibi_slopes, a.scale
    ),
}
OPS = {op.name: op for op in all_c_ops() if op.name in CALLS}


def samples(op: COp) -> Iterator[CSample]:
    """The operator's samples, but for what the front end's op does not have."""
    for sample in op.samples():
        if op.name == "Gemm" and sample.args["beta"] != 0:
            continue
        yield sample


def is_written(sample: CSample) -> bool:
    """Whether the op writes all of its result: it leaves the rows of sequences without keys as they are."""
    lens = sample.args.get("seq_lens")
    return lens is None or bool((as_tensor(lens) > 0).all())


def wrapped(args: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments with infinicore tensors over the memory of torch's; one object stays one."""
    made: dict[int, Any] = {}

    def wrap(value: Any) -> Any:
        if isinstance(value, Described):
            made[id(value)] = described(value)
        elif isinstance(value, torch.Tensor) and id(value) not in made:
            made[id(value)] = ic.from_torch(value)
        return made.get(id(value), value)

    return SimpleNamespace(**{key: wrap(value) for key, value in args.items()})


def described(value: Described) -> ic.Tensor:
    kind = utils.to_infinicore_dtype(value.base.dtype)._underlying
    address = value.base.data_ptr() + value.offset * value.base.element_size()
    device = raw.Device()
    return ic.Tensor(raw.from_owner(value.base, address, list(value.shape), list(value.strides), kind, device))


def copies(sample: CSample) -> tuple[dict[str, Any], SimpleNamespace]:
    """Copies of a sample's arguments, as torch tensors and as infinicore's over the same memory."""
    after = clone(sample.args)
    return after, wrapped(after)
