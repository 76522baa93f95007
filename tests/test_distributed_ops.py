"""torch.ops.infini's collectives between ranks, through shared memory and through Gloo; numbers of groups; programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_infini
from support.ranks import Ranks
from torch_infini import nn
from torch_infini.distributed import TPGroup, communicator
from torch_infini.runtime import program
from torch_infini.testing.compare import rounding_error

SIZE = 3
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
ops = torch.ops.infini


@pytest.fixture(scope="module", params=["shm", pytest.param("gloo", marks=pytest.mark.full)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(SIZE, environment={"INFINI_CCL": request.param}) as made:
        yield made


def values(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(rank + 7 * sum(shape))
    return torch.randint(0, 4, shape, generator=g).to(dtype)


def everyones(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [values(rank, dtype, *shape) for rank in range(SIZE)]


def reduced(dtype: torch.dtype, op: int, *shape: int) -> Tensor:
    together = torch.stack([t.double() for t in everyones(dtype, *shape)])
    results = (together.sum(0), together.prod(0), together.amax(0), together.amin(0), together.mean(0))
    return results[op].to(dtype)


def check(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=2**-7 if got.dtype.itemsize == 2 else 1e-6, atol=0)


# ---- what runs on the ranks ----


def every_op() -> None:
    me, group = dist.get_rank(), communicator()
    gloo = dist.group.WORLD.transport.name == "gloo"  # which does not reduce all dtypes
    for dtype in DTYPES:
        for op in range(5 if dtype.is_floating_point else 4):
            if gloo and dtype in (torch.int16, torch.bool):
                continue
            for shape in ((1,), (3, 40), (0, 4), (90, 777)):
                x = values(me, dtype, *shape)
                want = reduced(dtype, op, *shape)
                check(ops.all_reduce(x, group, op), want)
                if shape[0] % SIZE == 0:
                    check(ops.reduce_scatter(x, group, SIZE, op), want.chunk(SIZE)[me])
                ops.all_reduce_(x, group, op)
                check(x, want)
        for shape in ((1,), (2, 33), (0, 4)):
            x = values(me, dtype, *shape)
            check(ops.all_gather(x, group, SIZE), torch.cat(everyones(dtype, *shape)))
            for root in range(SIZE):
                check(ops.broadcast(x, group, root), values(root, dtype, *shape))
            ops.broadcast_(x, group, 1)
            check(x, values(1, dtype, *shape))


def layouts() -> None:
    """Any strides of input and output; an output that is the input."""
    me, group = dist.get_rank(), communicator()
    x = values(me, torch.float32, 6, 30)
    want = reduced(torch.float32, 0, 6, 30)
    for view in (lambda t: t.t(), lambda t: t[:, ::3], lambda t: t[3:, 1:]):
        check(ops.all_reduce(view(x), group), view(want).contiguous())
        out = torch.zeros(6, 30)
        assert ops.all_reduce.out(view(x), group, out=view(out)).data_ptr() == view(out).data_ptr()
        assert torch.equal(view(out), view(want)) and out.count_nonzero() == view(want).count_nonzero()
        y = x.clone()
        ops.all_reduce_(view(y), group)
        assert torch.equal(view(y), view(want))
    gathered = torch.zeros(30, SIZE * 6).t()
    ops.all_gather.out(x, group, SIZE, out=gathered)
    assert torch.equal(gathered, torch.cat(everyones(torch.float32, 6, 30)))
    y = x.clone()
    check(ops.all_reduce.out(y, group, out=y), want)


def with_a_norm() -> None:
    """all_reduce_add_rms_norm is all_reduce and add_rms_norm, to the bit, whatever its outputs are."""
    me, group = dist.get_rank(), communicator()
    fused = ops.all_reduce_add_rms_norm

    def check_all(x: Tensor, residual: Tensor, weight: Tensor, number: int) -> None:
        tail = weight, 1e-5, number
        want = ops.add_rms_norm(ops.all_reduce(x, group), residual, *tail)

        def same(got: tuple[Tensor, Tensor]) -> None:
            assert all(map(torch.equal, got, want)) and [t.dtype for t in got] == [t.dtype for t in want]

        same(fused(x, residual, *tail, group))
        outs = torch.empty_like(want[0]), torch.empty_like(want[1])
        for y, h in (
            (0, 1),
            (0, "x"),
            (0, "residual"),
            ("x", 1),
            ("residual", 1),
            ("x", "residual"),
            ("residual", "x"),
        ):
            given = {"x": x.clone(), "residual": residual.clone(), 0: outs[0], 1: outs[1]}
            if given[y].dtype == want[0].dtype:
                same(fused.out(given["x"], given["residual"], *tail, group, out0=given[y], out1=given[h]))

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape in ((1, 64), (5, 33), (2, 3, 100), (7, 4096), (300, 2048), (0, 4), (4, 0), (64,)):
            g = torch.Generator().manual_seed(sum(shape))
            residual, weight = torch.randn(shape, generator=g), torch.randn(shape[-1], generator=g)
            x = torch.randn(shape, generator=g.manual_seed(me))
            check_all(x.to(dtype), residual.to(dtype), weight.to(dtype), shape[-1] % 3)
    x, residual, weight = torch.randn(9, 40), torch.ones(12, 40), torch.rand(40, generator=g).bfloat16()
    dist.broadcast(residual, 0)
    check_all(x.bfloat16()[::3], residual.bfloat16()[2:11:3], weight, 1)
    check_all(x.bfloat16()[:, 8:], residual.bfloat16()[:9, 8:], weight[8:].float(), 1)


def rounding() -> None:
    """Half types are summed in float in the order of the ranks and rounded once; the same bits everywhere."""
    group = communicator()
    for dtype in (torch.bfloat16, torch.float16):
        parts = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(SIZE)]
        want = parts[0].float()
        for part in parts[1:]:
            want = want + part.float()
        got = ops.all_reduce(parts[dist.get_rank()], group)
        assert torch.equal(got, want.to(dtype))
        assert torch.equal(ops.broadcast(got, group, 1), got)


def programs() -> None:
    """Recorded with other ops, replayed with other values; the ranks stay in step."""
    me, group = dist.get_rank(), communicator()
    x, w = torch.zeros(4, 16), torch.ones(16)

    def step() -> Tensor:
        h = ops.all_reduce(ops.silu(x), group)
        ops.all_reduce_(h, group, 2)
        h, _ = ops.all_reduce_add_rms_norm(h, x[:1].expand(4, 16), w, group=group)
        return ops.all_gather(ops.rms_norm(h, w), group, SIZE)

    with torch.no_grad():
        made = program(step)
        assert made.calls == 6
        for seed in range(20):
            x.copy_(torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * seed + me)))
            assert torch.equal(made(), step())


def shared_layer() -> None:
    """What docs/distributed.md shows: the parts of two products, added up, are the products."""
    tp_group = TPGroup(dist.get_rank(), SIZE, communicator())
    g = torch.Generator().manual_seed(0)
    x, up_weight, down_weight = (torch.randn(n, k, generator=g) / 8 for n, k in ((5, 64), (192, 64), (64, 192)))
    first, count = tp_group.shard("columns", 192)
    rounding = rounding_error(torch.float32, terms=192, depth=2)
    for format, tolerance in (("dense", rounding), ("int8", 0.02), ("int4", 0.3)):
        up, down = nn.Linear(64, count, format=format), nn.Linear(count, 64, format=format)
        up.load(up_weight[first : first + count])
        down.load(down_weight[:, first : first + count])
        y = tp_group.all_reduce(down(ops.silu(up(x))))
        want = torch.nn.functional.silu(x @ up_weight.T) @ down_weight.T
        assert (y - want).norm() <= tolerance * want.norm(), format


def errors() -> list[str]:
    group, said = communicator(), []
    for call in (
        lambda: ops.all_gather(torch.ones(3), group, 2),
        lambda: ops.reduce_scatter(torch.ones(4), group, SIZE),
        lambda: ops.broadcast(torch.ones(4), group, 3),
        lambda: ops.all_reduce(torch.ones(4, dtype=torch.int32), group, 4),
        lambda: ops.all_gather(torch.tensor(1.0), group, SIZE),
        lambda: communicator(device="meta"),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    assert torch.equal(ops.all_reduce(torch.ones(2), group), torch.full((2,), 3.0))  # still in step
    return said


def numbers() -> None:
    """One for each group, other ones for other groups, none after the group's end."""
    me, world = dist.get_rank(), communicator()
    assert communicator() == communicator(dist.group.WORLD) == world != 0
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    if me == 2:
        assert communicator(alone) == 0
        with pytest.raises(ValueError, match="must be in the group"):
            communicator(pair)
    else:
        number = communicator(pair)
        assert number not in (0, world)
        assert ops.all_reduce(torch.ones(1), number).item() == 2
        dist.destroy_process_group(pair)
        with pytest.raises(RuntimeError, match="that is still there, got"):
            ops.all_reduce(torch.ones(1), number)
    gloo = dist.new_group(backend="gloo")  # a group of any backend
    assert ops.all_reduce(torch.ones(1), communicator(gloo)).item() == SIZE


# ---- the tests ----


@pytest.mark.parametrize("function", [every_op, layouts, with_a_norm, rounding, programs, shared_layer, numbers])
def test_on_the_ranks(ranks: Ranks, function: Any, request: pytest.FixtureRequest) -> None:
    if function is rounding and request.node.callspec.params["ranks"] == "gloo":
        pytest.skip("Gloo rounds as it likes")
    ranks.run(function)


def test_errors(ranks: Ranks) -> None:
    for said in ranks.run(errors):
        assert said == [
            "infini::all_gather: group_size must be the number of the group's ranks, 3, got 2",
            "infini::reduce_scatter: x must have a first dimension that is a multiple of the group's ranks, 3, got "
            "shape [4]",
            "infini::broadcast: root must be a rank of the group, 0 to 2, got 3",
            "infini::all_reduce: x of a mean must be float32, bfloat16, float16 or float64, got int32",
            "infini::all_gather: x must have 1 to 8 dimensions, got 0 (shape [])",
            "torch_infini.distributed.communicator: device must be cpu or cuda, got meta",
        ]


def test_without_torch_distributed() -> None:
    """Number 0: this process by itself."""
    assert not dist.is_initialized()
    assert torch_infini.distributed.communicator() == 0
    x = torch.randn(5, 3)
    for y in (ops.all_reduce(x), ops.all_gather(x), ops.reduce_scatter(x), ops.broadcast(x)):
        assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
