"""program: calls of ops on the CPU, recorded once and replayed by one C call.

The calls of a function are noted, get memory in one arena, and are recorded by csrc/torch/program.h.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._core.devices import backing_type
from .._core.library import emulates_cuda
from ._facts import CallMode, OpFacts, facts_of
from ._kernel_calls import KernelCalls
from ._memory import Blocks, PlannedMemory, StorageView, views_of
from ._plan import WritingCall, noting, refuse_inside, tensors_of

_OP = "torch_infini.runtime.program"
_NESTED = f"{_OP}: fn must not make or replay another program, got one that does"
_ON_CUDA = "on CUDA use torch_infini.runtime.graph"


def program(fn: Callable[[], Any]) -> Program:
    """Record fn's calls of CPU ops, to replay them without Python, torch's dispatcher and malloc.

    fn may call ops of torch.ops.infini, views (view, a reshape that need not copy, slices, split, transpose, ...)
    and torch.empty; its Python runs once. Tensors that it reads (weights, caches, inputs, indices) are read in place at
    every replay: to replay with other inputs, write them into the same tensors. All tensors that fn makes share one
    arena, which reuses memory; tensors that fn stored elsewhere do not get the values of replays.

    Recording runs the calls once, in separate memory, and leaves their results in the program's outputs. For CUDA there
    is graph().

    Args:
        fn: Takes no arguments; returns tensors, or tuples, lists and dicts of them.

    Returns:
        A Program.

    Raises:
        RuntimeError: If fn calls or returns anything else, if a tensor is not on the CPU, or if a result requires a
            gradient (call program() under torch.no_grad()).
        BaseException: What fn raises.

    Example:
        >>> with torch.no_grad():
        >>>     step = torch_infini.runtime.program(lambda: model.decode(tokens, positions, caches))
        >>> tokens.copy_(next_tokens), positions.add_(1)
        >>> logits = step.replay()
    """
    return Program(fn)


class Program:
    """The result of program().

    Replays of one program by several threads are serialized and share the outputs; different programs run concurrently.
    There is no backward. Deleting the program and its outputs frees its memory; until then it keeps the tensors that it
    uses alive.

    Attributes:
        outputs: What fn returned, always the same tensors, at first with the results of recording. A replay overwrites
            them.
        calls: The number of kernel calls in a replay.
        arena_bytes: The size of the memory for the tensors that fn makes.
    """

    outputs: Any
    calls: int
    arena_bytes: int

    def __init__(self, fn: Callable[[], Any]) -> None:
        refuse_inside()
        if emulates_cuda():
            raise RuntimeError(f"{_OP}: the kernels must be the CPU's ({_ON_CUDA}), got emulated CUDA")
        notes = _ProgramRecorder()
        with noting(_NESTED), notes:
            results, spec = pytree.tree_flatten(fn())
        for leaf in results:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise RuntimeError(f"{_OP}: fn must return tensors, or tuples, lists and dicts of them, got {leaf!r}")
        notes.check_devices(results)
        if any(leaf.requires_grad for leaf in tensors_of(results)):
            raise RuntimeError(
                f"{_OP}: results must not require a gradient, because a program has no backward (call program() under "
                "torch.no_grad()), got one that does"
            )
        self._lock = threading.Lock()
        self.calls = len(notes.calls)
        with torch.inference_mode(False), torch.no_grad():
            views = [notes.blocks.describe(leaf) for leaf in results]
            made = {
                view.block: leaf for view, leaf in zip(views, results, strict=True) if isinstance(view, StorageView)
            }
            used = [views_of((call.args, call.kwargs)) for call in notes.calls]
            memory = PlannedMemory(notes.blocks, [*used, views_of(views)], moves_held=True, device=notes.device)
            self.arena_bytes = memory.arena_bytes
            self._kernels = KernelCalls(_OP, [call.mapped(memory.tensor) for call in notes.calls])
            for block, leaf in made.items():
                memory.fill(block, leaf.untyped_storage())
            outputs = [memory.tensor(v) if isinstance(v, StorageView) else leaf for v, leaf in zip(views, results)]
            self.outputs = pytree.tree_unflatten(outputs, spec)

    def __call__(self) -> Any:
        """Call replay()."""
        return self.replay()

    def replay(self) -> Any:
        """Run the calls on the tensors' present values.

        Returns:
            `outputs`.

        Raises:
            RuntimeError: What an op raises, for example for an index out of range. Later calls are not run; the program
                can be replayed again.
        """
        refuse_inside()
        with self._lock:
            self._kernels.replay()
        return self.outputs


class _ProgramRecorder(CallMode):
    """Runs and records the ops that fn calls; raises for those that cannot be replayed.

    Attributes:
        calls: In order, with StorageViews of tensors that fn made; a functional form is noted as the out form.
        device: The tensors' device: the CPU, or infini backed by it; the CPU before the first tensor.
        blocks: The memory that fn made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[WritingCall] = []
        self.blocks = Blocks()
        self.device = torch.device("cpu")
        self._any = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.check_devices((args, kwargs))
        if isinstance(func, torch._ops.OpOverload):
            facts = facts_of(func)
            if func.namespace == "infini":
                return self._note(facts, args, kwargs)
            if facts.allocates:
                return self._keep(func(*args, **kwargs))
            if facts.decomposes:
                return self.decompose(facts, args, kwargs)
            if func.namespace == "aten" and facts.is_view:
                return func(*args, **kwargs)
        raise RuntimeError(
            f"{_OP}: fn must call nothing but ops of torch.ops.infini, views that need no copy and torch.empty, "
            f"got {func}"
        )

    def _note(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func, form = facts.func, facts.form
        if facts.kernel is None and not facts.is_mutable:
            raise RuntimeError(f"{_OP}: every op must have an out form or write into its arguments, got {func}")
        if provider := facts.provider:
            raise RuntimeError(
                f"{_OP}: every op must have our kernel, which needs no Python, got {provider.op} from provider "
                f"{provider.name!r}"
            )
        result = func(*args, **kwargs)
        call = WritingCall(func, args, kwargs)
        if form is not None:
            self._keep(result)
            call = form.call(args, kwargs, result if isinstance(result, tuple) else (result,))
        self.calls.append(call.mapped(self.blocks.describe))
        return result

    def _keep(self, made: Any) -> Any:
        self.check_devices(made)
        for tensor in tensors_of(made):
            self.blocks.add(tensor)
        return made

    def check_devices(self, values: Any) -> None:
        """Raise RuntimeError unless all tensors so far are in the CPU's memory, and on one device."""
        for tensor in tensors_of(values):
            if self._any and tensor.device == self.device:
                continue
            if backing_type(tensor.device) != "cpu":
                raise RuntimeError(f"{_OP}: every tensor must be on the CPU ({_ON_CUDA}), got one on {tensor.device}")
            if self._any:
                raise RuntimeError(
                    f"{_OP}: all tensors must be on one device, got one on {tensor.device} after one on {self.device}"
                )
            self.device, self._any = tensor.device, True
