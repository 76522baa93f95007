"""Linear attention and short convolutions of a patched model: their own forward, with our ops for convolution and rule.

So caches, masks of padded batches, gates and norms are the module's. transformers' modules call these functions by the
names in FUNCTIONS, of which each family has a copy.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks.conditions import dense_last, needs_fallback, unsupported_weights
from ..checks.probe import HALF, LENGTHS, WIDTH, call_with, frozen, linear, norm_probe, probe_module, random, tokens
from ..own_forward import CACHE, cache_name, with_older_names
from ..swap import Patched, Probe, ProbeCall, Rotary, Unsupported
from .paged import CURRENT, AttentionBackend

causal_conv1d = torch.ops.infini.causal_conv1d.default
gated_delta_rule = torch.ops.infini.gated_delta_rule.default

_OUTPUTS, _INNER = ("out_proj", "o_proj"), ("x_proj", "dt_proj")  # others take hidden states
_CONVOLUTION, _RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
_STEP_RULE = "torch_recurrent_gated_delta_rule"


def convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """Convolve [batch, channels, length], as transformers' function of the name does."""
    x = dense_last(hidden_states.mT)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    causal_conv1d(out, x, weight, bias, None, None, None, activation is not None)
    return out.mT


def convolve_step(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve new columns after those of the state, which is written."""
    x = dense_last(hidden_states.mT)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    causal_conv1d(out, x, weight, bias, conv_state, None, None, activation is not None)
    return out.mT


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule of a batch; return the result and, if asked for, the last state."""
    state = None
    if initial_state is not None:
        state = initial_state.to(torch.float32, copy=True)
    elif output_final_state:
        shape = (value.shape[0], value.shape[2], query.shape[3], value.shape[3])
        state = torch.zeros(shape, dtype=torch.float32, device=value.device)
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    of = (dense_last(query), dense_last(key), dense_last(value), g, beta)
    gated_delta_rule(out, *of, state, None, None, None, use_qk_l2norm_in_kernel)
    return out, state if output_final_state else None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: convolve,
    "causal_conv1d_update": convolve_step,
    _RULE: delta_rule,
    _STEP_RULE: delta_rule,
}


class _Step(threading.local):
    """The module whose forward runs on this thread, and the AttentionBackend that holds the states of all sequences."""

    running: tuple[AttentionBackend, nn.Module] | None = None


_STEP = _Step()


def running() -> tuple[AttentionBackend, nn.Module]:
    """Return the backend of the engine's step, and the module whose forward runs on this thread."""
    assert _STEP.running is not None
    return _STEP.running


def convolve_in_step(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    backend, module = running()
    return backend.convolve(module, dense_last(hidden_states.mT), weight, bias, activation is not None).mT


def delta_rule_in_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    backend, module = running()
    of = (dense_last(query), dense_last(key), dense_last(value), g, beta)
    return backend.delta_rule(module, *of, use_qk_l2norm_in_kernel), None


STEP_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    _CONVOLUTION: convolve_in_step,
    _RULE: delta_rule_in_step,
    _STEP_RULE: delta_rule_in_step,
}


def has_delta_rule(module: nn.Module) -> bool:
    """Return whether the module's forward, or that of the class that it had, calls the gated delta rule."""
    return isinstance(module, LinearAttention) or _RULE in own_forward(type(module)).__code__.co_names


def is_short_convolution(module: nn.Module) -> bool:
    """Return whether the module's forward, or that of the class that it had, convolves between linear layers alone."""
    if isinstance(module, ShortConvolution):
        return True
    kinds = [nn.Linear if isinstance(child, nn.Linear) else type(child) for child in module.children()]
    names = own_forward(type(module)).__code__.co_names
    return _CONVOLUTION in names and not module._parameters and set(kinds) == {nn.Linear, nn.Conv1d}


def own_forward(cls: type[nn.Module]) -> types.FunctionType:
    forward = inspect.unwrap(cls.forward)
    return forward if isinstance(forward, types.FunctionType) else lambda: None  # type: ignore[return-value]


def forward_with(cls: type[nn.Module], functions: dict[str, Callable[..., Any]], suffix: str) -> Callable[..., Any]:
    """Return a copy of the class's forward that calls these functions instead of those of its file."""
    own = own_forward(cls)
    # A module of its own, because torch.compile looks a function's globals up in the module that they name.
    name = f"{__name__}.{own.__module__.replace('.', '_')}_{suffix}"
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update({**own.__globals__, **functions, "__name__": name})
    made = types.FunctionType(own.__code__, vars(module), own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    decorated = cls.forward is not own and cache_name(own) == CACHE
    return with_older_names(made) if decorated else made


class RecurrentLayer(Patched):
    """The module's own forward over our ops.

    Attributes:
        functions: By name what the forward calls instead of its file's functions.
        step_functions: The same in a step of the engine, which holds the states.
    """

    functions: ClassVar = FUNCTIONS
    step_functions: ClassVar = STEP_FUNCTIONS
    forward_with_ops: Callable[..., Any]
    forward_in_step: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "infini_original" in vars(cls):
            cls.forward_with_ops = forward_with(cls.infini_original, cls.functions, "ops")
            cls.forward_in_step = forward_with(cls.infini_original, cls.step_functions, "step")

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        convolutions = [child for child in module._modules.values() if isinstance(child, nn.Conv1d)]
        if not convolutions or any(one.groups != one.in_channels for one in convolutions):
            raise Unsupported("it has no convolution of each channel")
        activation = getattr(module, "activation", "silu")
        if activation not in (None, "silu", "swish"):
            raise Unsupported(f"the activation of its convolution is {activation}, not silu")
        if reason := unsupported_weights(module, *module._modules):
            raise Unsupported(reason)
        return [None]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        """Return a probe module of the module's heads, between fewer hidden columns."""
        modules: dict[str, nn.Module | None] = {}
        for seed, (name, child) in enumerate(module._modules.items()):
            if isinstance(child, nn.Linear):
                outputs = WIDTH if name in _OUTPUTS else child.out_features
                modules[name] = linear(outputs, child.in_features if name in (*_OUTPUTS, *_INNER) else WIDTH, seed)
                if child.bias is None:
                    modules[name]._parameters["bias"] = None
            elif isinstance(child, nn.Conv1d):
                parameters = {
                    key: None if weight is None else frozen(random(*weight.shape, seed=seed) / 2)
                    for key, weight in child._parameters.items()
                }
                modules[name] = probe_module(child, parameters)
            elif child is not None and "weight" in child._parameters:
                modules[name] = norm_probe(child, seed)
            else:
                modules[name] = child
        own = {
            name: None if parameter is None else frozen(random(*parameter.shape, seed=7))
            for name, parameter in module._parameters.items()
        }
        # Buffers too are converted to the dtype of a call.
        buffers = {name: frozen(x.detach().float().cpu()) for name, x in module._buffers.items() if x is not None}
        small = probe_module(module, {**own, **buffers}, modules)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        few = random(2, 3, WIDTH)
        yield ProbeCall("", call_with(few), 1e-4)
        for length in LENGTHS:
            yield ProbeCall(f"for {tokens(length)}", call_with(random(1, length, WIDTH)), 1e-4)
        mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
        yield ProbeCall("for a padded batch", lambda forward: forward(few.clone(), attention_mask=mask.clone()), 1e-4)
        for dtype in HALF:
            name = str(dtype).removeprefix("torch.")
            # Half types are rounded between the ops, in another order.
            yield ProbeCall(f"in {name}", call_with(few, dtype), 4 * HALF[dtype], dtype=dtype)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if CURRENT.backend is not None:
            _STEP.running = CURRENT.backend, self
            try:
                return self.forward_in_step(hidden_states, *args, **kwargs)
            finally:
                _STEP.running = None  # which holds the cache
        if hidden_states.is_cuda or needs_fallback(self, hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        # The forward reads the convolutions' weights, and does not call them.
        return self.forward_with_ops(hidden_states, *args, **kwargs)


class LinearAttention(RecurrentLayer):
    """The module's own forward over causal_conv1d and gated_delta_rule."""

    infini_ops = "causal_conv1d, gated_delta_rule"


class ShortConvolution(RecurrentLayer):
    """The module's own forward over causal_conv1d: LFM2's layers without attention."""

    infini_ops = "causal_conv1d"
