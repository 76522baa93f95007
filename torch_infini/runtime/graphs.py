"""graph: a function captured once, and replayed with other inputs.

On CUDA a torch.cuda.CUDAGraph; on the CPU a graph of libinfinirt, which runs the function again on a stream.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._core.devices import backing_device, backing_type
from . import _calls, _native
from ._plan import capturing, refuse_inside
from .streams import Stream

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_OP = "torch_infini.runtime.graph"


def graph(fn: Callable[..., Any], *args: Any, warmup: int = 2, pool: _POOL_HANDLE | None = None) -> Graph:
    """Capture fn(*args), to be replayed with other inputs of the same shapes.

    The graph holds copies of the tensors in args; calling it copies new values there and replays, so that a step costs
    one launch instead of one per kernel. Other tensors that fn uses (weights, caches) are read and written in place at
    every replay; args may only be read. On CUDA fn's Python runs at capture only, and must not read tensors' values on
    the host; on the CPU it runs at every replay.

    Args:
        fn: Returns tensors, or tuples, lists and dicts of them; other values are returned as they were at capture.
        args: Tensors on one device, the CPU or a CUDA device; tuples, lists and dicts of them; other values, which
            must stay the same.
        warmup: How often fn is called before it is captured, at least once.
        pool: From torch.cuda.graph_pool_handle(): CUDA graphs of one pool share the memory of tensors that fn makes and
            does not return, so only one of them may run at a time. None: memory of its own.

    Returns:
        A Graph, to be called like fn.

    Raises:
        ValueError: If args hold no tensor or tensors on several devices, if fn writes to one, or if warmup is below 1.
        RuntimeError: If a result requires a gradient (call graph() under torch.no_grad()), or something in fn cannot be
            captured.
        BaseException: What fn raises.

    Example:
        >>> with torch.no_grad():
        >>>     step = torch_infini.runtime.graph(model, tokens)
        >>> logits = step(next_tokens)
    """
    refuse_inside()
    if warmup < 1:
        raise ValueError(f"{_OP}: warmup must be at least 1, got {warmup}")
    given, spec = pytree.tree_flatten(args)
    devices = sorted({str(leaf.device) for leaf in given if isinstance(leaf, Tensor)})
    if len(devices) != 1 or backing_type(devices[0]) not in ("cpu", "cuda"):
        got = ", ".join(devices) or "no tensor"
        raise ValueError(f"{_OP}: the tensors in args must be on one device, the CPU or a CUDA device, got {got}")
    inputs = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
    kind = _CudaGraph if backing_type(devices[0]) == "cuda" else _CpuGraph
    return kind(fn, given, inputs, spec, warmup, pool)


class Graph:
    """The result of graph().

    Calling it with new arguments copies them to `inputs`, replays and returns `outputs`: always the same tensors, which
    the next call overwrites. Calls of several threads are serialized and share the outputs. There is no backward.

    Attributes:
        inputs: The captured arguments. Writing to these tensors and passing them, or calling replay(), saves the copy.
        outputs: What fn returned, overwritten at every replay.
    """

    inputs: tuple[Any, ...]
    outputs: Any

    def __init__(
        self,
        fn: Callable[..., Any],
        given: Sequence[Any],
        leaves: list[Any],
        spec: pytree.TreeSpec,
        warmup: int,
        pool: _POOL_HANDLE | None = None,
    ) -> None:
        self._pool = pool
        self._leaves, self._spec = leaves, spec
        self._lock = threading.Lock()
        self.inputs = pytree.tree_unflatten(leaves, spec)
        self.outputs = self._capture(fn, given, warmup)

    def __call__(self, *args: Any) -> Any:
        """Replay with other inputs.

        Args:
            args: As at capture: shapes, dtypes and devices of the tensors, and all other values.

        Returns:
            `outputs`.

        Raises:
            ValueError: For arguments that differ from the captured ones in more than the tensors' values.
            BaseException: On the CPU, what fn raises.
        """
        leaves, spec = pytree.tree_flatten(args)
        if spec != self._spec:
            raise ValueError(
                f"{_OP}: the arguments must be nested as at capture, {_tree(self._spec)}, got {_tree(spec)}"
            )
        for i, (new, captured) in enumerate(zip(leaves, self._leaves, strict=True)):
            _check(i, new, captured)
        return self._guarded(leaves)

    def replay(self) -> Any:
        """Run the captured function on the present values of `inputs`.

        Returns:
            `outputs`.
        """
        return self._guarded(self._leaves)

    def _guarded(self, leaves: Sequence[Any]) -> Any:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._replay([(old, new) for old, new in zip(self._leaves, leaves, strict=True) if old is not new])
        return self.outputs

    def _capture(self, fn: Callable[..., Any], given: Sequence[Any], warmup: int) -> Any:
        raise NotImplementedError

    def _replay(self, changed: Sequence[tuple[Any, Any]]) -> None:
        """Copy the inputs, pairs (captured, new), and run."""
        raise NotImplementedError

    def _warm_up(self, fn: Callable[..., Any], given: Sequence[Any], warmup: int) -> Any:
        """Call fn `warmup` times; return the last call's result."""
        for _ in range(warmup):
            results = fn(*self.inputs)
            for i, (old, new) in enumerate(zip(given, self._leaves, strict=True)):
                if isinstance(old, Tensor) and not _same_bits(old, new):
                    raise ValueError(
                        f"{_OP}: fn must only read its arguments, because what it wrote to argument {i} would be in "
                        "the graph's copy (let fn use the tensor as a closure variable), got one that writes"
                    )
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise RuntimeError(
                    f"{_OP}: results must not require a gradient, because a graph has no backward (call graph() under "
                    "torch.no_grad()), got one that does"
                )
        return results


class _CudaGraph(Graph):
    def _capture(self, fn: Callable[..., Any], given: Sequence[Any], warmup: int) -> Any:
        self._device = backing_device(next(leaf.device for leaf in given if isinstance(leaf, Tensor)))
        with torch.cuda.device(self._device):
            side_stream = torch.cuda.Stream()
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream):
                self._warm_up(fn, given, warmup)
            torch.cuda.current_stream().wait_stream(side_stream)
            self._graph = torch.cuda.CUDAGraph()
            with capturing(self._graph, side_stream, self._pool):
                outputs = fn(*self.inputs)
            self._stream = torch.cuda.current_stream()
            self._graph.replay()  # a capture computes nothing
        return outputs

    def _replay(self, changed: Sequence[tuple[Any, Any]]) -> None:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if stream != self._stream:  # the previous replay may still run
                stream.wait_stream(self._stream)
                self._stream = stream
            for captured, new in changed:
                captured.copy_(new, non_blocking=True)
            self._graph.replay()


class _CpuGraph(Graph):
    def _capture(self, fn: Callable[..., Any], given: Sequence[Any], warmup: int) -> Any:
        results, outputs = pytree.tree_flatten(self._warm_up(fn, given, warmup))
        leaves = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in results]
        self._stream = Stream("cpu")
        self._errors: list[BaseException] = []
        _native.call("StreamBeginCapture", self._stream.handle, _native.CAPTURE_RELAXED)
        _calls.queue(
            self._stream.handle, _calls.StreamCall(_ReplayBody(fn, self.inputs, leaves, outputs), self._errors)
        )
        captured = _native.create("StreamEndCapture", self._stream.handle, last=True)
        self._exec = _native.create("GraphInstantiate", captured, None, None, 0)
        weakref.finalize(self, _destroy, self._exec).atexit = False
        _native.call("GraphDestroy", captured)
        return pytree.tree_unflatten(leaves, outputs)

    def _guarded(self, leaves: Sequence[Any]) -> Any:
        refuse_inside()  # a recording would not note what the stream runs
        if _calls.on_stream():  # a stream's thread must not wait, possibly for itself
            raise RuntimeError(f"{_OP}: a graph of the CPU must not be called by a function that a stream runs")
        return super()._guarded(leaves)

    def _replay(self, changed: Sequence[tuple[Any, Any]]) -> None:
        for captured, new in changed:
            captured.copy_(new)
        self._errors.clear()
        try:
            try:
                _native.call("GraphLuanch", self._exec, self._stream.handle)
            finally:  # after KeyboardInterrupt too
                _native.call("StreamSynchronize", self._stream.handle)
        except RuntimeError:
            if self._errors:
                raise self._errors.pop() from None
            raise


class _ReplayBody:
    """The function that the stream runs at a replay: calls fn and copies its results to the outputs."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], outputs: list[Any], spec: pytree.TreeSpec
    ) -> None:
        self.fn, self.args, self.outputs, self.spec = fn, args, outputs, spec

    def __call__(self) -> None:
        leaves, spec = pytree.tree_flatten(self.fn(*self.args))
        if spec != self.spec:
            raise RuntimeError(f"{_OP}: fn must return what it did at capture, {_tree(self.spec)}, got {_tree(spec)}")
        with torch.inference_mode(False), torch.no_grad():
            for i, (new, captured) in enumerate(zip(leaves, self.outputs, strict=True)):
                if isinstance(captured, Tensor):
                    _check_tensor(f"result {i}", new, captured)
                    captured.copy_(new)


def _destroy(exec_: int) -> None:
    with suppress(RuntimeError):
        _native.call("GraphExecDestroy", exec_)


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().clone()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    with torch.no_grad():
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*bits)


def _check(i: int, new: Any, captured: Any) -> None:
    if isinstance(captured, Tensor):
        _check_tensor(f"argument {i}", new, captured)
        if torch.is_grad_enabled() and new.requires_grad:
            raise ValueError(
                f"{_OP}: argument {i} must not require a gradient, because a graph has no backward (call it under "
                "torch.no_grad()), got one that does"
            )
    elif isinstance(new, Tensor) or (new is not captured and new != captured):
        raise ValueError(f"{_OP}: argument {i} must be what it was at capture, {captured!r}, got {_describe(new)}")


def _check_tensor(what: str, new: Any, captured: Tensor) -> None:
    error = RuntimeError if what.startswith("result") else ValueError
    if not isinstance(new, Tensor):
        raise error(f"{_OP}: {what} must be a tensor as at capture, got {_describe(new)}")
    for rule, got, want in (
        ("have shape", list(new.shape), list(captured.shape)),
        ("have dtype", new.dtype, captured.dtype),
        ("be on", new.device, captured.device),
    ):
        if got != want:
            raise error(f"{_OP}: {what} must {rule} {want} as at capture, got {got}")


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _tree(spec: pytree.TreeSpec) -> str:
    """Format the nesting of values: (*, [*, *])."""
    return str(pytree.tree_unflatten([_Star()] * spec.num_leaves, spec))


class _Star:
    def __repr__(self) -> str:
        return "*"
