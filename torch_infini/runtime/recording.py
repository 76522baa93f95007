"""record: ops of torch noted between two points and not run, and run as often as wanted, on the same tensors.

On the CPU a graph of libinfinicore_cpp_api, which infinicore's own recording fills too; on CUDA a torch.cuda.CUDAGraph.
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

from ._bound import bound, copy_results, run_all
from ._facts import facts_of
from ._graph import OpGraph, is_recording
from ._kernel_calls import REPLAY, KernelCalls
from ._memory import PlannedMemory
from ._noting import OP, Checker, Noted, Readers, Recorder
from ._plan import capturing, noting, refuse_inside, tensors_of

_thread = threading.local()

_INSIDE = f"{OP}: what runs by itself must not be called while a graph is recorded, got a program or a graph"


def record(fn: Callable[..., Any] | None = None, *args: Any, device: torch.device | str | None = None) -> Recording:
    """Record ops without running them, to run them all again and again.

    Used as a context manager, or given a function, which is called once. Ops of torch.ops.infini and of torch are
    noted; their results have shape, dtype and memory, and no values before run(). Tensors are read and written where
    they are: run() takes what the inputs hold then, and rewrites the results that the caller still holds. Results that
    the caller has dropped share memory. Ops that infinicore notes on this thread are part of the same graph; on CUDA
    they are refused.

    The order of the ops is fixed, and so is what Python decided. Nothing may read values: no item(), tolist() or
    print(), no branch on a tensor, no nonzero(). Random ops draw anew in each run.

    Args:
        fn: Called as fn(*args); what it returns is the graph's `outputs`. None: record a `with` block.
        args: Of fn.
        device: cpu or cuda, where all tensors are. None: where the first tensor in args is; without one, the CPU. On
            CUDA the ops are captured; a library that sets itself up at its first call should have been called before.
            There, tensors of the CPU without dimensions may take part: as the numbers that they are now.

    Returns:
        A Recording, complete if fn is given.

    Raises:
        RuntimeError: If this thread records already, if torch does not have the device, if something cannot be
            replayed, if an op does not take the shapes, dtypes or strides, or, in grad mode, if a tensor requires a
            gradient. The recording is dropped. What an op refuses of values, such as an index out of range, it refuses
            in run().
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

    run() may be called from any thread; runs of one graph are serialised. The graph keeps the memory that it uses
    alive. It refers to memory, not to tensors: giving a tensor other memory (set_, .data, resize_) does not reach it.

    Attributes:
        outputs: What fn returned, always the same tensors, rewritten by run(); None for a `with` block.
        calls: The number of recorded ops of torch.
        arena_bytes: The size of the memory that results share which the caller has dropped.
        held_bytes: The size of the results that the caller held at the end of the recording.
    """

    outputs: Any = None
    calls: int = 0
    arena_bytes: int = 0
    held_bytes: int = 0

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{OP}: device must be cpu or cuda, got {device}")
        self._machine: _CpuBackend | _CudaBackend | None = None
        self._device, self._state = device, "new"

    @classmethod
    def current(cls) -> Recording | None:
        """Return the one that the calling thread is recording, or has not left since an error ended it."""
        return getattr(_thread, "recording", None)

    @classmethod
    def recorder(cls) -> Recorder | None:
        """Return what notes the calling thread's calls of torch; None where nothing does, or CUDA captures them."""
        current = cls.current()
        machine = None if current is None else current._machine
        return machine.recorder() if isinstance(machine, _CpuBackend) else None

    def __enter__(self) -> Recording:
        if self._state != "new":
            raise RuntimeError(f"{OP}: a graph is recorded once, got a second `with`")
        refuse_inside_recording()
        self._machine = self._begin()
        self._state = "recording"
        _thread.recording = self
        return self

    def _begin(self) -> _CpuBackend | _CudaBackend:
        return _CudaBackend(self._device) if self._device.type == "cuda" else _CpuBackend()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        machine, self._machine, self._state = self._machine, None, "dropped"
        assert machine is not None
        _thread.recording = None
        machine.end(kind, error, trace)
        if error is None:
            machine.make_ready()
            self._machine, self._state = machine, "ready"
            self.calls, self.arena_bytes, self.held_bytes = machine.calls, machine.arena_bytes, machine.held_bytes

    def run(self) -> Any:
        """Run the recorded ops in order, on what their tensors hold now.

        Returns:
            `outputs`.

        Raises:
            RuntimeError: While a graph is recorded, or where the recording was not completed; what an op raises. Ops
                after it are left out; the graph can be run again.
        """
        if self._machine is None or self._state != "ready":
            raise RuntimeError(f"{OP}: run() must come after a complete recording, got one that is {self._state}")
        self._machine.run()
        return self.outputs

    def report(self) -> str:
        """Describe the graph: its ops in order, how it runs, its memory."""
        if self._machine is None or self._state != "ready":
            return f"a graph whose recording is {self._state}"
        return self._machine.report()


def refuse_inside_recording() -> None:
    """Raise RuntimeError where this thread records, by whatever means."""
    if not isinstance(Recording.current(), SharedRecording):
        refuse_inside()
    if is_recording():
        raise RuntimeError(f"{OP}: this thread records a graph already, and recordings do not nest")


def computes(func: torch._ops.OpOverload) -> bool:
    """Whether an op does more than return a view, or memory that holds nothing."""
    facts = facts_of(func)
    return not (facts.is_view or facts.allocates)


class _CpuBackend:
    """The noting of a thread's ops, then their graph: kernels run by C, other ops by bound Python callables."""

    arena_bytes = held_bytes = 0

    def __init__(self, ends_at_errors: bool = False) -> None:
        self._graph = OpGraph(ends_at_errors)
        self._places: list[int] = []  # of torch's ops among all
        active = self._graph.is_active
        self._recorder: Recorder | None = Recorder(lambda name: self._places.append(self._graph.note(name)), active)
        self._modes = ExitStack()
        self._modes.enter_context(noting(_INSIDE, active))
        self._modes.enter_context(Readers(active))
        self._modes.enter_context(self._recorder)
        self._python = False

    @property
    def calls(self) -> int:
        return len(self._places)

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
            memory = PlannedMemory(recorder.blocks, [noted.parts() for noted in recorder.calls])
            self.arena_bytes, self.held_bytes = memory.arena_bytes, memory.held_bytes
            # C calls neighbours of a kind at once, and none over ops of infinicore's, where the place grows by more.
            steps = [
                (i, (noted.native, where - i), noted)
                for i, (noted, where) in enumerate(zip(recorder.calls, self._places, strict=True))
            ]
            for (native, _), group in groupby(steps, lambda step: step[1]):
                members = list(group)
                self._bind(members[0][0], native, [noted for _, _, noted in members], memory)

    def _bind(self, index: int, native: bool, group: Sequence[Noted], memory: PlannedMemory) -> None:
        if native:
            kernels = KernelCalls(OP, [noted.call.mapped(memory.tensor) for noted in group])
            self._graph.bind(index, REPLAY, kernels.handle, kernels)
        else:
            self._python = True
            steps = [_bound(noted, memory) for noted in group]
            self._graph.bind_python(index, steps[0] if len(steps) == 1 else partial(run_all, steps))

    def run(self, run: Callable[[], None] | None = None) -> None:
        run = self._graph.run if run is None else partial(self._graph.run_by, run)
        if not self._python:
            run()
            return
        # Written whatever tensors they are, as the kernels do; and not by the caller's autocast.
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            run()

    def report(self) -> str:
        return (
            f"{self._graph.report()}\n{self.calls} ops of torch, none fused; dropped results share {self.arena_bytes} "
            f"bytes, held ones have {self.held_bytes}"
        )


class SharedRecording(Recording):
    """A Recording on the CPU that infinicore starts and stops, for a graph that it runs itself.

    ends_at_errors: Whether an op that raises, of infinicore or torch, drops the recording, with a warning. Then ops
        run again, and what is left to do is to leave it.
    """

    def __init__(self, ends_at_errors: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._ends_at_errors = ends_at_errors

    def _begin(self) -> _CpuBackend:
        return _CpuBackend(self._ends_at_errors)

    def is_active(self) -> bool:
        """Whether the calling thread records it still."""
        return isinstance(self._machine, _CpuBackend) and self._machine.is_active()

    def leave(self) -> None:
        """Drop what was recorded."""
        self.__exit__(RuntimeError, RuntimeError("dropped"), None)

    def shared(self) -> int:
        """Return the address of the complete C++ graph's std::shared_ptr, for _infinicore.shared_graph()."""
        assert isinstance(self._machine, _CpuBackend)
        return self._machine.shared()

    def run_by(self, run: Callable[[], None]) -> None:
        """Run the ops by a function that runs the C++ graph, so that errors of infinicore's ops stay what they are."""
        assert isinstance(self._machine, _CpuBackend)
        self._machine.run(run)


class _CudaBackend:
    """A capture on a stream of its own, then the captured graph."""

    arena_bytes = held_bytes = calls = 0

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"{OP}: device must be one that torch has, which has no CUDA device here, got {device}")
        # The current device of the thread that records, not of those that run.
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._lock = threading.Lock()
        with ExitStack() as modes:  # ends them where one of them fails
            modes.enter_context(noting(_INSIDE))
            modes.enter_context(torch.cuda.device(self._device))
            self._graph = torch.cuda.CUDAGraph()
            self._stream: torch.cuda.Stream = torch.cuda.Stream()
            # infinicore would run its ops at once, on a stream of its own: it records on the CPU instead, and so
            # refuses those on CUDA.
            self._others = OpGraph()
            modes.callback(self._others.drop)
            # The allocator gives what is dropped to later ops of the capture, and keeps what is held.
            modes.enter_context(capturing(self._graph, self._stream))
            modes.enter_context(Readers())
            modes.enter_context(Checker(self._device))
            self._modes = modes.pop_all()

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            others = 0 if error is not None else self._others.note("end")
        finally:
            self._modes.__exit__(kind, error, trace)
        if others:
            raise RuntimeError(f"{OP}: ops of infinicore cannot be recorded on CUDA, got {others} on the CPU")

    def make_ready(self) -> None:
        pass  # the end of the capture has done it

    def run(self) -> None:
        refuse_inside_recording()
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if stream != self._stream:  # the run before may still be under way
                stream.wait_stream(self._stream)
                self._stream = stream
            self._graph.replay()

    def report(self) -> str:
        return f"a CUDA graph on {self._device}, captured"


def _bound(noted: Noted, memory: PlannedMemory) -> Callable[[], object]:
    function = bound(noted.call.mapped(memory.tensor))
    if noted.copies is None:
        return function
    return partial(copy_results, function, [memory.tensor(part) for part in noted.copies])
