"""record: notes ops of torch between two points without running them, and runs them repeatedly on the same tensors.

On the CPU a graph of libinfinicore_cpp_api, which infinicore's own recording uses too; on CUDA a torch.cuda.CUDAGraph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any

import torch

from ._bound import bind_call, copy_results, run_all
from ._facts import facts_of
from ._graph import OpGraph, is_recording
from ._kernel_calls import REPLAY, KernelCalls
from ._memory import PlannedMemory
from ._noting import OP, CaptureGuard, NotedCall, ReadGuard, Recorder
from ._plan import capturing, noting, refuse_inside, tensors_of

_thread = threading.local()

_INSIDE = f"{OP}: programs, graphs and recordings must not be made or run while a graph is recorded, got one that is"


def record(fn: Callable[..., Any] | None = None, *args: Any, device: torch.device | str | None = None) -> Recording:
    """Record ops without running them, to run all of them repeatedly.

    Use it as a context manager, or with a function, which is called once. Ops of torch.ops.infini and of torch are
    noted; their results have shape, dtype and memory, but no values before run(). Tensors are read and written in
    place: run() reads the inputs' present values, and rewrites the results that the caller still holds. Results that
    the caller has dropped share memory. Ops that infinicore notes on this thread are part of the same graph; on CUDA
    they raise.

    The order of the ops is fixed, and so are the decisions of Python code. Nothing may read values: no item(), tolist()
    or print(), no branch on a tensor, no nonzero(). Random ops draw new numbers in each run.

    Args:
        fn: Called as fn(*args); its result becomes the graph's `outputs`. None: record a `with` block.
        args: Arguments of fn.
        device: cpu or cuda, the device of all tensors. None: that of the first tensor in args; without one, the CPU. On
            CUDA the ops are captured; call a library that initializes itself at its first call before. Tensors of the
            CPU without dimensions may be used there: as numbers with their present values.

    Returns:
        A Recording, complete if fn is given.

    Raises:
        RuntimeError: If this thread records already, if torch does not have the device, if something cannot be
            replayed, if an op rejects the shapes, dtypes or strides, or, in grad mode, if a tensor requires a gradient.
            The recording is dropped. Invalid values, such as an index out of range, raise in run().
        BaseException: What fn raises.

    Example:
        >>> with torch.no_grad(), torch_infini.runtime.record() as graph:
        >>>     y = torch.exp(torch.ops.infini.rms_norm(x, weight))
        >>> x.copy_(other)
        >>> graph.run()  # y holds the values for other
    """
    if device is None:
        tensors = tensors_of(args)
        device = tensors[0].device if tensors else "cpu"
    graph = Recording(torch.device(device))
    if fn is not None:
        with graph:
            outputs = fn(*args)
        graph.outputs = outputs
    return graph


class Recording:
    """The result of record().

    run() may be called from any thread; runs of one graph are serialized. The graph keeps the memory that it uses
    alive. It refers to memory, not to tensors: giving a tensor other memory (set_, .data, resize_) does not change it.

    Attributes:
        outputs: What fn returned, always the same tensors, rewritten by run(); None for a `with` block.
        calls: The number of recorded ops of torch.
        arena_bytes: The size of the memory that is shared by results that the caller has dropped.
        held_bytes: The size of the results that the caller held at the end of the recording.
    """

    outputs: Any = None
    calls: int = 0
    arena_bytes: int = 0
    held_bytes: int = 0

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{OP}: device must be cpu or cuda, got {device}")
        self._backend: _CpuBackend | _CudaBackend | None = None
        self._device, self._state = device, "new"

    @classmethod
    def current(cls) -> Recording | None:
        """Return the Recording that the calling thread is in, even if an error has ended it."""
        return getattr(_thread, "recording", None)

    @classmethod
    def recorder(cls) -> Recorder | None:
        """Return the Recorder of the calling thread's calls of torch; None without a recording, or if CUDA captures."""
        current = cls.current()
        backend = None if current is None else current._backend
        return backend.recorder() if isinstance(backend, _CpuBackend) else None

    def __enter__(self) -> Recording:
        if self._state != "new":
            raise RuntimeError(f"{OP}: a graph is recorded once, got a second `with`")
        refuse_inside_recording()
        self._backend = self._begin()
        self._state = "recording"
        _thread.recording = self
        return self

    def _begin(self) -> _CpuBackend | _CudaBackend:
        return _CudaBackend(self._device) if self._device.type == "cuda" else _CpuBackend()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend, self._backend, self._state = self._backend, None, "dropped"
        assert backend is not None
        _thread.recording = None
        backend.end(kind, error, trace)
        if error is None:
            backend.make_ready()
            self._backend, self._state = backend, "ready"
            self.calls, self.arena_bytes, self.held_bytes = backend.calls, backend.arena_bytes, backend.held_bytes

    def run(self) -> Any:
        """Run the recorded ops in order, on their tensors' present values.

        Returns:
            `outputs`.

        Raises:
            RuntimeError: While a graph is recorded, or if the recording was not completed; what an op raises. Later ops
                are not run; the graph can be run again.
        """
        if self._backend is None or self._state != "ready":
            raise RuntimeError(f"{OP}: run() must come after a complete recording, got one that is {self._state}")
        self._backend.run()
        return self.outputs

    def report(self) -> str:
        """Describe the graph: its ops in order, how it runs, its memory."""
        if self._backend is None or self._state != "ready":
            return f"a graph whose recording is {self._state}"
        return self._backend.report()


def refuse_inside_recording() -> None:
    """Raise RuntimeError if this thread records a program or a graph, of torch_infini or infinicore."""
    if not isinstance(Recording.current(), SharedRecording):
        refuse_inside()
    if is_recording():
        raise RuntimeError(f"{OP}: this thread records a graph already, and recordings do not nest")


def computes(func: torch._ops.OpOverload) -> bool:
    """Return whether an op does more than return a view or uninitialized memory."""
    facts = facts_of(func)
    return not (facts.is_view or facts.allocates)


class _CpuBackend:
    """Notes a thread's ops, then runs their graph: kernels are called by C, other ops by Python callables."""

    arena_bytes = held_bytes = 0

    def __init__(self, ends_at_errors: bool = False) -> None:
        self._graph = OpGraph(ends_at_errors)
        self._indices: list[int] = []  # of torch's ops among all ops of the graph
        active = self._graph.is_active
        self._recorder: Recorder | None = Recorder(lambda name: self._indices.append(self._graph.note(name)), active)
        self._modes = ExitStack()
        self._modes.enter_context(noting(_INSIDE, active))
        self._modes.enter_context(ReadGuard(active))
        self._modes.enter_context(self._recorder)
        self._python = False

    @property
    def calls(self) -> int:
        return len(self._indices)

    def is_active(self) -> bool:
        return self._graph.is_active()

    def recorder(self) -> Recorder | None:
        return self._recorder if self.is_active() else None

    def shared(self) -> int:
        return self._graph.shared()

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._modes.close()
        if error is not None:
            self._graph.drop()
            self._recorder = None

    def make_ready(self) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        self._graph.end()
        with torch.inference_mode(False), torch.no_grad():
            memory = PlannedMemory(recorder.blocks, [noted.views() for noted in recorder.calls])
            self.arena_bytes, self.held_bytes = memory.arena_bytes, memory.held_bytes
            # Consecutive ops that are all native, or all not, become one step. An op of infinicore between two of
            # torch's separates them: their difference `index - i` is not equal.
            steps = [
                (i, (noted.native, index - i), noted)
                for i, (noted, index) in enumerate(zip(recorder.calls, self._indices, strict=True))
            ]
            for (native, _), group in groupby(steps, lambda step: step[1]):
                members = list(group)
                self._bind(members[0][0], native, [noted for _, _, noted in members], memory)

    def _bind(self, index: int, native: bool, group: Sequence[NotedCall], memory: PlannedMemory) -> None:
        if native:
            kernels = KernelCalls(OP, [noted.call.mapped(memory.tensor) for noted in group])
            self._graph.bind(index, REPLAY, kernels.handle, kernels)
        else:
            self._python = True
            steps = [_bind_noted(noted, memory) for noted in group]
            self._graph.bind_python(index, steps[0] if len(steps) == 1 else partial(run_all, steps))

    def run(self, run: Callable[[], None] | None = None) -> None:
        run = self._graph.run if run is None else partial(self._graph.run_by, run)
        if not self._python:
            run()
            return
        # Like kernels, write to inference and other tensors alike, and ignore the caller's autocast.
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            run()

    def report(self) -> str:
        return (
            f"{self._graph.report()}\n{self.calls} ops of torch, none fused; dropped results share {self.arena_bytes} "
            f"bytes, held ones have {self.held_bytes}"
        )


class SharedRecording(Recording):
    """A Recording on the CPU that infinicore starts and stops, for a graph that it runs itself.

    Args:
        ends_at_errors: Whether an op of infinicore or torch that raises drops the recording, with a warning. Later ops
            then run at once, and the caller only has to call leave().
    """

    def __init__(self, ends_at_errors: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._ends_at_errors = ends_at_errors

    def _begin(self) -> _CpuBackend:
        return _CpuBackend(self._ends_at_errors)

    def is_active(self) -> bool:
        """Return whether the calling thread still records it."""
        return isinstance(self._backend, _CpuBackend) and self._backend.is_active()

    def leave(self) -> None:
        """End and drop the recording."""
        self.__exit__(RuntimeError, RuntimeError("dropped"), None)

    def shared(self) -> int:
        """Return the address of the complete C++ graph's std::shared_ptr, for _infinicore.shared_graph()."""
        assert isinstance(self._backend, _CpuBackend)
        return self._backend.shared()

    def run_by(self, run: Callable[[], None]) -> None:
        """Run the ops by a function that runs the C++ graph, so that errors of infinicore's ops keep their type."""
        assert isinstance(self._backend, _CpuBackend)
        self._backend.run(run)


class _CudaBackend:
    """A capture on a stream of its own, then the captured graph."""

    arena_bytes = held_bytes = calls = 0

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"{OP}: device must be one that torch has, which has no CUDA device here, got {device}")
        # The current device of the recording thread, not of threads that call run().
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._lock = threading.Lock()
        with ExitStack() as modes:  # exits those entered if a later one fails
            modes.enter_context(noting(_INSIDE))
            modes.enter_context(torch.cuda.device(self._device))
            self._graph = torch.cuda.CUDAGraph()
            self._stream: torch.cuda.Stream = torch.cuda.Stream()
            # Otherwise infinicore would run its ops at once, on a stream of its own. A recording on the CPU makes it
            # raise for ops on CUDA.
            self._others = OpGraph()
            modes.callback(self._others.drop)
            # The allocator reuses dropped memory for later ops of the capture, and keeps memory that is held.
            modes.enter_context(capturing(self._graph, self._stream))
            modes.enter_context(ReadGuard())
            modes.enter_context(CaptureGuard(self._device))
            self._modes = modes.pop_all()

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            others = 0 if error is not None else self._others.note("end")
        finally:
            self._modes.__exit__(kind, error, trace)
        if others:
            raise RuntimeError(f"{OP}: ops of infinicore cannot be recorded on CUDA, got {others} on the CPU")

    def make_ready(self) -> None:
        pass  # the end of the capture has made the graph

    def run(self) -> None:
        refuse_inside_recording()
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if stream != self._stream:  # the previous run may still be in progress
                stream.wait_stream(self._stream)
                self._stream = stream
            self._graph.replay()

    def report(self) -> str:
        return f"a CUDA graph on {self._device}, captured"


def _bind_noted(noted: NotedCall, memory: PlannedMemory) -> Callable[[], object]:
    function = bind_call(noted.call.mapped(memory.tensor))
    if noted.copies is None:
        return function
    return partial(copy_results, function, [memory.tensor(view) for view in noted.copies])
