"""torch_infini.runtime.program: bits as of direct calls, the planned memory, what is refused, threads, errors, leaks.

What must be refused where the kernels are CUDA's: tests/test_cuda_graphs.py.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from support.sanitizers import sanitized
from torch_infini.runtime import Program, program
from torch_infini.runtime._memory import plan_memory
from torch_infini.testing import as_tuple, call
from torch_infini.testing.compare import copied
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos
from torch_infini.testing.ops.random_sample import settings_for
from torch_infini.testing.ops.rope import angles
from torch_infini.weights import quantize_int4, quantize_int8

LONG = 30.0  # seconds after which a test that waits has failed
OPS = list(all_op_infos())
ops = torch.ops.infini


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def message(call_: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call_()
    return str(caught.value)


class Decoder:
    """Two layers of a LLaMA's decode step, the second with weights of 8 and 4 bits; draws the next tokens."""

    heads, kv_heads, size, hidden, inner, vocabulary, rows = 4, 2, 16, 64, 128, 96, 3

    def __init__(self, dtype: torch.dtype, indices: torch.dtype = torch.int64) -> None:
        width = (self.heads + 2 * self.kv_heads) * self.size
        self.tokens = torch.tensor([3, 90, 41])
        self.positions = torch.tensor([5, 0, 30])
        self.seq_lens = self.positions + 1
        self.slots = torch.tensor([5, 32, 94])
        self.block_tables = torch.tensor([[0, 1], [2, 3], [4, 5]])
        self.cos, self.sin = angles(32, self.size // 2, dtype)
        self.k, self.v = torch.randn(2, 2, 6, self.kv_heads, 16, self.size).to(dtype)
        self.norms = 1 + torch.randn(5, self.hidden).to(dtype) / 8
        self.settings = settings_for(self.rows, temperature=0.9)
        if indices != torch.int64:
            for name in ("tokens", "positions", "seq_lens", "slots", "block_tables"):
                setattr(self, name, getattr(self, name).to(indices))
            self.settings = tuple(s if s.is_floating_point() else s.to(indices) for s in self.settings)

        def weight(n: int, k: int) -> Tensor:
            return (torch.randn(n, k) / k**0.5).to(dtype)

        self.embedding = weight(self.vocabulary, self.hidden)
        sizes = ((width, self.hidden), (self.hidden, self.hidden), (2 * self.inner, self.hidden))
        self.weights = [weight(n, k) for n, k in (*sizes, (self.hidden, self.inner))]
        self.int8 = [quantize_int8(weight(n, k)) for n, k in sizes[:2]]
        self.int4 = [quantize_int4(weight(n, k)) for n, k in (sizes[2], (self.hidden, self.inner))]

    def product(self, layer: int, i: int, x: Tensor) -> Tensor:
        if layer == 0:
            return ops.linear(x, self.weights[i])
        if i < 2:
            return ops.linear_int8(x, *self.int8[i], None, True)
        return ops.linear_int4(x, *self.int4[i - 2], None, True)

    def step(self) -> dict[str, Any]:
        h = ops.embedding(self.tokens, self.embedding)
        x = ops.rms_norm(h, self.norms[0])
        for layer in range(2):
            k, v = self.k[layer], self.v[layer]
            q = torch.empty(self.rows, self.heads, self.size, dtype=h.dtype)
            qkv = self.product(layer, 0, x)
            ops.qkv_rope_cache(q, k, v, qkv, self.cos, self.sin, self.positions, self.slots)
            a = ops.paged_attention(q, k, v, self.block_tables, self.seq_lens)
            x, h = ops.add_rms_norm(self.product(layer, 1, a.flatten(1)), h, self.norms[1 + 2 * layer])
            gate, up = self.product(layer, 2, x).split(self.inner, -1)
            x, h = ops.add_rms_norm(self.product(layer, 3, ops.swiglu(gate, up)), h, self.norms[2 + 2 * layer])
        logits = ops.linear(x, self.embedding)
        given = ops.random_sample_given(logits[0], 0.4, 0.9, 50, 0.8)
        return {"logits": logits, "drawn": (ops.random_sample(logits, *self.settings), [h]), "given": given}

    def advance(self, tokens: Tensor) -> None:
        self.tokens.copy_(tokens % self.vocabulary)
        for counter in (self.positions, self.seq_lens, self.slots):
            counter.add_(1)
        self.settings[-1].add_(1)


CALLS = 2 + 2 * 9 + 3  # of Decoder.step


def leaves(results: dict[str, Any]) -> list[Tensor]:
    return [results["logits"], results["drawn"][0], results["drawn"][1][0], results["given"]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("indices", [torch.int64, torch.int32], ids=str)
def test_a_decoders_steps(indices: torch.dtype, dtype: torch.dtype, mode: type[AbstractContextManager[None]]) -> None:
    with mode():
        torch.manual_seed(1)
        replayed = Decoder(dtype, indices)
        torch.manual_seed(1)
        direct = Decoder(dtype, indices)
        step = program(replayed.step)
        assert step.calls == CALLS
        drawn = []
        for _ in range(2):  # positions 30 and 31 are the last
            got, want = step(), direct.step()
            assert got is step.outputs and got.keys() == want.keys()
            assert all(map(same_bits, leaves(got), leaves(want)))
            assert same_bits(replayed.k, direct.k) and same_bits(replayed.v, direct.v)
            drawn.append(want["drawn"][0].clone())
            for decoder in (replayed, direct):
                decoder.advance(want["drawn"][0])
        assert not torch.equal(*drawn)


@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_every_op(spec: OpInfo) -> None:
    """The functional form, or the one that writes: a program's result is that of a call, after other inputs too."""
    for sample in list(spec.samples(spec.dtypes[0]))[:4]:
        args = [copied(a) for a in sample.args]
        kept = [copied(a) for a in args]
        made = program(lambda args=args, sample=sample: spec.op(*args, **sample.kwargs))
        assert made.calls == 1
        want = as_tuple(call(spec, Sample("kept", tuple(map(copied, kept)), sample.kwargs)))
        if not spec.mutates:
            assert all(map(same_bits, as_tuple(made.outputs), want))
        for spoilt in as_tuple(made.outputs) if spec.outputs else ():
            spoilt.fill_(1)
        for arg, before in zip(args, kept, strict=True):
            if isinstance(arg, Tensor):
                arg.copy_(before)
        got = made()
        if spec.mutates:
            got = tuple(a for name, a in zip(spec.arguments, args, strict=False) if name in spec.mutates)
        assert all(map(same_bits, as_tuple(got), want))


@pytest.mark.parametrize("spec", [spec for spec in OPS if spec.inplace], ids=lambda spec: spec.name)
def test_in_place_forms(spec: OpInfo) -> None:
    sample = next(s for s in spec.samples(torch.float32) if s.args[0].numel() > 8)
    form = getattr(ops, f"{spec.name}_").default

    def fn() -> Tensor:
        x = ops.rearrange(sample.args[0])
        form(x, *sample.args[1:], **sample.kwargs)
        return x

    made = program(fn)
    assert made.calls == 2
    for _ in range(2):  # a second replay begins with what the first was given
        assert same_bits(made(), spec.op(*sample.args, **sample.kwargs))


def test_out_forms_and_what_is_not_made_by_fn() -> None:
    x, w, mine = torch.randn(3, 8), torch.randn(8), torch.empty(3, 8)

    def fn() -> list[Tensor | None]:
        y = torch.empty_like(x)
        ops.rms_norm.out(x, w, out=y[:, :])
        ops.silu.out(y, out=mine)
        return [y, mine, x, mine[1:], None, y.t()]

    made = program(fn)
    x.normal_()
    y, out, same, part, none, transposed = made.replay()
    want = ops.rms_norm(x, w)
    assert same_bits(y, want) and same_bits(transposed, want.t())
    assert out is mine and same_bits(mine, ops.silu(want)) and same_bits(part, mine[1:])
    assert same is x and none is None
    assert y.untyped_storage().nbytes() == made.arena_bytes >= y.nbytes
    assert y.data_ptr() % 64 == 0


def test_fn_runs_once() -> None:
    x, runs = torch.randn(4), []
    made = program(lambda: (runs.append(1), ops.silu(x))[1])
    made(), made()
    assert runs == [1]


def test_calls_are_made_once_when_they_are_noted() -> None:
    x, y = torch.randn(2, 5, 7)
    want = ops.silu(x)

    def fn() -> list[Tensor | None]:
        ops.silu_(x)
        both = ops.rearrange(x.expand(3, 5, 7))
        return [both[1], both[0, :1].expand(4, 7), None, ops.add(y, x), y, torch.empty(0)]

    made = program(fn)
    assert same_bits(x, want)
    results = [want, want[:1].expand(4, 7), None, want + y, y]
    assert all(a is b is None or same_bits(a, b) for a, b in zip(made.outputs, results, strict=False))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views(mode: type[AbstractContextManager[None]]) -> None:
    with mode():
        x = torch.randn(4, 6, 8)

        def fn() -> list[Tensor]:
            y = ops.silu(x)
            views = [
                y.view(24, 8), y.reshape(4, 48), y.unflatten(2, (2, 4)), y.split(3, 1)[1], y.transpose(0, 1),
                y[1:3, ::2],
                y[0].t(), y.unsqueeze(1), y.narrow(2, 1, 5), y.select(1, 2), y[0, 0].expand(3, 8), y.detach(),
                y.flatten(), y.permute(2, 0, 1), y.chunk(2, 2)[1], y.unbind(1)[3], y.contiguous(),
                y.as_strided((2, 3), (1, 2), 5), y.view(torch.int32).view(torch.float32), y[..., 3],
            ]  # fmt: skip
            return [ops.rearrange(view) for view in views] + views

        made = program(fn)
        x.normal_()
        got, want = made(), fn()
        assert len(got) == 40
        assert all(map(same_bits, got, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_that_are_atens(dtype: torch.dtype) -> None:
    """Large ones: a kernel that itself calls torch's dispatcher, whatever modes a replay finds."""
    x, w = torch.randn(256, 512).to(dtype), torch.nn.Parameter(torch.randn(512, 512).to(dtype))
    made = program(lambda: ops.linear(x, w))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        x.normal_()
        want = ops.linear(x, w)
        made.outputs.fill_(1)
        with mode():
            got = made()
        assert same_bits(got, want) and not got.requires_grad


# ---- memory ----


def random_dag(seed: int, inputs: list[Tensor]) -> Callable[[], tuple[list[Tensor], int]]:
    """A function that makes tensors of tensors, always the same; it returns some, and the bytes of all."""

    def fn() -> tuple[list[Tensor], int]:
        pick = random.Random(seed)
        values, made, bytes_ = list(inputs), [], 0
        for _ in range(pick.randint(1, 40)):
            a, b = pick.choice(values[-6:] + inputs), pick.choice(values)
            rows = min(a.shape[0], b.shape[0])
            a, b = a[-rows:], b[:rows]
            kind = pick.randrange(8)
            if kind == 0:
                new = ops.add_rms_norm(a, b, inputs[-1][0])
            elif kind == 1:
                new = (ops.swiglu(a, b),)
            elif kind == 2:
                new = (ops.softmax(a, pick.choice((0, 1))),)
            elif kind == 3:
                new = (ops.matmul(a, ops.softmax(b.t(), 1)).t(), ops.rearrange(b[rows // 2 :]))
                new = (ops.matmul(new[0], a), new[1])
            elif kind == 4 and made:  # in place, where others may look on
                ops.silu_(pick.choice(made))
                continue
            elif kind == 5:
                new = (torch.empty_like(a),)
                ops.sub.out(a, b, out=new[0])
            elif kind == 6:
                new = ops.topksoftmax(a, 2)[:1]
                new = (ops.add(a, new[0][:, :1]),)
            else:
                new = (ops.mul(a, b), ops.add(a, b))
            values += new
            made += new
            bytes_ += sum(t.nbytes for t in new)
        return pick.sample(made, pick.randint(1, min(4, len(made)))) if made else [], bytes_

    return fn


@pytest.mark.parametrize("seed", range(60))
def test_random_dags(seed: int) -> None:
    inputs = [torch.randn(rows, 8) for rows in (1, 5, 9, 40)]
    dag = random_dag(seed, inputs)
    made = program(lambda: dag()[0])
    for _ in range(2):
        for x in inputs:
            x.normal_()
        got = made()
        assert all(map(same_bits, got, dag()[0]))


def test_memory_is_reused() -> None:
    """A chain needs the place of three tensors, however long it is; a result keeps its own."""
    x, w = torch.randn(16, 64), torch.randn(64)

    def chain() -> tuple[Tensor, Tensor]:
        first = y = ops.silu(x)
        for _ in range(50):
            y = ops.rms_norm(y, w)
        return first, y

    assert x.nbytes % 64 == 0
    made = program(chain)
    assert made.calls == 51 and made.arena_bytes == 3 * x.nbytes
    x.normal_()
    assert all(map(same_bits, made(), chain()))

    decoder = Decoder(torch.float32)
    kept = []

    def unplanned() -> list[Tensor]:
        h = ops.embedding(decoder.tokens, decoder.embedding)
        for _ in range(10):
            kept.append(h)
            h, _ = ops.add_rms_norm(h, h, decoder.norms[0])
        return [h, *kept]

    everything = program(unplanned).arena_bytes
    assert everything == 12 * kept[0].nbytes  # all but the second result of the last norm are kept


@pytest.mark.parametrize("seed", range(20))
def test_places(seed: int) -> None:
    """No two that live at once touch, and the total is not far from what is needed at the busiest moment."""
    pick = random.Random(seed)
    lives, sizes = {}, {}
    for key in range(pick.randint(1, 80)):
        first = pick.randint(0, 50)
        lives[key] = (first, first + pick.choice((0, 1, 2, 5, 30)))
        sizes[key] = pick.choice((0, 1, 63, 64, 65, 4096, 100_000, pick.randint(1, 10_000)))
    offsets, total = plan_memory(sizes, lives)
    spans = {key: range(offsets[key], offsets[key] + sizes[key]) for key in lives}
    assert all(span.start % 64 == 0 and span.stop <= total for span in spans.values())
    for a in lives:
        for b in lives:
            if a < b and lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1] and spans[a] and spans[b]:
                assert spans[a].stop <= spans[b].start or spans[b].stop <= spans[a].start
    needed = max(sum(sizes[key] for key in lives if lives[key][0] <= when <= lives[key][1]) for when in range(90))
    assert needed <= total <= 1.25 * needed + 64 * len(lives)


@pytest.mark.skipif(sanitized() or not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_programs_free_their_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def one() -> None:
        x = torch.randn(512, 1024)  # 2 MB
        program(lambda: ops.silu(ops.silu(x)))()

    for _ in range(5):
        one()
    gc.collect()
    before = resident()
    for _ in range(200):  # 6 MB each
        one()
    gc.collect()
    assert resident() - before < 100 * 2**20


def test_a_program_keeps_what_it_uses() -> None:
    def make() -> tuple[Program, Tensor, StorageWeakRef]:
        x = torch.randn(8)
        return program(lambda: ops.silu(x)), ops.silu(x), StorageWeakRef(x.untyped_storage())

    made, want, storage = make()
    arena = StorageWeakRef(made.outputs.untyped_storage())
    gc.collect()
    assert not storage.expired() and same_bits(made(), want)
    del made
    gc.collect()
    assert storage.expired() and arena.expired()


def test_a_failed_recording_keeps_nothing() -> None:
    def fail() -> StorageWeakRef:
        x = torch.randn(8)
        assert "got aten.relu.default" in message(lambda: program(lambda: torch.relu(ops.silu(x))))
        return StorageWeakRef(x.untyped_storage())

    storage = fail()
    gc.collect()
    assert storage.expired()
    y = torch.randn(3)
    assert program(lambda: ops.silu(y)).calls == 1  # and the thread can record


# ---- errors ----

X = torch.ones(3, 4)
ROWS = torch.tensor([0, 1])
RULE = (
    "torch_infini.runtime.program: fn must call nothing but ops of torch.ops.infini, views that need no copy and "
    "torch.empty, got "
)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "fn, named",
    [
        (lambda: X + 1, "aten.add.Tensor"),
        (lambda: X.add_(1), "aten.add_.Tensor"),
        (lambda: torch.empty(3, 4).copy_(X), "aten.copy_.default"),
        (lambda: torch.empty(3, 4).fill_(0), "aten.fill_.Scalar"),
        (lambda: torch.zeros(3), "aten.zeros.default"),
        (lambda: ops.silu(X).t().contiguous(), "aten.clone.default"),
        (lambda: ops.silu(X).t().reshape(12), "aten.clone.default"),
        (lambda: ops.silu(X)[0, 0].item(), "aten._local_scalar_dense.default"),
        (lambda: X.bfloat16(), "aten._to_copy.default"),
        (lambda: torch.nn.functional.linear(X, X), "aten.mm.default"),
        (lambda: torch.cat([X, X]), "aten.cat.default"),
        (lambda: X[ROWS], "aten.index.Tensor"),
        (lambda: torch.empty(2).resize_(3), "aten.resize_.default"),
        (lambda: torch.empty(2).unsqueeze_(0), "aten.unsqueeze_.default"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_ops_are_refused(fn: Callable[[], Any], named: str, mode: type[AbstractContextManager[None]]) -> None:
    with mode():
        assert message(lambda: program(fn)) == RULE + named
    assert torch.equal(X, torch.ones(3, 4))


def test_ops_without_a_form_for_programs_are_refused() -> None:
    library = torch.library.Library("infini", "FRAGMENT")
    library.define("of_test_program(Tensor x) -> Tensor")
    library.define("of_test_program_(Tensor(a!) x) -> ()")
    library.impl("of_test_program", lambda x: x + 1, "CPU")
    library.impl("of_test_program_", lambda x: None, "CPU")
    x = torch.ones(3)
    assert message(lambda: program(lambda: ops.of_test_program(x))) == (
        "torch_infini.runtime.program: every op must have an out form or write into its arguments, got "
        "infini.of_test_program.default"
    )
    assert message(lambda: program(lambda: (ops.silu(x), ops.of_test_program_(x))[0])) == (
        "torch_infini.runtime.program: every op must have a kernel in C++, got 1 without one"
    )
    assert library is not None


def test_other_results_and_devices_are_refused() -> None:
    head = "torch_infini.runtime.program: "
    returns = head + "fn must return tensors, or tuples, lists and dicts of them, got "
    assert message(lambda: program(lambda: (ops.silu(X), 3))) == returns + "3"
    cpu = head + "every tensor must be on the CPU (on CUDA use torch_infini.runtime.graph), got one on meta"
    there = X.to("meta")
    for fn in (lambda: ops.silu(there), lambda: torch.empty(3, device="meta"), lambda: there[0], lambda: there):
        assert message(lambda fn=fn: program(fn)) == cpu


def test_gradients_are_refused() -> None:
    w = torch.nn.Parameter(torch.ones(4))
    no_gradient = (
        "torch_infini.runtime.program: results must not require a gradient, because a program has no backward (call "
        "program() under torch.no_grad()), got one that does"
    )
    with torch.enable_grad():
        assert message(lambda: program(lambda: {"y": [ops.rms_norm(X, w)]})) == no_gradient
        assert message(lambda: program(lambda: w)) == no_gradient
        made = program(lambda: ops.rms_norm(X, w).detach())
    y = program(lambda: ops.rms_norm(X, w)).outputs
    with torch.enable_grad():
        assert not made().requires_grad and not y.requires_grad
        written = torch.ones(3, 4)
        with torch.no_grad():
            writes = program(lambda: ops.silu_(written))
        written.requires_grad_()
        follows = written * 1
        assert "must be detached" in message(lambda: ops.silu_(follows))
        writes()  # as recorded, without a gradient


def test_what_fn_raises_comes_out() -> None:
    class Broken(Exception):
        pass

    def fn() -> None:
        ops.silu(X)
        raise Broken

    with pytest.raises(Broken):
        program(fn)
    w = torch.ones(5)
    assert message(lambda: program(lambda: ops.rms_norm(X, w))) == message(lambda: ops.rms_norm(X, w))
    assert same_bits(program(lambda: ops.silu(X))(), ops.silu(X))


def test_programs_within_programs_are_refused() -> None:
    inner = program(lambda: ops.silu(X))
    rule = "torch_infini.runtime.program: fn must not make or replay another program, got one that does"
    assert message(lambda: program(inner)) == rule
    assert message(lambda: program(lambda: program(lambda: ops.silu(X)).outputs)) == rule
    assert same_bits(inner(), ops.silu(X))


def test_bad_values_at_a_replay() -> None:
    """The op's own sentence; what comes before has run, what comes after has not, and the next replay is right."""
    ids, weight = torch.tensor([1, 2]), torch.randn(5, 4)
    before, after = torch.empty(5, 4), torch.empty(2, 4)

    def fn() -> Tensor:
        ops.silu.out(weight, out=before)
        y = ops.embedding(ids, weight)
        ops.silu.out(y, out=after)
        return y

    made = program(fn)
    for wrong in (5, -1):
        weight.normal_()
        kept = after.clone()
        ids[1] = wrong
        sentence = message(lambda: ops.embedding(ids, weight))
        assert message(made.replay) == sentence and "ids[1]" in sentence
        assert same_bits(before, ops.silu(weight)) and same_bits(after, kept)
        ids[1] = 3
        assert same_bits(made(), weight[[1, 3]]) and same_bits(after, ops.silu(weight[[1, 3]]))


def test_memory_freed_at_a_replay() -> None:
    """Tensors are looked at anew each time: what was resized away is refused, not read."""
    x = torch.randn(3, 8)
    made = program(lambda: ops.silu(x[:2]))
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(0)
    assert message(made.replay) == "infini::silu: x must have its memory allocated, got shape [2, 8] without any"
    x.untyped_storage().resize_(size)
    x.normal_()
    assert same_bits(made(), ops.silu(x[:2]))


# ---- threads ----


def run_in_threads(*bodies: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    for error in errors:
        raise error


def long_program() -> Program:
    """About a tenth of a second, in C alone, on one thread: one row. Its tensors take turns in three places."""
    x, w, b = torch.randn(3, 400_000)

    def fn(repeats: int) -> Tensor:
        y = x
        for _ in range(repeats):
            y = ops.layer_norm(y, w, b)
        return y

    fn(20)
    start = time.perf_counter()
    fn(20)
    each = (time.perf_counter() - start) / 20
    return program(lambda: fn(max(20, round(0.1 / each))))


def test_different_programs_run_concurrently() -> None:
    def body(seed: int) -> None:
        x = torch.randn(7, 32, generator=torch.Generator().manual_seed(seed))

        def fn() -> tuple[Tensor, ...]:
            y = ops.silu(x)
            for _ in range(20):
                y = ops.softmax(ops.add(y, x))
            return y, ops.gelu(y)

        with torch.no_grad():
            made = program(fn)
            for i in range(50):
                x.fill_(i).add_(seed)[:, ::2] = 1
                assert all(map(same_bits, made(), fn()))

    run_in_threads(*(lambda seed=seed: body(seed) for seed in range(4)))


def test_replays_of_one_program_come_one_after_the_other() -> None:
    made = long_program()
    want = made().clone()

    def body() -> None:
        for _ in range(3):
            made()

    run_in_threads(body, body, body)
    assert same_bits(made.outputs, want)
    with made._lock:  # whoever replays holds the others up
        thread = threading.Thread(target=made.replay)
        thread.start()
        thread.join(1)
        assert thread.is_alive()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_replay_lets_other_threads_run() -> None:
    made = long_program()
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.001)

    def replay() -> None:
        try:
            for _ in range(20):
                start = time.perf_counter()
                made()
                end = time.perf_counter()
                quarter = (end - start) / 4
                if any(start + quarter < moment < end - quarter for moment in list(seen)):
                    return
            raise AssertionError("no other thread ran during a replay")
        finally:
            done.set()

    run_in_threads(watch, replay)


def test_a_program_replayed_by_another_thread() -> None:
    """Nothing of the thread that recorded is in it, its modes least of all."""
    x = torch.randn(5)
    with torch.inference_mode():
        made = program(lambda: ops.silu(x))
    x.normal_()
    run_in_threads(lambda: made())
    assert same_bits(made.outputs, ops.silu(x)) and not made.outputs.is_inference()
