"""Ops that write into a cache, under torch.compile: eager's bits, in the caller's memory, and no copy of the cache.

What Inductor does to such ops (auto_functionalized_v2, then reinplacing) has gone wrong in three ways: it cloned whole
buffers, dropped clones that were needed (pytorch issue 198031) and wrote views of graph inputs elsewhere (198068).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import torch_infini  # noqa: F401
from torch_infini.testing import as_tuple
from torch_infini.testing.ops import OpInfo, all_op_infos

infini = torch.ops.infini
LAYERS, HEADS, KV_HEADS, BLOCK, SIZE = 3, 4, 2, 16, 64
MODES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def new_rows(tokens: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, slot_mapping), one token skipped."""
    slots = torch.randperm(blocks * BLOCK)[:tokens]
    slots[1] = -1
    return *torch.randn(2, tokens, KV_HEADS, SIZE).unbind(), slots


def stacked(blocks: int, *leading: int) -> Tensor:
    return torch.randn(*leading, blocks, KV_HEADS, BLOCK, SIZE)


@contextmanager
def allocations() -> Iterator[list[int]]:
    """The elements of every buffer that the code compiled in here allocates, filled in as it runs."""
    sizes: list[int] = []
    guards = torch._C._dynamo.guards
    empty_strided = guards._empty_strided_cpu

    def recording(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        buffer = empty_strided(size, stride, dtype)
        sizes.append(buffer.numel())
        return buffer

    guards._empty_strided_cpu = recording
    try:
        yield sizes
    finally:
        guards._empty_strided_cpu = empty_strided


def copies(code: str, sizes: list[int], cache: int) -> int:
    """How often the code copies a cache of so many elements: buffers that could hold it, and copies by name."""
    body = code[code.index("def call(") : code.index("runner = ")]
    assert "empty_strided_cpu(" not in body or sizes, "the buffers were allocated unseen"
    return sum(size >= cache for size in sizes) + body.count("clone") + body.count("copy_")


def copied(value: Any) -> Any:
    """The argument in separate memory; a view stays a view at its place in a copy of its storage."""
    if not isinstance(value, Tensor):
        return value
    return value.new_empty(0).set_(value.untyped_storage().clone(), value.storage_offset(), value.shape, value.stride())


def check(
    function: Callable[..., Any], calls: list[tuple[Any, ...]], dynamic: bool, expected_copies: int | None = 0
) -> None:
    """Compiled once for all calls: results and written arguments are those of eager; the cache, each call's first
    argument, is copied so many times in each (None: at least once)."""
    torch._dynamo.reset()
    eager_calls = [tuple(copied(a) for a in args) for args in calls]
    memory = [[a.data_ptr() if isinstance(a, Tensor) else 0 for a in args] for args in calls]
    with allocations() as sizes, torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        counts = []

        def run() -> list[Any]:
            results = []
            for args in calls:
                sizes.clear()
                results.append(compiled(*args))
                counts.append(list(sizes))
            return results

        results, codes = run_and_get_code(run)
        assert len(codes) == 1, "one graph for all calls"
        for args, eager_args, before, result, allocated in zip(
            calls, eager_calls, memory, results, counts, strict=True
        ):
            expected = function(*eager_args)
            assert [a.data_ptr() if isinstance(a, Tensor) else 0 for a in args] == before
            pairs = [*zip(args, eager_args, strict=True), (result, expected)]
            for got, want in pairs:
                if isinstance(want, Tensor):
                    assert torch.equal(got, want)
                else:
                    assert got == want
            cache = KV_HEADS * BLOCK * SIZE * args[0].shape[-4]
            found = copies(codes[0], allocated, cache)
            assert found == expected_copies if expected_copies is not None else found > 0, codes[0]


def sizes_for(dynamic: bool) -> list[tuple[int, int]]:
    """(tokens, blocks) of each call."""
    return [(5, 6), (9, 7)] if dynamic else [(5, 6)]


@MODES
def test_graph_input(dynamic: bool) -> None:
    def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        infini.paged_caching(k_cache, v_cache, k + 1, v * 2, slots)

    check(write, [(stacked(b), stacked(b), *new_rows(t, b)) for t, b in sizes_for(dynamic)], dynamic)


@MODES
def test_layer_of_a_stacked_cache(dynamic: bool) -> None:
    def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        infini.paged_caching(cache[1, 0], cache[1, 1], k + 1, v * 2, slots)

    check(write, [(stacked(b, LAYERS, 2), *new_rows(t, b)) for t, b in sizes_for(dynamic)], dynamic)


@MODES
def test_graph_input_that_is_a_view(dynamic: bool) -> None:
    """The caller passes one layer of a larger tensor, which does not begin where its storage does."""

    def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        infini.paged_caching(cache[0], cache[1], k + 1, v * 2, slots)

    check(write, [(stacked(b, LAYERS, 2)[2], *new_rows(t, b)) for t, b in sizes_for(dynamic)], dynamic)


@MODES
def test_interleaved_cache(dynamic: bool) -> None:
    """k and v alternate: neither is dense."""

    def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        k_cache, v_cache = cache.unbind(0)
        infini.paged_caching(k_cache, v_cache, k + 1, v * 2, slots)

    def interleaved(blocks: int) -> Tensor:
        return torch.randn(blocks, 2, KV_HEADS, BLOCK, SIZE).transpose(0, 1)

    check(write, [(interleaved(b), *new_rows(t, b)) for t, b in sizes_for(dynamic)], dynamic)


@MODES
def test_layers_in_sequence(dynamic: bool) -> None:
    """Two layers write and read their part of one cache: what is read is what was written just before."""

    def forward(
        cache: Tensor, hidden: Tensor, slots: Tensor, tables: Tensor, seq_lens: Tensor, starts: Tensor
    ) -> Tensor:
        for layer in range(2):
            k_cache, v_cache = cache[layer, 0], cache[layer, 1]
            infini.paged_caching(k_cache, v_cache, hidden[:, :KV_HEADS] + 1, hidden[:, KV_HEADS:] * 2, slots)
            attended = infini.paged_attention_prefill(hidden, k_cache, v_cache, tables, seq_lens, starts)
            hidden = hidden + attended
        return hidden

    def arguments(tokens: int, blocks: int) -> tuple[Tensor, ...]:
        table = torch.randperm(blocks)[None]
        at = torch.arange(tokens)
        slots = table[0, at // BLOCK] * BLOCK + at % BLOCK
        hidden = torch.randn(tokens, HEADS, SIZE)
        return stacked(blocks, 2, 2), hidden, slots, table, torch.tensor([tokens]), torch.tensor([0, tokens])

    calls = [arguments(20, 6), arguments(33, 7)] if dynamic else [arguments(20, 6)]
    check(forward, calls, dynamic)


@MODES
def test_decode_step(dynamic: bool) -> None:
    """qkv_rope_cache into a query tensor of the graph and a layer's cache, then paged_attention, in two layers."""

    def forward(
        cache: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, tables: Tensor, seq_lens: Tensor
    ) -> Tensor:
        for layer in range(2):
            k_cache, v_cache = cache[layer].unbind(0)
            qkv = hidden.repeat(1, 2)
            q = qkv.new_empty(qkv.shape[0], HEADS, SIZE)
            infini.qkv_rope_cache(q, k_cache, v_cache, qkv, cos, sin, seq_lens - 1, slots)
            attended = infini.paged_attention(q, k_cache, v_cache, tables, seq_lens)
            hidden = hidden + attended.flatten(1)
        return hidden

    def arguments(tokens: int, blocks: int) -> tuple[Tensor, ...]:
        tables = torch.stack([torch.randperm(blocks)[:2] for _ in range(tokens)])
        lens = torch.randint(1, 2 * BLOCK + 1, (tokens,))
        # Sequences do not have separate blocks here; the last token that writes a slot wins, as in eager mode.
        slots = tables.gather(1, ((lens - 1) // BLOCK)[:, None])[:, 0] * BLOCK + (lens - 1) % BLOCK
        angle = torch.randn(2 * BLOCK, SIZE // 2)
        return stacked(blocks, 2, 2), torch.randn(tokens, HEADS * SIZE), angle.cos(), angle.sin(), slots, tables, lens

    check(forward, [arguments(t, b) for t, b in ([(3, 6), (5, 7)] if dynamic else [(3, 6)])], dynamic)


@MODES
def test_module_buffer(dynamic: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("alone", stacked(6))
            self.register_buffer("both", stacked(6, 2))

        def forward(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
            infini.paged_caching(self.both[1], self.alone, k + 1, v * 2, slots)

    layer, eager = Layer(), Layer()
    eager.load_state_dict(layer.state_dict())
    memory = [b.data_ptr() for b in layer.buffers()]
    torch._dynamo.reset()
    with allocations() as sizes, torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
        calls = [new_rows(t, 6) for t in ((5, 9) if dynamic else (5,))]
        _, codes = run_and_get_code(lambda: [compiled(*rows) for rows in calls])
        assert len(codes) == 1
        for rows in calls:
            eager(*rows)
    assert [b.data_ptr() for b in layer.buffers()] == memory
    for got, want in zip(layer.buffers(), eager.buffers(), strict=True):
        assert torch.equal(got, want)
    assert copies(codes[0], sizes, layer.alone.numel()) == 0, codes[0]


@MODES
def test_rope_in_place_on_a_part(dynamic: bool) -> None:
    """The in-place form of an op on some heads of a graph input."""

    def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        infini.rope_(qkv[:, HEADS : HEADS + KV_HEADS], cos, sin)

    calls = []
    for tokens in (5, 9) if dynamic else (5,):
        angle = torch.randn(tokens, SIZE // 2)
        calls.append((torch.randn(tokens, HEADS + 2 * KV_HEADS, SIZE), angle.cos(), angle.sin()))
    torch._dynamo.reset()
    compiled = torch.compile(rotate, fullgraph=True, dynamic=dynamic)
    for qkv, cos, sin in calls:
        expected = qkv.clone()
        rotate(expected, cos, sin)
        compiled(qkv, cos, sin)
        assert torch.equal(qkv, expected)


@MODES
def test_rows_cloned_from_the_cache(dynamic: bool) -> None:
    """pytorch issue 198031: Inductor drops the clone, and the op reads where it writes. It reads first."""

    def shift(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        k, v = k_cache[0].clone().transpose(0, 1), v_cache.clone()[1].transpose(0, 1)
        infini.paged_caching(k_cache, v_cache, k[: slots.shape[0]], v[: slots.shape[0]], slots)

    def arguments(tokens: int, blocks: int) -> tuple[Tensor, ...]:
        return stacked(blocks), stacked(blocks), torch.arange(1, tokens + 1) + BLOCK * torch.arange(tokens).remainder(2)

    check(shift, [arguments(t, b) for t, b in sizes_for(dynamic)], dynamic)


@MODES
def test_a_piece_read_before_is_not_stale(dynamic: bool) -> None:
    """What the caller took from the cache before it was written keeps its values, at the price of a copy."""

    def exchange(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        before = k_cache[0].clone()
        infini.paged_caching(k_cache, v_cache, k, v, slots)
        return before

    check(
        exchange,
        [(stacked(b), stacked(b), *new_rows(t, b)) for t, b in sizes_for(dynamic)],
        dynamic,
        expected_copies=None,
    )


@MODES
def test_the_copies_are_seen(dynamic: bool) -> None:
    """A call that cannot do without a copy, so that the other tests mean something."""

    def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        changed = k_cache.clone()
        infini.paged_caching(changed, v_cache, k, v, slots)
        return changed

    calls = [(stacked(b), stacked(b), *new_rows(t, b)) for t, b in sizes_for(dynamic)]
    check(write, calls, dynamic, expected_copies=None)


@pytest.mark.parametrize("spec", [spec for spec in all_op_infos() if spec.outputs], ids=lambda spec: spec.name)
def test_out_forms(spec: OpInfo) -> None:
    """They compile, write eager's bits into the caller's memory and return it; a wrong shape is refused in words."""
    sample = next(iter(spec.samples(spec.dtypes[0])))
    expected = as_tuple(spec.op(*sample.args, **sample.kwargs))
    outs = {name: torch.zeros_like(t) for name, t in zip(spec.out_names, expected, strict=True)}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda args, kwargs, outs: spec.out(*args, **kwargs, **outs), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        results = as_tuple(compiled(sample.args, sample.kwargs, outs))
        for result, out, want in zip(results, outs.values(), expected, strict=True):
            assert result.data_ptr() == out.data_ptr() or not out.numel()
            assert torch.equal(out, want) or want.isnan().any()
        wrong = {name: t.new_zeros(*t.shape, 2) for name, t in outs.items()}
        with pytest.raises(Exception, match=rf"infini::{spec.name}: out0? must have shape \["):
            compiled(sample.args, sample.kwargs, wrong)


def test_inference_mode() -> None:
    def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        infini.paged_caching(cache[1, 0], cache[1, 1], k + 1, v * 2, slots)

    cache = stacked(6, LAYERS, 2)
    expected, rows = cache.clone(), new_rows(5, 6)
    write(expected, *rows)
    torch._dynamo.reset()
    with torch.inference_mode(), allocations() as sizes:
        _, (code,) = run_and_get_code(torch.compile(write, fullgraph=True), cache, *rows)
    assert torch.equal(cache, expected)
    assert copies(code, sizes, cache[0, 0].numel()) == 0, code


def test_what_autograd_follows_is_refused_while_compiling() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    compiled = torch.compile(lambda x: torch.ops.infini.relu_(x * 2), backend="eager")
    with pytest.raises(
        Exception, match="infini::relu: every tensor must be detached, .* got x that requires a gradient"
    ):
        compiled(x)
    with torch.no_grad():
        compiled(x)
