"""torch.distributed on the device infini: every collective, DDP, FSDP and DTensor, with the bits of the CPU."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from support.ranks import Ranks

SIZE = 2


@pytest.fixture(scope="module", params=["shm", "gloo"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks in a group of "infini:infiniccl", by shared memory and by Gloo."""
    store = tmp_path_factory.mktemp("store") / "store"
    with Ranks(SIZE, environment={"INFINI_CCL": request.param}, initialise=False) as made:
        made.run(start, str(store))
        yield made


def start(store: str) -> None:
    import torch_infini.device

    torch_infini.device.enable("cpu")
    rank, limit = int(os.environ["RANK"]), datetime.timedelta(seconds=60)
    dist.init_process_group("infini:infiniccl", f"file://{store}", limit, rank=rank, world_size=SIZE)


# ---- what runs on the ranks ----


def results(device: str) -> dict[str, list[Tensor]]:
    """What every collective makes of this rank's tensors on a device."""
    me, world = dist.get_rank(), dist.group.WORLD
    x = (torch.arange(12.0).view(4, 3) + 100 * me).to(device)
    like = lambda *shape: torch.full(shape, -1.0, device=device)
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, *tensors: Tensor) -> None:
        assert all(t.device.type == device for t in tensors), name
        found[name] = [t.cpu() for t in tensors]

    for name in ("SUM", "MAX", "PRODUCT", "AVG"):
        y = x.clone()
        dist.all_reduce(y, getattr(dist.ReduceOp, name))
        keep(f"all_reduce {name}", y)
    y = x.to(torch.int64)
    dist.all_reduce(y, dist.ReduceOp.BOR)
    keep("all_reduce BOR", y)
    y = x.clone().t()  # not contiguous
    work = dist.all_reduce(y, async_op=True)
    assert work is not None
    work.wait()
    keep("all_reduce async", y, *work.get_future().wait())
    y = x.clone()
    dist.broadcast(y, 1)
    keep("broadcast", y)
    parts = [like(4, 3) for _ in range(SIZE)]
    dist.all_gather(parts, x)
    keep("all_gather", *parts)
    y = like(8, 3)
    dist.all_gather_into_tensor(y, x)
    keep("all_gather_into_tensor", y)
    y = like(2, 3)
    dist.reduce_scatter_tensor(y, x.clone())
    keep("reduce_scatter_tensor", y)
    y = like(2, 3)
    dist.reduce_scatter(y, list(x.clone().chunk(SIZE)))
    keep("reduce_scatter", y)
    y = like(4, 3)
    dist.all_to_all_single(y, x)
    keep("all_to_all_single", y)
    parts = [like(2, 3) for _ in range(SIZE)]
    try:  # Gloo has none
        dist.all_to_all(parts, list(x.clone().chunk(SIZE)))
    except RuntimeError as error:
        assert "does not support alltoall" in str(error)
    else:
        keep("all_to_all", *parts)
    y = x.clone()
    dist.reduce(y, 0)
    keep("reduce", *([y] if me == 0 else []))
    parts = [like(4, 3) for _ in range(SIZE)]
    dist.gather(x, parts if me == 0 else None, 0)
    keep("gather", *parts)
    y = like(2, 3)
    dist.scatter(y, list(x.clone().chunk(SIZE)) if me == 1 else None, 1)
    keep("scatter", y)
    y = like(4, 3)
    if me == 0:
        dist.send(x, 1)
        dist.recv(y, 1)
    else:
        dist.recv(y)  # from any rank
        dist.send(x, 0)
    keep("send, recv", y)
    keep("functional all_reduce", funcol.all_reduce(x, "sum", world) + 0)
    keep("functional all_gather", funcol.all_gather_tensor(x, 0, world) + 0)
    keep("functional reduce_scatter", funcol.reduce_scatter_tensor(x, "sum", 0, world) + 0)
    keep("coalesced", *(t + 0 for t in funcol.all_gather_into_tensor_coalesced([x, x[0]], world)))
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": me, "x": x})
    assert [entry["rank"] for entry in objects] == list(range(SIZE))
    keep("objects", *(entry["x"] for entry in objects))
    dist.barrier()
    return found


def collectives() -> None:
    there, here = results("infini"), results("cpu")
    assert there.keys() == here.keys()
    for name, want in here.items():
        assert len(there[name]) == len(want), name
        for a, b in zip(there[name], want, strict=True):
            assert torch.equal(a, b), (name, a, b)
    assert not torch.equal(here["broadcast"][0], torch.arange(12.0).view(4, 3))


def ours() -> None:
    """Collective ops of torch.ops.infini, and a group of some ranks."""
    from torch_infini.distributed import communicator

    x = torch.full((3,), dist.get_rank() + 1.0, device="infini")
    assert torch.ops.infini.all_reduce(x, communicator(device="infini")).tolist() == [3.0] * 3
    group = dist.new_group([0, 1], backend="infini:infiniccl")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 3


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))


def train(net: nn.Module, device: str, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(steps):
        rows = torch.randn(2 * SIZE, 8, generator=torch.Generator().manual_seed(step)).chunk(SIZE)[dist.get_rank()]
        optimizer.zero_grad()
        net(rows.to(device)).square().mean().backward()
        optimizer.step()


def compare(trained: Callable[[str], dict[str, Tensor]]) -> None:
    """A way to train gives the same bits on infini as on the CPU, and changes the weights."""
    there, here, before = trained("infini"), trained("cpu"), model().state_dict()
    assert there.keys() == here.keys() == before.keys()
    for name, want in here.items():
        assert there[name].device.type == "infini" and torch.equal(there[name].cpu(), want), name
        assert not torch.equal(want, before[name]), name


def ddp() -> None:
    def trained(device: str, **options: Any) -> dict[str, Tensor]:
        net = nn.parallel.DistributedDataParallel(model().to(device), **options)
        train(net, device)
        return net.module.state_dict()

    for options in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        compare(partial(trained, **options))


def fully_sharded() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    def trained(device: str, **options: Any) -> dict[str, Tensor]:
        net = model().to(device)
        mesh = dist.device_mesh.init_device_mesh(device, (SIZE,))
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
        fully_shard(net, mesh=mesh, **options)
        train(net, device)
        state = net.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        return {name: value.full_tensor() for name, value in state.items()}

    compare(trained)
    compare(partial(trained, reshard_after_forward=False))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare(partial(trained, mp_policy=half))


def dtensor() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("infini", (SIZE,))
    x = torch.arange(24.0).view(4, 6)
    rows = distribute_tensor(x.to("infini"), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local().cpu(), x.chunk(SIZE, 1)[dist.get_rank()])
    product = columns @ columns.t().redistribute(mesh, [Shard(0)])
    assert product.placements == (Partial(),)
    scattered = product.redistribute(mesh, [Shard(0)])
    assert torch.equal(scattered.redistribute(mesh, [Replicate()]).to_local().cpu(), x @ x.t())
    nets = []
    for device in ("infini", "cpu"):
        net = model().to(device)
        mesh = dist.device_mesh.init_device_mesh(device, (SIZE,))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        nets.append(net(torch.ones(2, 8, device=device)).cpu())
    assert torch.equal(*nets)


# ---- the tests ----


@pytest.mark.full(beyond=5)
@pytest.mark.parametrize("function", [collectives, ours, ddp, fully_sharded, dtensor], ids=lambda f: f.__name__)
def test_on_the_ranks(ranks: Ranks, function: Any) -> None:
    ranks.run(function)


def refused(store: str) -> str:
    rank, limit = int(os.environ["RANK"]), datetime.timedelta(seconds=60)
    dist.init_process_group("infiniccl", f"file://{store}", limit, rank=rank, world_size=1)
    return dist.get_backend()


def test_a_process_without_the_device(tmp_path: Path) -> None:
    """That infiniccl serves infini too changes nothing where it is not enabled."""
    with Ranks(1, initialise=False) as made:
        assert made.run(refused, str(tmp_path / "store")) == ["infiniccl"]
