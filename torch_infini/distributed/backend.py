"""InfiniProcessGroup: the process group that init_process_group("infiniccl") makes.

CPU tensors of ranks on one machine use libinfiniccl's shared memory. Operations that it lacks (point to point with
tags, all-to-all, gather, scatter, reduce, bitwise reductions, sparse tensors), and ranks on several machines, use a
Gloo group; CUDA tensors use an NCCL group. torch has no stable C++ interface for backends: this is a Python subclass of
torch's ProcessGroup, whose virtual functions C++ callers (DDP's reducer, functional collectives) reach by its
trampoline. Functions that are not overridden here call, as in every process group, the backend registered for the
tensors' device. Tensors on infini are handled as tensors of the backing device, in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore

from .._core.devices import INFINI, backing_type, on_cpu, unwrap
from .groups import forget
from .libinfiniccl import CPU, DTYPES, Communicator, ReduceOp
from .transport import LOGGER, choose, shared_unique_id
from .work import DoneWork, InfiniWork, WorkThread, tensors_in, together

_REDUCIBLE = frozenset(dtype for dtype in DTYPES if not dtype.is_complex)
_MEANS = frozenset(dtype for dtype in _REDUCIBLE if dtype.is_floating_point)
# Keyed by torch's number of a reduction, its hash: the object itself as a key costs microseconds. Values: the
# reduction, and its dtypes.
_REDUCTIONS = {
    hash(dist.ReduceOp.SUM): (ReduceOp.SUM, _REDUCIBLE),
    hash(dist.ReduceOp.PRODUCT): (ReduceOp.PROD, _REDUCIBLE),
    hash(dist.ReduceOp.MAX): (ReduceOp.MAX, _REDUCIBLE),
    hash(dist.ReduceOp.MIN): (ReduceOp.MIN, _REDUCIBLE),
    hash(dist.ReduceOp.AVG): (ReduceOp.AVG, _MEANS),
}
_DONE = DoneWork()
# Calls whose works from Gloo have no future.
_WITHOUT_FUTURE = ("send", "recv", "recv_anysource", "_reduce_scatter_base", "reduce_scatter")


def _element(tensor: Tensor) -> tuple[int, int]:
    """Return (elements, infiniDtype_t) of data that is only moved; dtypes that libinfiniccl lacks are sent as bytes."""
    code = DTYPES.get(tensor.dtype)
    return (tensor.numel(), code) if code is not None else (tensor.nbytes, DTYPES[torch.uint8])


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _contiguous_like(out: Tensor) -> Tensor:
    """Return contiguous memory for a result: `out` itself, if it is contiguous."""
    return out if out.is_contiguous() else out.new_empty(out.shape)


class InfiniProcessGroup(dist.ProcessGroup):
    """One rank of a group. Created by torch.distributed and used through it.

    A call without async_op runs on the calling thread, without the GIL, and is done on return. Calls with async_op, and
    those of DDP and of functional collectives, run on the group's thread in call order; a synchronous call made while
    this thread is busy is queued there too. So the ranks only have to make their calls on a group in the same order,
    and the collectives of a rank that waits in a receive run meanwhile.

    Attributes:
        timeout: How long a call may wait for the other ranks, a timedelta.
        transport: The transport of CPU tensors, and the reason for it.
    """

    def __init__(self, options: Any) -> None:
        store, rank, size = options.store, options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this constructor
        self._store = store
        self.timeout = options.timeout
        self.transport = choose(store, rank, size, self.timeout)
        cuda = "NCCL" if torch.cuda.is_available() and dist.is_nccl_available() else "nothing"
        if self.transport.name == "none" and cuda == "nothing":
            raise ValueError(
                "torch_infini.distributed: INFINI_CCL must be auto, shm or gloo where this torch has no NCCL or no "
                "GPU, got nccl"
            )
        self._communicator: Communicator | None = None
        self._thread = WorkThread(f"infiniccl {options.group_id}")
        if self.transport.name == "shm":
            unique = shared_unique_id(store, "infiniccl/unique", rank, self.timeout)
            self._communicator = Communicator(size, unique, rank, CPU, timeout=self.timeout.total_seconds())
        if cuda == "NCCL":
            self._register("cuda", "nccl/", dist.ProcessGroupNCCL, dist.ProcessGroupNCCL.Options(), options)
        if self.transport.name != "none":
            self._register_gloo(options)
        LOGGER.info(
            "infiniccl: group %s, rank %d of %d: CPU tensors by %s (%s), CUDA tensors by %s",
            options.group_id or "default",
            rank,
            size,
            {"shm": "shared memory", "gloo": "Gloo", "none": "nothing"}[self.transport.name],
            self.transport.reason,
            cuda,
        )

    def _register_gloo(self, options: Any) -> None:
        ProcessGroupGloo: Any = dist.ProcessGroupGloo  # the stub lacks _Options
        settings = ProcessGroupGloo._Options()
        # Its ranks connect at the first use: if everything goes through shared memory, never. It accepts the same
        # interface settings as torch's own Gloo.
        make, interfaces = ProcessGroupGloo.create_device, os.environ.get("GLOO_SOCKET_IFNAME")
        settings._devices = (
            [make(interface=name, lazy_init=True) for name in interfaces.split(",")]
            if interfaces
            else [ProcessGroupGloo.create_default_device(lazy_init=True)]
        )
        self._register("cpu", "gloo/", ProcessGroupGloo, settings, options)

    def _register(self, device: str, prefix: str, backend: Any, settings: Any, options: Any) -> None:
        """Create one of torch's own backends for tensors on a device."""
        settings._timeout = options.timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        made = backend(PrefixStore(prefix, options.store), options.group_rank, options.group_size, settings)
        made._set_sequence_number_for_group()
        types = dist.ProcessGroup.BackendType
        kind = types.GLOO if device == "cpu" else types.NCCL
        self._register_backend(torch.device(device), kind, made)
        self._set_default_backend(kind)

    def getBackendName(self) -> str:
        return "infiniccl"

    def get_group_store(self) -> Any:
        return self._store

    # ---- how a call runs ----

    def _delegate(self, name: str, results: Any, *arguments: Any) -> Any:
        """Call a function of the Gloo or NCCL backend of the results' device; return its work.

        Not super(): the trampoline of a virtual function holds the GIL while it calls torch's own, and would deadlock
        with Gloo's threads, which hold the lock it waits for and take the GIL to release tensors.
        """
        device = tensors_in(results)[0].device
        function = getattr(self._get_backend(torch.device(backing_type(device))), name)
        if device.type != INFINI:
            return function(*arguments)
        work = function(*map(_unwrapped, arguments))
        if name in _WITHOUT_FUTURE:
            return work
        moved = InfiniWork(results)
        work.get_future().add_done_callback(moved.follow)
        return moved

    def _serves(self, tensors: Sequence[Tensor]) -> bool:
        strided = torch.strided
        return self._communicator is not None and all(on_cpu(t) and t.layout is strided for t in tensors)

    def _reduction(self, tensors: Sequence[Tensor], opts: Any) -> ReduceOp | None:
        """Return the reduction, or None if libinfiniccl does not support it for these tensors."""
        op, dtypes = _REDUCTIONS.get(hash(opts.reduceOp), (None, _REDUCIBLE))
        if self._communicator is None:
            return None
        for tensor in tensors:
            if not (on_cpu(tensor) and tensor.dtype in dtypes and tensor.layout is torch.strided):
                return None
        return op

    def _run(self, function: Callable[[], object], results: list[Any], opts: Any) -> DoneWork | InfiniWork:
        if not opts.asyncOp and self._thread.idle():
            function()
            return _DONE
        return self._thread.submit(function, results)

    # ---- on one tensor, contiguous or not ----

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        dense = _dense(tensor)
        at = dense.data_ptr()
        assert self._communicator is not None
        self._communicator.all_reduce(at, at, dense.numel(), DTYPES[dense.dtype], op)
        if dense is not tensor:
            tensor.detach().copy_(dense)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        dense = _dense(tensor)
        at = dense.data_ptr()
        assert self._communicator is not None
        self._communicator.broadcast(at, at, *_element(dense), root)
        if dense is not tensor and self.rank() != root:
            tensor.detach().copy_(dense)

    def _all_gather(self, out: Tensor, x: Tensor) -> None:
        if out.dtype != x.dtype or out.numel() != self.size() * x.numel():
            raise ValueError(
                f"infiniccl: the output of all_gather must have {self.size()} times the elements of the input, and its "
                f"dtype, got {list(out.shape)} {out.dtype} for {list(x.shape)} {x.dtype}"
            )
        dense, from_ = _contiguous_like(out), _dense(x)
        assert self._communicator is not None
        self._communicator.all_gather(from_.data_ptr(), dense.data_ptr(), *_element(from_))
        if dense is not out:
            out.detach().copy_(dense)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: ReduceOp) -> None:
        if out.dtype != x.dtype or x.numel() != self.size() * out.numel():
            raise ValueError(
                f"infiniccl: the input of reduce_scatter must have {self.size()} times the elements of the output, and "
                f"its dtype, got {list(x.shape)} {x.dtype} for {list(out.shape)} {out.dtype}"
            )
        dense, from_ = _contiguous_like(out), _dense(x)
        assert self._communicator is not None
        self._communicator.reduce_scatter(from_.data_ptr(), dense.data_ptr(), dense.numel(), DTYPES[dense.dtype], op)
        if dense is not out:
            out.detach().copy_(dense)

    # ---- called by torch.distributed, DDP and functional collectives ----
    # Type errors are ignored: torch's stubs give some functions overloads for callers that torch itself does not have.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors, opts = _arguments(tensors, opts, dist.AllreduceOptions)
        op = self._reduction(tensors, opts)
        if op is None:
            return self._delegate("allreduce", tensors, tensors, opts)
        return self._run(partial(_for_each, self._all_reduce, tensors, [op] * len(tensors)), tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        op = self._reduction(tensors, opts)
        if op is None:
            return self._delegate("allreduce_coalesced", tensors, tensors, opts)
        return self._run(partial(_for_each, self._all_reduce, tensors, [op] * len(tensors)), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors, opts = _arguments(tensors, opts, dist.BroadcastOptions)
        if not self._serves(tensors):
            return self._delegate("broadcast", tensors, tensors, opts)
        root = opts.rootRank
        return self._run(partial(_for_each, self._broadcast, tensors, [root] * len(tensors)), tensors, opts)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        x = inputs[0]
        parts = outputs[0]
        even = len(parts) == self.size() and all(p.shape == x.shape and p.dtype == x.dtype for p in parts)
        if len(inputs) != 1 or not even or not self._serves([x, *parts]):
            return self._delegate("allgather", outputs, outputs, inputs, opts)

        def run() -> None:
            gathered = x.new_empty((len(parts), *x.shape))
            self._all_gather(gathered, x)
            for part, piece in zip(parts, gathered, strict=True):
                part.detach().copy_(piece)

        return self._run(run, parts, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        if not self._serves((output, input)):
            return self._delegate("_allgather_base", [output], output, input, opts)
        return self._run(lambda: self._all_gather(output, input), [output], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        if not self._serves([*outputs, *inputs]):
            return together(
                self._delegate("_allgather_base", [out], out, x, opts) for out, x in zip(outputs, inputs, strict=True)
            )
        return self._run(partial(_for_each, self._all_gather, outputs, inputs), outputs, opts)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        out, parts = outputs[0], inputs[0]
        even = len(parts) == self.size() and all(p.shape == out.shape and p.dtype == out.dtype for p in parts)
        op = self._reduction([out, *parts], opts)
        if len(outputs) != 1 or not even or op is None:
            return self._delegate("reduce_scatter", outputs, outputs, inputs, opts)
        return self._run(lambda: self._reduce_scatter(out, torch.stack(parts), op), outputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        op = self._reduction((output, input), opts)
        if op is None:
            return self._delegate("_reduce_scatter_base", [output], output, input, opts)
        return self._run(lambda: self._reduce_scatter(output, input, op), [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        op = self._reduction([*outputs, *inputs], opts)
        if op is None:
            return together(
                self._delegate("_reduce_scatter_base", [out], out, x, opts)
                for out, x in zip(outputs, inputs, strict=True)
            )
        return self._run(partial(_for_each, self._reduce_scatter, outputs, inputs, [op] * len(outputs)), outputs, opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:  # type: ignore[override]
        opts = opts if opts is not None else dist.BarrierOptions()
        gpu = torch.device("cuda")
        if self._communicator is None or gpu in self._device_types:  # on GPUs a barrier also waits for streams
            backend: Any = self._get_backend(gpu if gpu in self._device_types else torch.device("cpu"))
            return backend.barrier(opts)
        all_reduce = self._communicator.all_reduce
        return self._run(lambda: all_reduce(0, 0, 0, DTYPES[torch.uint8], ReduceOp.SUM), [], opts)

    # ---- delegated: libinfiniccl has no kernel, or lacks tags and receives from any source ----

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._delegate("send", tensors, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._delegate("recv", tensors, tensors, peer, tag)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else dist.AllToAllOptions()
        return self._delegate("alltoall_base", [output], output, input, output_sizes, input_sizes, opts)

    # torch's own would need a backend of the tensors' device; infini has none.

    def reduce(self, tensors: Any, *settings: Any) -> Any:
        return self._delegate("reduce", tensors, tensors, *settings)

    def gather(self, outputs: Any, inputs: Any, *settings: Any) -> Any:
        return self._delegate("gather", outputs if tensors_in(outputs) else inputs, outputs, inputs, *settings)

    def scatter(self, outputs: Any, inputs: Any, *settings: Any) -> Any:
        return self._delegate("scatter", outputs, outputs, inputs, *settings)

    def alltoall(self, outputs: Any, inputs: Any, *settings: Any) -> Any:
        return self._delegate("alltoall", outputs, outputs, inputs, *settings)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._delegate("recv_anysource", tensors, tensors, tag)

    # torch's names for them before 2.13.
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # ---- the end ----

    def set_timeout(self, timeout: Any) -> None:
        """Set how long later calls may wait, a timedelta."""
        self.timeout = timeout
        if self._communicator is not None:
            self._communicator.set_timeout(timeout.total_seconds())
        super().set_timeout(timeout)

    def abort(self) -> None:
        """Abort the group on all ranks; waiting calls return with an error."""
        if self._communicator is not None:
            self._communicator.abort()
        super().abort()

    def shutdown(self) -> None:
        """Shut down after all asynchronous calls are done; destroy_process_group() calls this."""
        forget(self)
        self._thread.stop()
        if self._communicator is not None:
            self._communicator.destroy()
        super().shutdown()


def _unwrapped(argument: Any) -> Any:
    """Return tensors, also in nested lists, as tensors on the backing device; other arguments unchanged."""
    if isinstance(argument, list):
        return [_unwrapped(part) for part in argument]
    return unwrap(argument) if isinstance(argument, Tensor) else argument


def _for_each(function: Callable[..., None], *columns: Sequence[Any]) -> None:
    """Call a function with the elements of each row of several columns."""
    for row in zip(*columns, strict=True):
        function(*row)


def _arguments(tensors: Any, opts: Any, options: Callable[[], Any]) -> tuple[list[Tensor], Any]:
    """Return (tensors, options) of a call in torch's short form, (tensor, reduction or root), or its long form."""
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    if opts is None or isinstance(opts, (int, dist.ReduceOp, dist.ReduceOp.RedOpType)):
        given, opts = opts, options()
        if isinstance(given, int):
            opts.rootRank = given
        elif given is not None:
            opts.reduceOp = given
    return tensors, opts
