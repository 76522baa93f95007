"""Stream and Event, on libinfinirt. The garbage collector destroys them."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .._core.devices import backing_type
from . import _calls, _native

_LEGACY_STREAM = 1  # cudaStreamLegacy: torch's default stream, whose address is NULL

# CUDA streams are never destroyed but reused, as torch does with its own: its allocator may have to record events on
# them when memory that they used is freed.
_spare: defaultdict[torch.device, list[int]] = defaultdict(list)

_own: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()  # our CUDA streams, by address

# CPU streams without references go to a thread that destroys them: it waits for queued work, which neither the garbage
# collector nor the stream's own worker may do.
_abandoned: SimpleQueue[int] = SimpleQueue()
_on_cpu: set[int] = set()
_reaper_lock = threading.Lock()
_reaper: threading.Thread | None = None


def _reap(abandoned: SimpleQueue[int]) -> None:
    while True:
        handle = abandoned.get()
        with suppress(RuntimeError):
            _native.call("StreamDestroy", handle)
        _on_cpu.discard(handle)


def _start_reaper() -> None:
    global _reaper
    with _reaper_lock:
        if _reaper is None:
            _reaper = threading.Thread(
                target=_reap, args=(_abandoned,), name="torch_infini.runtime streams", daemon=True
            )
            _reaper.start()


def _reset_after_fork() -> None:
    """Reset after fork(): the child has neither its parent's streams nor the thread that destroys them."""
    global _abandoned, _reaper, _reaper_lock
    _abandoned, _reaper, _reaper_lock = SimpleQueue(), None, threading.Lock()
    _on_cpu.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


@atexit.register
def _finish() -> None:
    """Wait for queued functions before Python shuts down."""
    for handle in list(_on_cpu):
        with suppress(RuntimeError):
            _native.call("StreamSynchronize", handle)


def _destroy_stream(handle: int) -> None:
    with suppress(RuntimeError):
        _native.call("StreamDestroy", handle)


class Stream:
    """A queue of work: it runs in the order it was queued, independently of other streams.

    On CUDA it is a cudaStream_t, which torch and libinfinirt share. `with stream:` makes it torch's current stream, on
    which torch's ops and those of torch_infini run. On the CPU torch's ops run at once in the calling thread; a stream
    runs the functions of launch(): at once in the calling thread too, or, if queued, in a thread of its own.

    Args:
        device: cpu or cuda, with or without an index; None: CUDA's current device if there is CUDA, else the CPU.
        queued: On the CPU, whether launch() returns before the function has run. False: only if INFINI_CPU_STREAMS is
            "queued". At most 1024 functions wait; beyond that launch() blocks. On CUDA every stream is queued.

    Raises:
        TypeError: If `queued` is not a bool.
        ValueError: For a device of another type.
        RuntimeError: For a device that this build or this machine does not have, or an INFINI_CPU_STREAMS that is
            neither "queued" nor "immediate".

    Attributes:
        device: The torch.device, with its index.

    Example:
        >>> stream = torch_infini.runtime.Stream("cuda")
        >>> stream.wait_stream(torch.cuda.current_stream())
        >>> with stream:
        >>>     y = torch.ops.infini.silu(x)
        >>> stream.uses(x)
    """

    def __init__(self, device: torch.device | str | int | None = None, queued: bool = False) -> None:
        device = _native.device_of(device)
        if not isinstance(queued, bool):
            raise TypeError(f"torch_infini.runtime.Stream: queued must be True or False, got {queued!r}")
        try:
            handle = _spare[device].pop()
        except IndexError:
            with _native.current(device):
                handle = _native.create("StreamCreateWithFlags", _native.QUEUED if queued else 0)
        if device.type == "cuda":
            self._set(handle, device, _spare[device].append)
            _own[handle] = self
        else:
            _on_cpu.add(handle)
            self._set(handle, device, _abandoned.put)
            _start_reaper()

    def _set(self, handle: int, device: torch.device, end: Callable[[int], Any]) -> None:
        self.device = device
        self.handle = handle  # infinirtStream_t
        self._torch: torch.cuda.Stream | None = None
        self._errors: list[BaseException] = []
        self._scopes: list[ExitStack] = []
        self._finalizer = weakref.finalize(self, end, handle)
        self._finalizer.atexit = False

    @classmethod
    def from_torch(cls, stream: torch.cuda.Stream) -> Stream:
        """Wrap a torch stream for libinfinirt's functions: the same cudaStream_t, which torch still owns.

        Args:
            stream: Any stream of torch, including torch.cuda.current_stream() and the default stream.

        Returns:
            A Stream whose `torch` is that stream.

        Raises:
            TypeError: If it is not a torch.cuda.Stream.
        """
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(
                "torch_infini.runtime.Stream.from_torch: stream must be a torch.cuda.Stream, got a "
                f"{type(stream).__name__}"
            )
        if (own := _own.get(stream.cuda_stream)) is not None:
            return own
        self = cls.__new__(cls)
        spare = _spare[stream.device]
        if stream.cuda_stream in spare:  # made here, but now only torch refers to it
            spare.remove(stream.cuda_stream)
            self._set(stream.cuda_stream, stream.device, spare.append)
            _own[self.handle] = self
            return self
        with _native.current(stream.device):
            handle = _native.create("StreamFromNative", stream.cuda_stream or _LEGACY_STREAM)
        self._set(handle, stream.device, _destroy_stream)
        self._torch = stream
        return self

    @classmethod
    def borrow(cls, handle: int, device: torch.device) -> Stream:
        """Wrap an infinirtStream_t that the caller owns and destroys; 0 is the device's NULL stream."""
        self = cls.__new__(cls)
        self._set(handle, device, lambda _: None)
        return self

    def launch(self, function: Callable[..., Any], *args: Any) -> None:
        """Queue function(*args), to run in the present grad, inference and autocast modes.

        Its result is dropped. On an immediate stream it has run on return, and its exception is raised here. On a
        queued one the stream's thread runs it; synchronize() raises its exception, and later functions still run. There
        the function may launch others, but must not wait for a stream or an event.

        Args:
            function: Any callable; kept alive until it has run.
            args: Its arguments; kept alive as well.

        Raises:
            RuntimeError: On CUDA, where streams run only kernels.
            BaseException: On an immediate stream, what the function raises.
        """
        body = (lambda: function(*args)) if args else function
        call = _calls.StreamCall(body, self._errors)
        try:
            _calls.queue(self.handle, call)
        except RuntimeError:
            if call.error is None:
                raise
            self._errors.remove(call.error)
            raise call.error from None

    def synchronize(self) -> None:
        """Return when all work queued so far is done.

        Raises:
            BaseException: The exception of the first launched function that failed since the last synchronize().
            RuntimeError: If other work failed.
        """
        try:
            _native.call("StreamSynchronize", self.handle)
        except RuntimeError as failure:
            said = str(failure).encode()
            for error in self._errors:
                if _calls.error_message(error).startswith(said):
                    self._errors.clear()
                    raise error from None
            raise

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here.

        Args:
            event: The event to record; None: a new one.

        Returns:
            The event, which is complete when all work queued before it is.
        """
        event = Event(self.device) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Make work that is queued from now on wait for the event's last record; the caller does not wait.

        Args:
            event: An event of this device type; if it was never recorded, nothing waits.
        """
        event.wait(self)

    def wait_stream(self, stream: Stream | torch.cuda.Stream) -> None:
        """Make work that is queued from now on wait for work now queued on another stream; the caller does not wait.

        Args:
            stream: The other stream, of this device type.
        """
        other = stream if isinstance(stream, Stream) else Stream.from_torch(stream)
        self.wait_event(other.record_event())

    def uses(self, *tensors: Tensor) -> None:
        """Keep the tensors' memory from being reused until the work that is now queued here is done.

        Call it after queuing work on this stream that reads or writes tensors of another stream, before the last
        reference to them is dropped. On CUDA this is Tensor.record_stream.

        Args:
            tensors: Tensors on this stream's device.

        Raises:
            ValueError: For a tensor on another device.
        """
        for i, tensor in enumerate(tensors):
            if backing_type(tensor.device) != self.device.type or (tensor.is_cuda and tensor.device != self.device):
                raise ValueError(
                    f"torch_infini.runtime.Stream.uses: tensor {i} must be on the stream's device, "
                    f"{_name(self.device)}, got one on {tensor.device}"
                )
        if self.device.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(self.torch)
        else:
            self.launch(lambda *_: None, *tensors)

    def __enter__(self) -> Stream:
        if self.device.type != "cuda":
            raise RuntimeError(
                "torch_infini.runtime.Stream: torch has no streams on the CPU, where its ops run in the calling "
                "thread; launch(function) runs them in the stream's"
            )
        scope = ExitStack()
        scope.enter_context(torch.cuda.stream(self.torch))
        self._scopes.append(scope)
        return self

    def __exit__(self, *_: object) -> None:
        self._scopes.pop().close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.handle, self.device) == (other.handle, other.device)

    def __hash__(self) -> int:
        return hash((self.handle, self.device))

    def __repr__(self) -> str:
        return f"<torch_infini.runtime.Stream device={_name(self.device)} handle={self.handle:#x}>"

    @property
    def torch(self) -> torch.cuda.Stream:
        """This stream as torch's: a torch.cuda.ExternalStream of the same cudaStream_t, or from_torch()'s argument.

        Raises:
            RuntimeError: On the CPU, where torch has no streams.
        """
        if self.device.type != "cuda":
            raise RuntimeError("torch_infini.runtime.Stream: torch has no streams on the CPU, got a stream of the CPU")
        if self._torch is None:
            self._torch = torch.cuda.ExternalStream(self.handle, self.device)
        return self._torch


class Event:
    """A point in a stream, to wait for or to measure time with.

    Args:
        device: cpu or cuda, with or without an index; None: CUDA's current device if there is CUDA, else the CPU.
        enable_timing: Whether elapsed_time() may be called.
        blocking: On CUDA, whether a waiting thread sleeps instead of spinning. On the CPU it always sleeps.

    Raises:
        ValueError: For a device of another type.
        RuntimeError: For a device that this build or this machine does not have.

    Attributes:
        device: The torch.device, with its index.

    Example:
        >>> start, end = Event("cpu"), Event("cpu")
        >>> start.record(stream)
        >>> stream.launch(work)
        >>> end.record(stream)
        >>> end.synchronize()
        >>> print(start.elapsed_time(end), "ms")
    """

    def __init__(
        self, device: torch.device | str | int | None = None, enable_timing: bool = True, blocking: bool = False
    ) -> None:
        self.device = _native.device_of(device)
        flags = (0 if enable_timing else _native.DISABLE_TIMING) | (_native.BLOCKING_SYNC if blocking else 0)
        with _native.current(self.device):
            self.handle = _native.create("EventCreateWithFlags", flags)  # infinirtEvent_t
        self._finalizer = weakref.finalize(self, _destroy_event, self.handle)
        self._finalizer.atexit = False

    def record(self, stream: Stream | torch.cuda.Stream | None = None) -> None:
        """Queue the event: it is complete when all work queued before on the stream is. Replaces the last record.

        Args:
            stream: Of this device; None: torch's current stream on CUDA; on the CPU no stream: complete on return.
        """
        used = self._stream(stream)
        _native.call("EventRecord", self.handle, used and used.handle)

    def wait(self, stream: Stream | torch.cuda.Stream | None = None) -> None:
        """Make work that is queued on the stream from now on wait for the last record.

        Args:
            stream: Of this device type; None: torch's current stream on CUDA, on the CPU the calling thread.
        """
        used = self._stream(stream)
        _native.call("StreamWaitEvent", used and used.handle, self.handle)

    def query(self) -> bool:
        """Return whether the last record is complete, without waiting; an event without a record is complete."""
        status = ctypes.c_int()
        _native.call("EventQuery", self.handle, ctypes.byref(status))
        return status.value == 0

    def synchronize(self) -> None:
        """Return when the last record is complete. Stream.synchronize() raises the failures of work before it."""
        _native.call("EventSynchronize", self.handle)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from the completion of this event to that of another.

        Args:
            end: An event of the same device.

        Returns:
            The time; negative if `end` was first.

        Raises:
            RuntimeError: If either was never recorded, is not complete, or has no timing.
        """
        ms = ctypes.c_float()
        _native.call("EventElapsedTime", ctypes.byref(ms), self.handle, end.handle)
        return ms.value

    def __repr__(self) -> str:
        return f"<torch_infini.runtime.Event device={_name(self.device)} handle={self.handle:#x}>"

    def _stream(self, stream: Stream | torch.cuda.Stream | None) -> Stream | None:
        if isinstance(stream, Stream):
            return stream
        if stream is None and self.device.type == "cpu":
            return None
        return Stream.from_torch(torch.cuda.current_stream(self.device) if stream is None else stream)


def _destroy_event(handle: int) -> None:
    with suppress(RuntimeError):
        _native.call("EventDestroy", handle)


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(device)
