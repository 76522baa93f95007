"""PyTorch's own ways of using a backend, unchanged: DDP, FSDP, DTensor, checkpoints, functional collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import torch_infini
from support.ranks import Ranks
from support.rounding import assert_same_but_rounding

SIZE = 2
SUMS = (32, 3 * 6)  # of terms; three steps of training, each through three layers and back


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as made:
        yield made


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))


def batch(step: int) -> Tensor:
    return torch.randn(2 * SIZE, 8, generator=torch.Generator().manual_seed(step))


def train(net: nn.Module, rows: Callable[[Tensor], Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        net(rows(batch(step))).square().mean().backward()
        optimizer.step()


def mine(x: Tensor) -> Tensor:
    return x.chunk(SIZE)[dist.get_rank()]


def trained_alone() -> dict[str, Tensor]:
    net = model()
    train(net, lambda x: x)
    return net.state_dict()


def check(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_same_but_rounding(got[name], value, *SUMS, what=name)


# ---- what runs on the ranks ----


def ddp() -> None:
    for options in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        net = nn.parallel.DistributedDataParallel(model(), **options)
        train(net, mine)
        check(net.module.state_dict(), trained_alone())
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    net = nn.parallel.DistributedDataParallel(model())
    net.register_comm_hook(None, fp16_compress_hook)
    train(net, mine)
    for name, value in trained_alone().items():
        torch.testing.assert_close(net.module.state_dict()[name], value, rtol=0.02, atol=0.02)


def fully_sharded(compiled: bool) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    net = model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(torch.compile(net, backend="aot_eager") if compiled else net, mine)
    full = {name: value.full_tensor() for name, value in net.state_dict().items() if isinstance(value, DTensor)}
    check(full, trained_alone())


def fsdp_of_old() -> None:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(net, mine)
    everything = FullStateDictConfig(rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, everything):
        check(net.state_dict(), trained_alone())


def dtensor() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    x = torch.arange(24.0).view(4, 6)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])  # all-to-all
    assert torch.equal(columns.to_local(), x.chunk(SIZE, 1)[dist.get_rank()])
    assert torch.equal(columns.full_tensor(), x)
    product = columns @ columns.t().redistribute(mesh, [Shard(0)])
    assert product.placements == (Partial(),)
    assert torch.equal(product.full_tensor(), x @ x.t())
    scattered = product.redistribute(mesh, [Shard(0)])  # reduce-scatter
    assert torch.equal(scattered.redistribute(mesh, [Replicate()]).to_local(), x @ x.t())
    net, alone = model(), model()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert_same_but_rounding(net(batch(0)), alone(batch(0)), *SUMS)


def checkpoint(folder: str) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def sharded(seed: int) -> nn.Module:
        net = model()
        torch.manual_seed(seed)
        nn.init.normal_(net[0].weight)
        return fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (SIZE,)))

    saved, loaded = sharded(2), sharded(3)
    state = loaded.state_dict()
    dcp.save({"model": saved.state_dict(), "step": 7}, checkpoint_id=folder)
    read: dict[str, Any] = {"model": state, "step": 0}
    dcp.load(read, checkpoint_id=folder)
    assert read["step"] == 7
    for name, value in saved.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(state[name].full_tensor(), value.full_tensor())
    asynchronous = dcp.async_save({"model": saved.state_dict()}, checkpoint_id=f"{folder}/again")
    asynchronous.result()


def functional() -> None:
    me, world = dist.get_rank(), dist.group.WORLD
    x = torch.full((4,), me + 1.0)
    assert torch.equal(funcol.all_reduce(x, "sum", world), torch.full((4,), 3.0))
    assert torch.equal(funcol.all_reduce(x, "avg", world), torch.full((4,), 1.5))
    assert funcol.all_gather_tensor(x, 0, world).tolist() == [1.0] * 4 + [2.0] * 4
    assert funcol.reduce_scatter_tensor(x, "max", 0, world).tolist() == [2.0] * 2
    assert funcol.broadcast(x, 1, world).tolist() == [2.0] * 4
    assert funcol.all_to_all_single(x, None, None, world).tolist() == [1.0, 1.0, 2.0, 2.0]
    a, b = funcol.all_reduce_coalesced([x, 2 * x], "sum", world)
    assert a[0] == 3 and b[0] == 6
    a, b = funcol.all_gather_into_tensor_coalesced([x[:1], x[:2]], world)
    assert a.tolist() == [1.0, 2.0] and b.tolist() == [1.0, 1.0, 2.0, 2.0]
    (a,) = funcol.reduce_scatter_tensor_coalesced([x], "sum", [0], world)
    assert a.tolist() == [3.0, 3.0]
    parameter = torch.full((3,), me + 1.0, requires_grad=True)
    from torch.distributed.nn.functional import all_reduce

    all_reduce(parameter * 2).sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [4.0] * 3


def all_reduce_in_place(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def all_reduce_functional(x: Tensor) -> Tensor:
    return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def all_gathered(x: Tensor) -> Tensor:
    y = torch.empty(SIZE * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(y, x * 2)
    return y.view(SIZE, *x.shape).sum(0) + 1


def reduce_scattered(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0] // SIZE, *x.shape[1:])
    dist.reduce_scatter_tensor(y, x * 2)
    return funcol.all_gather_tensor(y, 0, dist.group.WORLD) + 1


def in_a_subgroup(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y, group=SUBGROUP)
    return y + 1


def ours(x: Tensor) -> Tensor:
    return torch.ops.infini.all_reduce(x * 2, NUMBER) + 1


def ours_in_place(x: Tensor) -> Tensor:
    y = x * 2
    torch.ops.infini.all_reduce_(y, NUMBER)
    return y + 1


def ours_gathered(x: Tensor) -> Tensor:
    y = torch.ops.infini.all_gather(x * 2, NUMBER, SIZE)
    return y.view(SIZE, *x.shape).sum(0) + 1


def ours_scattered(x: Tensor) -> Tensor:
    y = torch.ops.infini.reduce_scatter(x * 2, NUMBER, SIZE)
    return torch.ops.infini.all_gather(y, NUMBER, SIZE) + 1


SUBGROUP: Any = None
NUMBER = 0
COMPILED = (
    all_reduce_in_place,
    all_reduce_functional,
    all_gathered,
    reduce_scattered,
    in_a_subgroup,
    ours,
    ours_in_place,
    ours_gathered,
    ours_scattered,
)


def compile_(function: Callable[[Tensor], Tensor]) -> None:
    global SUBGROUP, NUMBER
    SUBGROUP = SUBGROUP or dist.new_group([0, 1])
    NUMBER = torch_infini.distributed.communicator()
    torch._dynamo.reset()
    # Inductor, where what it makes of the op is in question; it takes seconds a graph.
    backend = "inductor" if function in (all_reduce_in_place, ours, ours_in_place) else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for n in (4, 6):  # the second has dynamic shapes
        x = torch.arange(3.0 * n).view(n, 3) * (dist.get_rank() + 1)
        want = torch.arange(3.0 * n).view(n, 3) * 6 + 1
        with torch.no_grad():
            assert torch.equal(compiled(x), want)
            assert torch.equal(function(x), want)


# ---- the tests ----


@pytest.mark.parametrize("function", [ddp, fsdp_of_old, dtensor, functional])
def test_on_the_ranks(ranks: Ranks, function: Any) -> None:
    ranks.run(function)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fully_shard(ranks: Ranks, compiled: bool) -> None:
    ranks.run(fully_sharded, compiled)


def test_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(checkpoint, str(tmp_path))


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("function", COMPILED, ids=lambda function: function.__name__)
def test_compile(ranks: Ranks, function: Any) -> None:
    ranks.run(compile_, function)
