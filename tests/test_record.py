"""torch_infini.runtime.record: bits as of eager calls, nothing run while recording, memory, threads, refusals, errors.

tests/test_cuda_record.py has recordings on CUDA.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from support.sanitizers import sanitized
from torch_infini import runtime
from torch_infini.models import Llama
from torch_infini.nn import Batch
from torch_infini.ops import register_provider, unregister_provider, use_provider
from torch_infini.runtime import Recording, _bound, record
from torch_infini.runtime._plan import WritingCall
from torch_infini.testing import as_tuple
from torch_infini.testing.checkpoints import SMALL, random_model
from torch_infini.testing.compare import copied
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos

LONG = 30.0  # seconds after which a test that waits has failed
OPS = list(all_op_infos())
ops = torch.ops.infini


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def message(call_: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call_()
    return str(caught.value)


def whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def garbage(values: Any) -> None:
    """Bytes that no kernel takes: NaN, and numbers of rows that no table has."""
    for tensor in tensors(values):
        whole(tensor).fill_(0xFF)


# ---- what a graph computes ----


@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_every_op(spec: OpInfo) -> None:
    """Recorded on garbage, so not run; then run on two sets of inputs: the bits of eager calls."""

    def call(args: list[Any], sample: Sample) -> tuple[Tensor, ...]:
        result = spec.op(*args, **sample.kwargs)
        written = (a for name, a in zip(spec.arguments, args, strict=False) if name in spec.mutates)
        return tuple(written) if spec.mutates else as_tuple(result)

    for sample in list(spec.samples(spec.dtypes[0]))[:5]:
        args = [copied(a) for a in sample.args]
        garbage(args)
        before = [copied(a) for a in args]
        graph = record(lambda args=args, sample=sample: call(args, sample))
        assert graph.calls == 1
        assert all(map(same_bits, tensors(args), tensors(before)))
        for swapped in (False, True, False):
            given = [copied(a) for a in sample.args]
            if swapped and given[0].is_floating_point():
                memory = torch.empty(0, dtype=given[0].dtype).set_(given[0].untyped_storage())
                memory.copy_(memory.flip(0))
            for tensor, value in zip(tensors(args), tensors(given), strict=True):
                whole(tensor).copy_(whole(value))  # some are expanded
            assert all(map(same_bits, graph.run(), call(given, sample))), sample.name


@pytest.mark.parametrize("spec", [spec for spec in OPS if spec.outputs], ids=lambda spec: spec.name)
def test_out_and_in_place_forms(spec: OpInfo) -> None:
    sample = next(s for s in spec.samples(spec.dtypes[0]) if s.args[0].numel() > 8)
    want = as_tuple(spec.op(*sample.args, **sample.kwargs))
    outs = [torch.empty_like(t) for t in want]
    results = []
    with record() as graph:
        results.append(spec.out(*sample.args, **sample.kwargs, **dict(zip(spec.out_names, outs, strict=True))))
        if spec.inplace:
            i = spec.arguments.index(spec.inplace)
            args = list(sample.args)
            args[i] = args[i].clone()
            getattr(ops, f"{spec.name}_").default(*args, **sample.kwargs)
            results.append(args[i])
    assert all(got is out for got, out in zip(as_tuple(results[0]), outs, strict=True))
    for _ in range(2):
        for out in outs:
            out.zero_()
        graph.run()
        assert all(map(same_bits, outs, want))
        assert not spec.inplace or same_bits(results[1], want[0])


@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_rules(spec: OpInfo) -> None:
    """Those of shapes, dtypes and strides hold while noting, those of values and of groups in run(); all in the op's
    own words, but for results, whose shape and dtype the recording has told before.
    """
    for case in spec.errors():
        op = spec.out if any(name in case.kwargs for name in spec.out_names) else spec.op
        given = tensors((case.args, case.kwargs))
        call = lambda op=op, case=case: record(lambda: op(*case.args, **case.kwargs))
        if any(tensor.is_meta for tensor in given):
            assert "must be strided and on the CPU" in message(call), case.name
            continue
        before = [tensor.clone() for tensor in given]
        late = case.of_values or "group" in spec.arguments
        heard = message(lambda call=call: call().run()) if late else message(call)
        assert heard == case.message or heard.startswith(f"infini::{spec.name}: out"), case.name
        assert all(map(same_bits, given, before)), case.name


class Inputs:
    def __init__(self) -> None:
        self.x, self.image, self.q = torch.randn(6, 8), torch.randn(2, 4, 9, 9), torch.randn(2, 4, 5, 8)
        self.mask, self.complex = torch.rand(6, 8) > 0.5, torch.randn(4, 4, dtype=torch.complex64)
        self.ids, self.kernel = torch.tensor([3, 0, 5]), torch.randn(6, 4, 3, 3)

    def change(self) -> None:
        for tensor in (self.x, self.image, self.q, self.complex, self.kernel):
            tensor.normal_()
        self.mask.logical_not_()
        self.ids.copy_(torch.randint(6, (3,)))


ATEN: dict[str, Callable[[Inputs], Any]] = {
    "views": lambda i: (i.x.t().contiguous(), i.x.view(2, 24).sum(1), i.x[::2, 1:], i.x.flatten()[3:] + 1),
    "dtypes": lambda i: (i.x.to(torch.float64), i.x.half().float(), (i.x * 8).to(torch.int32), i.x.bfloat16() * 2),
    "reductions": lambda i: (i.x.sum(), i.x.mean(0), i.x.max(1), i.x.argmax(), i.x.std(), i.x.norm(), i.x.cumsum(0)),
    "sorted": lambda i: (i.x.sort(1), i.x.topk(3), i.x.argsort(0)),
    "indexed": lambda i: (i.x[i.ids], i.x[:, [1, 2]], i.x.gather(0, i.ids[:, None].expand(3, 8))),
    "masked": lambda i: (torch.where(i.mask, i.x, 0.0), i.x.masked_fill(i.mask, 1.0), i.mask & (i.x > 0)),
    "joined": lambda i: (torch.cat([i.x, i.x]), torch.stack([i.x, i.x], 1), *i.x.chunk(2), i.x.repeat(2, 1)),
    "made": lambda i: (torch.zeros(3), torch.ones_like(i.x), torch.full((2,), 3), torch.arange(5) * 2, torch.eye(3)),
    "constants": lambda i: (torch.tensor([1.0, 2.0]) + 1, i.x.new_full((2,), 2.0), torch.linspace(0, 1, 4)),
    "convolutions": lambda i: (F.conv2d(i.image, i.kernel, padding=1), F.conv1d(i.image[:, :, 0], i.kernel[:, :, 0])),
    "pools": lambda i: (F.max_pool2d(i.image, 2), F.avg_pool2d(i.image, 2), F.interpolate(i.image, scale_factor=2)),
    "norms": lambda i: (F.layer_norm(i.x, (8,)), F.group_norm(i.image, 2)),
    "attention": lambda i: F.scaled_dot_product_attention(i.q, i.q, i.q, is_causal=True),
    "activations": lambda i: (F.gelu(i.x), F.softmax(i.x, -1), i.x.sigmoid().tanh(), i.x.clamp(0, 1), 1 / i.x, -i.x),
    "products": lambda i: (i.x @ i.x.t(), torch.bmm(i.q[0], i.q[0].mT), torch.einsum("ij,kj->ik", i.x, i.x)),
    "complex": lambda i: (i.complex.conj() @ i.complex, i.complex.real + 1, i.complex.abs(), torch.fft.rfft(i.x)),
    "lazy": lambda i: ((i.complex * 2).conj() @ i.complex, *((i.complex * k).conj().imag + (k - 2) for k in (2, 3))),
    "lists": lambda i: torch._foreach_add([i.x, i.x], 1.0),
    "losses": lambda i: (F.embedding(i.ids, i.x), F.cross_entropy(i.x[:3], i.ids)),
    "statistics": lambda i: F.batch_norm(i.image, torch.zeros(4), torch.ones(4), training=True),
    "solved": lambda i: (torch.linalg.qr(i.x), torch.linalg.inv(i.x[:, :6]), torch.linalg.cholesky(i.x @ i.x.t() + 99)),
    "mixed": lambda i: ops.silu(torch.exp(ops.rms_norm(i.x, i.x[0], 1e-5)) @ i.x.t()).softmax(-1),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ATEN)
def test_ops_of_torch(name: str, mode: type[AbstractContextManager[None]]) -> None:
    torch.manual_seed(1)
    inputs = Inputs()
    if name == "solved":
        inputs.change = lambda: inputs.x.copy_(torch.randn(6, 8) / 9 + torch.eye(6, 8))  # type: ignore[assignment,method-assign]
    with mode():
        graph = record(ATEN[name], inputs)
        for _ in range(3):
            inputs.change()
            got, want = graph.run(), ATEN[name](inputs)
            assert len(tensors(got)) == len(tensors(want)) > 0
            assert all(map(same_bits, tensors(got), tensors(want)))
            assert [t.stride() for t in tensors(got)] == [t.stride() for t in tensors(want)]


def test_only_functions_that_call_the_very_op() -> None:
    """torch's own functions are taken for an op only where they call that overload with these arguments."""
    x, y, out = torch.randn(3), torch.randn(3), torch.empty(3)
    aten = torch.ops.aten
    call = WritingCall(aten.sub.out, (x, y), {"out": out})
    probed: dict[str, Callable[..., Any]] = {
        "sub": lambda a, b, *, out: torch.sub(a, b, out=out),
        "swapped": lambda a, b, *, out: torch.sub(b, a, out=out),
        "other": lambda a, b, *, out: torch.add(a, b, out=out),
        "alpha": lambda a, b, *, out: torch.sub(a, b, alpha=2, out=out),
        "functional": lambda a, b, *, out: torch.sub(a, b),
        "nothing": lambda a, b, *, out: None,
        "raises": lambda a: None,
    }
    assert [name for name, function in probed.items() if _bound._FirstOp.calls(function, call)] == ["sub"]
    assert _bound.bind_call(call).func is torch._C._VariableFunctions.sub  # type: ignore[attr-defined]
    scalar = WritingCall(aten.sub.Scalar_out, (x, 2), {"out": out})  # of which torch.sub makes a tensor
    _bound.bind_call(scalar)()
    assert same_bits(out, x - 2)


def test_in_place_ops_and_views() -> None:
    """A view of a result, of an input and of an out tensor alias, before run() and after it."""
    x, y, out = torch.ones(4, 6), torch.zeros(6), torch.empty(4, 6)

    def step(out: Tensor) -> list[Tensor]:
        a = x * 2
        a[1:, ::2].add_(1)
        left, right = a.split(3, -1)
        left *= right
        y.add_(a.sum(0))
        b = torch.add(a, y, out=out)
        b[0] = 7
        a.t()[0].zero_()
        return [a, left, b, right.t(), b.view(-1)[5:]]

    graph = record(step, out)
    got = graph.outputs
    assert got[2] is out and got[1].untyped_storage().data_ptr() == got[0].untyped_storage().data_ptr()
    assert torch.equal(y, torch.zeros(6)) and torch.equal(x, torch.ones(4, 6))
    for _ in range(3):
        x.normal_()
        before = y.clone()
        graph.run()
        results, after = [t.clone() for t in got], y.clone()
        y.copy_(before)
        want = step(torch.empty(4, 6))
        assert all(map(same_bits, results, want)) and same_bits(after, y)


def test_functions_run_once_and_nothing_is_computed() -> None:
    ids, table, seen = torch.full((3,), 10**9), torch.randn(5, 8), []
    x = torch.ones(3)

    def fn(scale: float) -> Tensor:
        seen.append(1)
        x.mul_(scale)
        return ops.embedding(ids, table)

    graph = record(fn, 2.0)  # embedding's ids are out of range
    assert seen == [1] and torch.equal(x, torch.ones(3))
    assert "ids must be" in message(graph.run)
    ids.copy_(torch.tensor([4, 0, 1]))
    assert same_bits(graph.run(), table[ids]) and seen == [1]
    assert torch.equal(x, torch.full((3,), 4.0))


def test_random_ops_draw_anew() -> None:
    with record() as graph:
        drawn, dropped = torch.rand(100), F.dropout(torch.ones(100), 0.5)
        normal = torch.empty(3).normal_()
    state = torch.get_rng_state()
    graph.run()
    first = [t.clone() for t in (drawn, dropped, normal)]
    torch.set_rng_state(state)
    assert all(map(same_bits, first, (torch.rand(100), F.dropout(torch.ones(100), 0.5), torch.empty(3).normal_())))
    graph.run()
    assert not any(map(torch.equal, first, (drawn, dropped, normal)))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_modes_of_the_run(mode: type[AbstractContextManager[None]]) -> None:
    """Grad mode and autocast are the recording's: a run writes whatever tensors there are, and tracks none."""
    x, weight = torch.randn(4, 8), torch.nn.Parameter(torch.randn(8, 8))
    with torch.inference_mode():
        inference = torch.zeros(4, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            graph = record(lambda: (inference.copy_(x), F.linear(x, weight), F.softmax(x, -1), weight.data.mul_(1)))
            want = F.linear(x, weight)
    with mode(), torch.autocast("cpu", dtype=torch.float16):
        graph.run()
    assert graph.outputs[1].dtype == torch.bfloat16 and same_bits(graph.outputs[1], want)
    assert same_bits(inference, x) and same_bits(graph.outputs[2], F.softmax(x, -1))
    assert not graph.outputs[1].requires_grad and not graph.outputs[1].is_inference()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_models_decode_step(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path, progress=False)
    caches = [model.new_cache(10, 4) for _ in range(2)]
    for mine, other in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
        other.copy_(mine.normal_())
    rows = torch.tensor([3, 0, 9])
    tables = torch.tensor([[0, 1, 9], [2, 3, 9], [4, 5, 7]])
    batch = Batch(torch.tensor([1, 2, 3]), rows, torch.tensor([3, 8, 29]), tables, rows + 1)
    graph = record(model, batch, caches[0])
    layer = record(lambda: model.layers[0](model.embed(batch.tokens), None, batch, caches[0].layer(0)))
    assert graph.arena_bytes > 0
    for _ in range(2):
        got, want = graph.run(), model(batch, caches[1])
        assert same_bits(got, want)
        for a, b in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
            assert same_bits(a, b)
        want = model.layers[0](model.embed(batch.tokens), None, batch, caches[1].layer(0))
        assert all(map(same_bits, layer.run(), want))
        batch.tokens.copy_(torch.randint(SMALL["vocab_size"], (3,)))
        for counter in (batch.positions, batch.slot_mapping, batch.seq_lens):
            counter.add_(1)


def test_a_providers_op() -> None:
    """It runs at each run(), by its Python. What was recorded with our kernel keeps it."""
    x, calls = torch.randn(3, 4), []

    def provided(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 7

    register_provider("silu", provided, device="cpu", name="sevens")
    try:
        ours = record(lambda: ops.silu(x))
        use_provider("silu", "sevens")
        graph = record(lambda: ops.silu(x) * 2)
        assert calls == []
        x.normal_()
        assert same_bits(graph.run(), (x + 7) * 2) and calls == [1]
        graph.run(), ours.run()
        assert calls == [1, 1]
        use_provider("silu", "infini")
        assert same_bits(ours.outputs, ops.silu(x))
    finally:
        use_provider("silu", "infini")
        unregister_provider("silu", "sevens")


# ---- memory ----


def random_steps(seed: int, inputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """A function that makes tensors of tensors, always the same, and returns some of them."""

    def fn() -> list[Tensor]:
        pick = random.Random(seed)
        values = list(inputs)
        for _ in range(pick.randint(1, 30)):
            a, b = pick.choice(values[-5:] + inputs), pick.choice(values[-8:])
            kind = pick.randrange(8)
            if kind == 0:
                values += ops.add_rms_norm(a.contiguous(), b.contiguous(), inputs[0][0])
            elif kind == 1:
                values.append(torch.softmax(a, -1) - b)
            elif kind == 2 and len(values) > len(inputs):  # in place, where others may look on
                values[-1].mul_(0.5).add_(b)
            elif kind == 3:
                values += [half.repeat(1, 2) for half in ops.silu(a).chunk(2, -1)]
            elif kind == 4:
                values.append(torch.maximum(a, b, out=torch.empty_like(a)))
            elif kind == 5:
                values.append(ops.matmul(ops.softmax(a @ b.t(), 1), b))
            elif kind == 6:
                values.append(torch.sort(a, -1)[0].t().contiguous().t())
            else:
                values.append(ops.mul(a, b))
        return pick.sample(values, min(3, len(values)))

    return fn


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed: int) -> None:
    inputs = [torch.randn(6, 8) for _ in range(3)]
    fn = random_steps(seed, inputs)
    graph = record(fn)
    for _ in range(2):
        for x in inputs:
            x.normal_()
        assert all(map(same_bits, [t.clone() for t in graph.run()], fn()))


def test_dropped_results_share_memory() -> None:
    """A chain needs the place of two tensors, however long it is; what the caller holds has its own."""
    x, kept = torch.randn(16, 64), []

    def chain(keep: bool) -> Tensor:
        y = x
        for i in range(50):
            y = ops.silu(y) if i % 2 else y.tanh()
            if keep:
                kept.append(y)
        return y

    graph = record(chain, False)
    assert graph.calls == 50 and graph.arena_bytes == 2 * x.nbytes and graph.held_bytes == x.nbytes
    held = record(chain, True)
    assert held.arena_bytes == 0 and held.held_bytes == 50 * x.nbytes
    graph.run(), held.run()
    assert same_bits(graph.outputs, held.outputs)
    want = x
    for i, y in enumerate(kept):
        want = ops.silu(want) if i % 2 else want.tanh()
        assert same_bits(y, want)


def test_a_view_holds_its_memory() -> None:
    x = torch.randn(4, 8)

    def fn() -> Tensor:
        y = x.exp()
        y.sum()  # dropped
        return y[1:, 2]

    graph = record(fn)
    assert graph.held_bytes == x.nbytes
    assert same_bits(graph.run(), x.exp()[1:, 2])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", [F.binary_cross_entropy, F.huber_loss, F.mse_loss, F.smooth_l1_loss])
def test_losses(loss: Callable[..., Tensor], reduction: str) -> None:
    """Out forms of torch's losses resize a tensor for the result while they reduce."""
    a, b = torch.rand(2, 64, 3)
    graph = record(lambda: loss(a, b, reduction=reduction))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_bits(graph.run(), loss(a, b, reduction=reduction))


def test_a_graph_keeps_what_it_uses_and_frees_it() -> None:
    def make() -> tuple[Recording, Tensor, list[StorageWeakRef]]:
        x = torch.randn(8)
        graph = record(lambda: ops.silu(x.exp().neg()).tanh())
        refs = [StorageWeakRef(t.untyped_storage()) for t in (x, graph.outputs)]
        return graph, torch.tanh(ops.silu(x.exp().neg())), refs

    graph, want, refs = make()
    gc.collect()
    assert same_bits(graph.run(), want)
    del graph  # which is enough, without Python's collector
    assert all(ref.expired() for ref in refs)


def test_a_graph_refers_to_memory_not_to_tensors() -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    graph = record(lambda: (x.exp(), ops.silu(x)))
    x.t_()
    x.data = torch.zeros(2)
    graph.run()
    assert same_bits(graph.outputs[0], before.exp()) and same_bits(graph.outputs[1], ops.silu(before))


@pytest.mark.full
@pytest.mark.skipif(sanitized() or not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_runs_and_recordings_do_not_grow() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def one() -> Recording:
        x = torch.randn(256, 1024)  # 1 MB
        return record(lambda: ops.silu(x.exp()).neg())

    x = torch.randn(64, 64)
    graph = record(lambda: (ops.silu(F.conv1d(x[None], x[:, :, None])), x.exp().sum()))
    for _ in range(200):
        graph.run()
    for _ in range(5):
        one().run()
    gc.collect()
    before = resident()
    for _ in range(10_000):
        graph.run()
    for _ in range(100):  # 3 MB each
        one().run()
    gc.collect()
    assert resident() - before < 50 * 2**20


# ---- threads ----


def test_runs_of_several_threads() -> None:
    total, one = torch.zeros(1000), torch.ones(1000)
    with record() as graph:
        y = ops.add(total, one)
        total.copy_(y * 1)
    threads = [threading.Thread(target=lambda: [graph.run() for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert torch.equal(total, torch.full((1000,), 200.0))


def test_recordings_of_several_threads() -> None:
    """Equal calls at once, each for the first time of a thread: what one thread's fakes said is used by the others."""
    failures: list[Exception] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for size in range(1, 60):
                    x = torch.ones(size, 3)
                    record(lambda x=x: F.gelu(x @ torch.ones(3, 2)).cumsum(0).logsumexp(1))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert not failures


def test_a_recording_belongs_to_its_thread() -> None:
    x, y = torch.ones(3), torch.ones(3)
    with record() as graph:
        x.add_(1)
        thread = threading.Thread(target=lambda: (y.add_(1), record(lambda: y.add_(1)).run()))
        thread.start()
        thread.join(LONG)
    assert torch.equal(y, torch.full((3,), 3.0)) and torch.equal(x, torch.ones(3))
    graph.run()
    assert torch.equal(x, torch.full((3,), 2.0)) and torch.equal(y, torch.full((3,), 3.0))


# ---- what is refused ----

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: 1 if x.sum() > 0 else 2,
    "float": lambda x: float(x[0, 0]),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "print": lambda x: str(x),
    "format": lambda x: f"{x[0, 0]:.3f}",
    "deepcopy": lambda x: copy.deepcopy(x),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x[0].long(), 1),
}


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", READS)
def test_reading_values(name: str, mode: type[AbstractContextManager[None]], made: bool) -> None:
    x = torch.ones(4, 4)
    with mode():
        text = message(lambda: record(lambda: READS[name](x.exp() if made else x)))
    assert "torch_infini.runtime.record: ops are noted and not run" in text


SPARSE = torch.eye(4).to_sparse()
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "t_": (lambda x: x.t_(), "must keep its memory and shape"),
    "resize_": (lambda x: x.resize_(2), "must keep its memory and shape"),
    "set_": (lambda x: x.set_(torch.ones(3).untyped_storage()), "must keep its memory and shape"),
    "out of another shape": (lambda x: torch.add(x, x, out=torch.empty(0)), "must have the shape of the result"),
    "sparse": (lambda x: SPARSE * x, "must be strided and on the CPU"),
    "meta": (lambda x: x.to("meta"), "strided and on the CPU"),
    "shapes": (lambda x: x + torch.ones(3), "aten.add.Tensor"),
    "a program": (lambda x: runtime.program(lambda: ops.silu(x)), "must not be made or run while a graph is recorded"),
    "record": (lambda x: record(lambda: x.exp()), "must not be made or run while a graph is recorded"),
    "graph": (lambda x: runtime.graph(torch.exp, x), "must not be made or run while a graph is recorded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    fn, rule = REFUSED[name]
    x = torch.ones(4, 4)
    assert rule in message(lambda: record(fn, x))
    assert x.shape == (4, 4) and record(lambda: x.exp()).run().shape == (4, 4)


def test_runs_while_recording() -> None:
    x = torch.ones(3)
    graph, made = record(lambda: x.add_(1)), runtime.program(lambda: ops.silu(x))
    on_stream = runtime.graph(torch.exp, x)
    for call in (graph.run, made.replay, on_stream.replay):
        with record() as outer:
            assert "record" in message(call)
        outer.run()
    assert torch.equal(x, torch.ones(3))


def test_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    x = torch.ones(3)
    for op in (torch.mul, ops.add):
        with torch.enable_grad():
            assert "gradient" in message(partial(record, op, weight, x))
        assert same_bits(record(op, weight, x).run(), op(weight, x))
    with torch.enable_grad():  # nothing that requires one
        assert same_bits(record(lambda: x * 2).run(), x * 2)


def test_devices() -> None:
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        record(device="meta")
    assert "strided and on the CPU" in message(lambda: record(lambda: torch.ones(3, device="meta").exp()))


# ---- errors ----


def test_a_recordings_states() -> None:
    graph = record()
    assert "got one that is new" in message(graph.run) and "new" in graph.report()
    with graph:
        assert "got one that is recording" in message(graph.run)
    graph.run()
    with pytest.raises(RuntimeError, match="recorded once"), graph:
        pass
    graph.run()
    assert graph.calls == 0


def test_an_exception_ends_the_recording_and_keeps_nothing() -> None:
    def fail() -> tuple[StorageWeakRef, Recording]:
        x = torch.ones(8)
        with pytest.raises(ZeroDivisionError), record() as graph:
            x.add_(1)
            ops.silu_(x)
            1 / 0  # noqa: B018
        assert torch.equal(x, torch.ones(8))
        x.add_(1)  # runs at once
        assert torch.equal(x, torch.full((8,), 2.0))
        return StorageWeakRef(x.untyped_storage()), graph

    storage, graph = fail()
    gc.collect()
    assert storage.expired()
    assert "got one that is dropped" in message(graph.run)


def test_a_run_that_fails_can_be_repeated() -> None:
    """What stands before the failure has run, what stands behind it has not; of kernels and of torch."""
    ids, table, x = torch.tensor([9]), torch.randn(5, 2), torch.zeros(2)
    for of_torch in (False, True):
        with record() as graph:
            x.add_(1)
            y = table.index_select(0, ids) if of_torch else ops.embedding(ids, table)
            x.add_(1)
        ids.fill_(9)
        x.zero_()
        with pytest.raises((RuntimeError, IndexError), match=r"ids must be|out of range"):
            graph.run()
        assert torch.equal(x, torch.ones(2))
        ids.fill_(4)
        graph.run()
        assert torch.equal(x, torch.full((2,), 3.0)) and same_bits(y, table[4:])


def test_report() -> None:
    x = torch.ones(3)
    graph = record(lambda: ops.silu(x).exp())
    lines = graph.report().splitlines()
    assert lines[0] == "graph of 2 ops on CPU:0, run op by op"
    assert [line.strip() for line in lines[1:3]] == ["infini.silu.default", "aten.exp.default"]
    assert lines[3] == "2 ops of torch, none fused; dropped results share 64 bytes, held ones have 12"


# ---- with infinicore ----


def test_ops_of_infinicore_are_part_of_the_graph() -> None:
    ic = pytest.importorskip("torch_infini.compat.infinicore")
    x, y = torch.ones(4), torch.zeros(4)
    ours, theirs = ic.from_torch(x), ic.from_torch(y)
    with record() as graph:
        assert ic.is_graph_recording()
        ops.silu_(x)
        ic.add(ours, ours, out=theirs)
        ops.silu_(y)
        z = y * 2
        ic.add(theirs, ours, out=ours)
        torch.exp(z, out=y)
    assert not ic.is_graph_recording()
    assert torch.equal(x, torch.ones(4)) and torch.equal(y, torch.zeros(4))
    graph.run()
    a = ops.silu(torch.ones(4))
    b = ops.silu(a + a)
    assert same_bits(z, b * 2) and same_bits(x, a + b) and same_bits(y, (b * 2).exp())
    assert "graph of 6 ops" in graph.report() and graph.calls == 4
    ic.start_graph_recording()
    assert "records a graph already" in message(lambda: record(lambda: x.exp()))
    assert ic.stop_graph_recording() is not None
    with pytest.raises(RuntimeError, match="must not come between"), record():
        x.add_(1)
        ic.start_graph_recording()
    assert not ic.is_graph_recording()
