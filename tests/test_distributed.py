"""torch.distributed's backend "infiniccl": every collective, dtypes, layouts, asynchronous calls, groups."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.ranks import Ranks

SIZE = 3
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
OPS = ("SUM", "PRODUCT", "MIN", "MAX")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as made:
        yield made


def values(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers of which sums and products are exact in every dtype, other ones on every rank."""
    g = torch.Generator().manual_seed(rank + 7 * sum(shape))
    return torch.randint(0, 4, shape, generator=g).to(dtype)


def everyones(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [values(rank, dtype, *shape) for rank in range(SIZE)]


def reduced(tensors: list[Tensor], op: str) -> Tensor:
    together = torch.stack([t.double() for t in tensors])
    result = {"SUM": together.sum(0), "PRODUCT": together.prod(0), "MIN": together.amin(0), "MAX": together.amax(0)}[op]
    return result.to(tensors[0].dtype)


def check(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want), (got, want)


def done(work: Any, asynchronous: bool) -> None:
    if asynchronous:
        assert work.wait() and work.is_completed()
    else:
        assert work is None


# ---- what runs on the ranks ----


def all_reduces(asynchronous: bool) -> None:
    me = dist.get_rank()
    for dtype in DTYPES:
        for op in OPS:
            for shape in ((1,), (1023,), (3, 5, 7), (0,), (70000,)):
                x = values(me, dtype, *shape)
                done(dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=asynchronous), asynchronous)
                check(x, reduced(everyones(dtype, *shape), op))
    x = values(me, torch.float32, 9)
    done(dist.all_reduce(x, dist.ReduceOp.AVG, async_op=asynchronous), asynchronous)
    torch.testing.assert_close(x, sum(everyones(torch.float32, 9)) / SIZE)
    x = values(me, torch.complex64, 5)
    done(dist.all_reduce(x, async_op=asynchronous), asynchronous)
    check(x, sum(everyones(torch.complex64, 5)))


def strided() -> None:
    me = dist.get_rank()
    x = values(me, torch.float32, 6, 10)
    want = reduced(everyones(torch.float32, 6, 10), "SUM")
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 3:]):
        there = x.clone()
        dist.all_reduce(view(there))
        check(view(there), view(want))
    column = torch.zeros(6, 10)
    dist.broadcast(column[:, 3] if me else x[:, 3], 0)
    check(column[:, 3] if me else x[:, 3], values(0, torch.float32, 6, 10)[:, 3])
    out = torch.zeros(SIZE * 10, 6).t()
    dist.all_gather_into_tensor(out, x.t())
    check(out.contiguous().view(-1), torch.cat([t.t().reshape(-1) for t in everyones(torch.float32, 6, 10)]))
    parameter = torch.nn.Parameter(values(me, torch.float32, 4))
    dist.all_reduce(parameter.data)
    check(parameter.data, reduced(everyones(torch.float32, 4), "SUM"))


def moves(asynchronous: bool) -> None:
    me = dist.get_rank()
    for dtype in (*DTYPES, torch.complex64, torch.float8_e4m3fn):
        same = lambda got, want: check(got.view(torch.uint8), want.view(torch.uint8))  # noqa: E731
        for n in (1, 513, 40000):
            mine, all_ = values(me, dtype, n), everyones(dtype, n)
            for root in range(SIZE):
                x = mine.clone()
                done(dist.broadcast(x, root, async_op=asynchronous), asynchronous)
                same(x, all_[root])
            out = torch.empty(SIZE * n, dtype=dtype)
            done(dist.all_gather_into_tensor(out, mine, async_op=asynchronous), asynchronous)
            same(out, torch.cat([t.view(torch.uint8) for t in all_]).view(dtype))
            parts = [torch.empty(n, dtype=dtype) for _ in range(SIZE)]
            done(dist.all_gather(parts, mine, async_op=asynchronous), asynchronous)
            for part, want in zip(parts, all_, strict=True):
                same(part, want)


def reduce_scatters(asynchronous: bool) -> None:
    me = dist.get_rank()
    for dtype in DTYPES:
        for op in OPS:
            for n in (1, 777):
                x = values(me, dtype, SIZE * n)
                want = reduced(everyones(dtype, SIZE * n), op)[me * n : (me + 1) * n]
                out, reduction = torch.empty(n, dtype=dtype), getattr(dist.ReduceOp, op)
                done(dist.reduce_scatter_tensor(out, x, reduction, async_op=asynchronous), asynchronous)
                check(out, want)
                out.zero_()
                done(dist.reduce_scatter(out, list(x.chunk(SIZE)), reduction, async_op=asynchronous), asynchronous)
                check(out, want)


def delegated() -> None:
    """Gloo's part: what libinfiniccl has no kernel for."""
    me = dist.get_rank()
    x, all_ = values(me, torch.float32, 6), everyones(torch.float32, 6)
    y = x.clone()
    dist.reduce(y, 1)
    if me == 1:
        check(y, reduced(all_, "SUM"))
    parts = [torch.empty(6) for _ in range(SIZE)] if me == 2 else None
    dist.gather(x, parts, 2)
    for part, want in zip(parts or [], all_, strict=False):
        check(part, want)
    y = torch.empty(6)
    dist.scatter(y, all_ if me == 0 else None, 0)
    check(y, all_[me])
    y = torch.empty(6)
    dist.all_to_all_single(y, x)
    check(y, torch.cat([t.chunk(SIZE)[me] for t in all_]))
    outs = [torch.empty(2) for _ in range(SIZE)]
    dist.all_to_all(outs, [torch.full((2,), float(10 * me + to)) for to in range(SIZE)])
    for other, out in enumerate(outs):
        check(out, torch.full((2,), float(10 * other + me)))
    bits = torch.tensor([1 << me])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    check(bits, torch.tensor([7]))
    sparse = torch.sparse_coo_tensor(torch.tensor([[me]]), torch.tensor([2.0]), (SIZE,))
    dist.all_reduce(sparse)
    check(sparse.to_dense(), torch.full((SIZE,), 2.0))


def point_to_point() -> None:
    me = dist.get_rank()
    right, left = (me + 1) % SIZE, (me - 1) % SIZE
    for n in (3, 300_000):  # a ring in which all send first
        x, y = torch.full((n,), float(me)), torch.empty(n)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)])
        for work in works:
            work.wait()
        check(y, torch.full((n,), float(left)))
    if me == 0:
        a, b = torch.empty(1), torch.empty(1)
        dist.recv(b, 1, tag=2)  # the tag counts, not the order
        dist.recv(a, 1, tag=1)
        assert (a.item(), b.item()) == (1, 2)
        found = {dist.recv(a): a.item() for _ in range(2)}
        assert found == {1: 10.0, 2: 20.0}
    elif me == 1:
        for work in [dist.isend(torch.tensor([float(tag)]), 0, tag=tag) for tag in (1, 2)]:
            work.wait()
    if me:
        dist.send(torch.tensor([10.0 * me]), 0)


def objects() -> None:
    me = dist.get_rank()
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": me, "more": "x" * me})
    assert gathered == [{"rank": rank, "more": "x" * rank} for rank in range(SIZE)]
    told = ["left", 3.5] if me == 1 else [None, None]
    dist.broadcast_object_list(told, 1)
    assert told == ["left", 3.5]
    dist.barrier()
    assert dist.barrier(async_op=True).wait()


def asynchronous_calls() -> None:
    """Many at once, in order; a synchronous one after them; while a rank waits in a receive; futures."""
    me = dist.get_rank()
    tensors = [torch.full((100,), float(i + me)) for i in range(50)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    dist.all_reduce(tensors[0])  # takes its place after them
    assert all(work.is_completed() for work in works)
    for i, (t, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        want = 3.0 * i + 3
        check(t, torch.full((100,), 3 * want if i == 0 else want))
        assert work.get_future().value()[0] is t and work.result()[0] is t
    # Rank 0 asks for the collective before it sends what rank 1 waits for.
    x = torch.ones(4)
    if me == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(torch.ones(1), 1)
    else:
        if me == 1:
            dist.recv(torch.empty(1), 0)
        work = dist.all_reduce(x, async_op=True)
    seen: list[float] = []
    then = work.get_future().then(lambda future: seen.append(future.value()[0].sum().item()))
    then.wait()
    assert seen == [12.0]


def coalesced() -> None:
    me = dist.get_rank()
    tensors = [torch.full((n,), float(me)) for n in (1, 5, 9)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    assert all((t == 3).all() for t in tensors)
    outs = [torch.empty(SIZE * n) for n in (2, 3)]
    with dist._coalescing_manager():
        for n, out in zip((2, 3), outs, strict=True):
            dist.all_gather_into_tensor(out, torch.full((n,), float(me)))
    assert [out.tolist() for out in outs] == [[float(r) for r in range(SIZE) for _ in range(n)] for n in (2, 3)]


def same_as_gloo() -> None:
    """Sums that round: close to Gloo's, the same bits on all ranks and from one time to the next."""
    gloo = dist.new_group(backend="gloo")
    g = torch.Generator().manual_seed(dist.get_rank())
    for dtype, relative in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)):
        for n in (5, 4096, 100_003):
            x = torch.randn(n, generator=g).to(dtype)
            ours, again, theirs = x.clone(), x.clone(), x.clone()
            dist.all_reduce(ours)
            dist.all_reduce(again)
            dist.all_reduce(theirs, group=gloo)
            torch.testing.assert_close(ours, theirs, rtol=relative, atol=8 * relative)
            check(ours, again)
            everywhere: list[Any] = [None] * SIZE
            dist.all_gather_object(everywhere, ours)
            for other in everywhere:
                check(other, ours)


def groups() -> None:
    """Each has a separate context: calls in different contexts are not ordered."""
    me = dist.get_rank()
    pair, rest, whole = dist.new_group([0, 2]), dist.new_group([1]), dist.new_group()
    x = torch.full((4,), float(me + 1))
    if me in (0, 2):
        dist.all_reduce(x, group=pair)
        assert x[0] == 4
        dist.broadcast(x, 2, group=pair)
    else:
        dist.all_reduce(x, group=rest)
        assert x[0] == 2
    first, second = torch.ones(3), torch.ones(3)
    order = [(first, whole), (second, dist.group.WORLD)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t, group in (order if me else order[::-1])]
    for work in works:
        work.wait()
    assert (first == 3).all() and (second == 3).all()
    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("row", "column"))
    y = torch.ones(2)
    dist.all_reduce(y, group=mesh.get_group("row"))
    assert y[0] == SIZE
    for group in (pair, rest, whole):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def describe_group() -> tuple[str, str, str, str]:
    world = dist.group.WORLD
    return dist.get_backend(), world.name(), world.transport.name, world.transport.reason


def wrong_arguments() -> list[str]:
    said = []
    for call in (
        lambda: dist.all_gather_into_tensor(torch.empty(5), torch.empty(2)),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)),
        lambda: dist.new_group(pg_options=dist.ProcessGroupGloo._Options()),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            said.append(str(error))
    dist.barrier()  # the group is as good as before
    return said


def start_again(folder: str, timeout: float) -> None:
    me = dist.get_rank()
    dist.destroy_process_group()
    limit = datetime.timedelta(seconds=timeout)
    for attempt in range(2):
        dist.init_process_group("infiniccl", f"file://{folder}/{attempt}", limit, rank=me, world_size=SIZE)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x[0] == SIZE
        if attempt == 0:
            dist.destroy_process_group()


# ---- the tests ----


@pytest.mark.parametrize("function", [all_reduces, moves, reduce_scatters])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_collectives(ranks: Ranks, function: Any, asynchronous: bool) -> None:
    ranks.run(function, asynchronous)


@pytest.mark.parametrize(
    "function",
    [strided, delegated, point_to_point, objects, asynchronous_calls, coalesced, same_as_gloo, groups],
)
def test_on_the_ranks(ranks: Ranks, function: Any) -> None:
    ranks.run(function)


def test_what_a_group_says_of_itself(ranks: Ranks) -> None:
    assert ranks.run(describe_group) == [("infiniccl", "infiniccl", "shm", "all ranks are on one machine")] * SIZE


def test_wrong_arguments(ranks: Ranks) -> None:
    for gather, scatter, options in ranks.run(wrong_arguments):
        assert gather.startswith("infiniccl: the output of all_gather must have 3 times the elements of the input")
        assert scatter.startswith("infiniccl: the input of reduce_scatter must have 3 times the elements of the output")
        assert options == "infiniccl: pg_options must be None, got _Options"


def test_init_again_in_the_same_process(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(start_again, str(tmp_path), 60.0)
