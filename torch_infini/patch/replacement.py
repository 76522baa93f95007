"""Replacement: the base of a user's own patch, for modules that no op of ours computes; register and unregister it.

structure.py asks registered replacements first. They are tried on small copies of the modules as all patches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .checks.conditions import needs_fallback, unsupported_weights
from .checks.probe import HALF, PROBE_SEED, SIZES, frozen, probe_module, random, shallow_copy
from .swap import Patched, Probe, ProbeCall, Rotary, Unsupported

FLOAT_TOLERANCE = 1e-5


class Replacement(Patched):
    """How to compute modules of a kind with a kernel of your own, in any model that patch_model takes.

    A subclass says which modules it takes, with what they are called, and how it computes:

        >>> @torch_infini.patch.register
        ... class MeanNorm(torch_infini.patch.Replacement):
        ...     op = "mean_norm"
        ...
        ...     @staticmethod
        ...     def takes(module):
        ...         return type(module).__name__.endswith("MeanNorm")
        ...
        ...     @staticmethod
        ...     def inputs(module):
        ...         yield (torch.randn(2, 3, len(module.weight)),)
        ...
        ...     def compute(self, x):
        ...         return my_kernels.mean_norm(x, self.weight, self.eps)

    patch_model calls a small copy of each such module, with random weights, by its own forward and by `compute`: with
    `inputs`, with numbers from 0.01 to 10000, in three dtypes, and with NaN. A module that gives other results stays
    as it was, and the report says why.

    `compute` is called with the forward's arguments, `self` is the module. It runs where ops of torch_infini would: not
    where gradients may be needed, under autocast or a transform, or with hooks for all modules; then the module's own
    forward runs. The module's parts may be replaced and quantized themselves: call them as modules. The first result
    is compared if there are several. The class has to be importable by its name where patched models are copied to
    another process.

    Attributes:
        op: What the report shows as the op of these modules.
        tolerance: Relative error (of the Euclidean norm) up to which two float32 results are considered equal.
    """

    op: ClassVar[str] = ""
    tolerance: ClassVar[float] = FLOAT_TOLERANCE
    infini_ops = ""

    @staticmethod
    def takes(module: nn.Module) -> bool:
        """Return whether a module may be computed by this class, by its class, name or attributes."""
        raise NotImplementedError

    @staticmethod
    def inputs(module: nn.Module) -> Iterable[tuple[Any, ...]]:
        """Yield arguments of the forward, of every form that models pass; floating-point tensors in float32.

        Args:
            module: A copy with random weights, of the sizes that the model's module has.
        """
        raise NotImplementedError

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module's own forward does."""
        raise NotImplementedError

    @classmethod
    def ops(cls, plan: Any) -> str:
        return cls.op

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return [None]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        small = small_copy(module)
        return Probe(small, lambda: cls.calls(small))

    @classmethod
    def calls(cls, small: nn.Module) -> Iterator[ProbeCall]:
        try:
            with torch.random.fork_rng([]):
                torch.manual_seed(0)
                inputs = [args if isinstance(args, tuple) else (args,) for args in cls.inputs(small)]
        except Exception as error:  # whatever a user's function raises
            raise Unsupported(f"{cls.__name__}.inputs raises {type(error).__name__}: {error}") from error
        if not inputs:
            raise Unsupported(f"{cls.__name__}.inputs yields nothing to try it with")

        def call(when: str, args: tuple[Any, ...], factor: float, dtype: torch.dtype, tolerance: float) -> ProbeCall:
            def of(value: Any) -> Any:  # a copy: a forward may write to it
                floating = isinstance(value, Tensor) and value.is_floating_point()
                return (factor * value).to(dtype) if floating else shallow_copy(value)

            return ProbeCall(when, lambda forward: forward(*map(of, args)), tolerance, dtype=dtype)

        for i, args in enumerate(inputs):
            which = f"for input {i}" if i else ""
            yield call(which, args, 1, torch.float32, cls.tolerance)
            for size in SIZES:
                yield call(f"{which} for numbers of about {size:g}".strip(), args, size, torch.float32, cls.tolerance)
            for dtype, tolerance in HALF.items():
                yield call(f"{which} in {str(dtype).removeprefix('torch.')}".strip(), args, 1, dtype, tolerance)
            yield call(f"{which} for NaN".strip(), with_nan(args), 1, torch.float32, cls.tolerance)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not floats or any(needs_fallback(self, tensor) for tensor in floats):
            return super().forward(*args, **kwargs)
        return self.compute(*args, **kwargs)


def with_nan(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with NaN as the first number of the first tensor of floats."""
    found = list(args)
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            found[i] = value.clone(memory_format=torch.contiguous_format)
            found[i].view(-1)[0] = torch.nan
            break
    return tuple(found)


def small_copy(module: nn.Module, seed: int = 0) -> nn.Module:
    """Return a probe module with random weights of the module's shapes, and such copies of its parts."""
    parameters: dict[str, Any] = {}
    for i, (name, parameter) in enumerate(module._parameters.items()):
        if parameter is not None and parameter.is_floating_point():
            numbers = random(*parameter.shape, seed=seed + i)
            # Vectors scale, or are added; the results of matrices have a standard deviation of about 1.
            parameters[name] = frozen(
                1 + numbers / 4 if numbers.dim() < 2 else numbers / max(numbers[0].numel(), 1) ** 0.5
            )
        else:
            parameters[name] = parameter
    parts = {
        name: None if child is None else small_copy(child, seed + 100 * (i + 1))
        for i, (name, child) in enumerate(module._modules.items())
    }
    if any(part is not None and (deep := next(iter(part._modules), None)) for part in parts.values()):
        raise Unsupported(f"its parts have parts ({deep}): a Replacement for it needs a probe of its own")
    small = probe_module(module, parameters, parts)
    small._buffers.update({name: shallow_copy(buffer) for name, buffer in module._buffers.items()})
    if not small._buffers:
        vars(small)[PROBE_SEED] = seed
    return small


_R = TypeVar("_R", bound=type[Replacement])
_registered: list[type[Replacement]] = []


def register(replacement: _R) -> _R:
    """Have patch_model try a Replacement, before patches of its own and before those that were registered earlier.

    Models that are patched already stay as they are.

    Args:
        replacement: A subclass of Replacement with `op`, `takes`, `inputs` and `compute`. One of the same name in the
            same module is replaced, so that a cell of a notebook can be run again.

    Returns:
        The class itself: a decorator.

    Raises:
        TypeError: If replacement is no such class, or lacks one of the four.
    """
    rule = "torch_infini.patch.register: replacement must be a subclass of torch_infini.patch.Replacement"
    if not (isinstance(replacement, type) and issubclass(replacement, Replacement)):
        raise TypeError(f"{rule}, got {replacement!r}")
    missing = [name for name in ("op", "takes", "inputs", "compute") if is_inherited(replacement, name)]
    if missing:
        raise TypeError(
            f"{rule} that defines op, takes, inputs and compute, got {replacement.__name__} without {missing[0]}"
        )
    named = (replacement.__module__, replacement.__qualname__)
    _registered[:] = [one for one in _registered if (one.__module__, one.__qualname__) != named]
    _registered.insert(0, replacement)
    return replacement


def is_inherited(replacement: type[Replacement], name: str) -> bool:
    """Return whether a class has what Replacement has under a name."""
    return bool(getattr(replacement, name) == getattr(Replacement, name))


def unregister(replacement: type[Replacement]) -> None:
    """Have patch_model no longer try a Replacement. Models that were patched by it stay so, until unpatch_model.

    Args:
        replacement: One that was registered.

    Raises:
        ValueError: If it is not registered.
    """
    if replacement not in _registered:
        raise ValueError(
            f"torch_infini.patch.unregister: replacement must be a registered Replacement, got {replacement!r}"
        )
    _registered.remove(replacement)


def replacements_of(module: nn.Module) -> list[type[Replacement]]:
    """Return the registered replacements that take a module, the newest first."""
    found = []
    for one in _registered:
        try:
            if one.takes(module):
                found.append(one)
        except Exception as error:
            raise RuntimeError(
                f"torch_infini.patch_model: {one.__name__}.takes must answer for any module, but raises "
                f"{type(error).__name__} for a {type(module).__name__}: {error}"
            ) from error
    return found
