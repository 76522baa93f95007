"""Conditions for using infini ops instead of a module's own forward: checked once while patching, and at every call.

The checks of a call cost host time, which matters for small models: they look up attributes directly, without getattr.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks

from ..._core.devices import INFINI, on_cpu, on_cuda
from ...ops._registry import FLOATS, REGISTRY
from ..parallel_forward import only_reduces_gradients

CUDA = "cuda" in REGISTRY["rms_norm"].backends  # whether this build has CUDA kernels
WITHOUT_ACCELERATE = "load the model without device_map or offloading to have it patched"
functorch_level = torch._C._functorch.peek_interpreter_stack  # None outside of the transforms of torch.func


def needs_fallback(module: nn.Module, x: Tensor) -> bool:
    """Return whether the original forward has to run.

    It has to if a backward may follow, under autocast, with global module hooks, inside a transform of torch.func or
    forward-mode AD, and on a device or dtype without kernels.
    """
    return bool(
        (torch.is_grad_enabled() and (x.requires_grad or may_need_grad(module)))
        or hooks._global_forward_hooks  # has_global_hooks, inlined
        or hooks._global_forward_pre_hooks
        or not has_kernels(x)
    )


def has_kernels(x: Tensor) -> bool:
    """Return whether there are kernels for the tensor's device and dtype, and no autocast or transform is active.

    The ops have no batching rules and no tangents. Checking the level of torch.func, not the tensors, costs 0.06 us,
    and also finds batched or dual weights.
    """
    return (
        (x.is_cpu or (CUDA and x.is_cuda and not torch.is_autocast_enabled("cuda")) or runs_on_infini(x))
        and x.dtype in FLOATS
        and not torch.is_autocast_enabled("cpu")
        # Under Dynamo the level is an object even where no transform is active.
        and (functorch_level() is None or torch.compiler.is_compiling())
        and forward_ad._current_level < 0
    )


def runs_on_infini(x: Tensor) -> bool:
    """Return whether the tensor is on device infini, its backing device has kernels, and its autocast is off."""
    kernels = x.device.type == INFINI and (on_cpu(x) or (CUDA and on_cuda(x)))
    return kernels and not torch.is_autocast_enabled(INFINI)


def carries_tangents() -> bool:
    return forward_ad._current_level >= 0


def dense_last(x: Tensor) -> Tensor:
    """Return x with stride 1 in the last dimension, as the kernels require; copy only if needed."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def may_need_grad(module: nn.Module) -> bool:
    """Return whether a parameter requires grad, or a hook inside may introduce a tensor that does."""
    return any(p.requires_grad for p in module.parameters()) or not all(unhooked(m) for m in module.modules())


def has_global_hooks() -> bool:
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def unhooked(module: nn.Module) -> bool:
    """Return whether the module has no hooks, no forward on the instance, and was not compiled by itself."""
    own = module.__dict__
    changed = "forward" in own or own.get("_compiled_call_impl") is not None
    return not (module._forward_hooks or module._forward_pre_hooks or changed)


def is_plain(module: nn.Module) -> bool:
    """Return whether the module is a linear layer whose product may be computed without calling it."""
    return type(module) is nn.Linear and unhooked(module)


def unsupported_placement(module: nn.Module) -> str | None:
    """Return why the module's forward cannot be replaced, or cannot run on its device; None if it can."""
    if "forward" in module.__dict__ and not only_reduces_gradients(module):
        if "_hf_hook" in module.__dict__:
            return f"accelerate replaced its forward, to move its weights: {WITHOUT_ACCELERATE}"
        return "its forward was replaced on the instance"
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            return f"{name} is on meta: {WITHOUT_ACCELERATE}"
        if not (on_cpu(tensor) or (CUDA and on_cuda(tensor))):
            return f"{name} is on {tensor.device}, not {'cpu or cuda' if CUDA else 'cpu'}"
    places = sorted({str(tensor.device) for _, tensor in tensors})
    return f"it is spread over {', '.join(places)}" if len(places) > 1 else None


def unsupported_weights(module: nn.Module, *names: str) -> str | None:
    """Return why the kernels cannot read the parameters of the module or its named nn.Linear children, or None.

    Children of other classes are called as they are and not checked.
    """
    weights = dict(module.named_parameters(recurse=False))
    for name in names:
        child = module.get_submodule(name)
        if type(child) is nn.Linear:
            weights |= {f"{name}.{key}": p for key, p in child.named_parameters()}
    for name, weight in weights.items():
        if type(weight).__module__.partition(".")[0] == "torchao":
            kind = type(weight).__name__
            return f"{name} is a {kind} of torchao: patch the model as it was before, with weights='int8' or 'int4'"
        if type(weight) is not nn.Parameter:
            return f"{name} is a {type(weight).__name__}, not a plain parameter"
        if weight.dtype not in FLOATS:
            return f"{name} is {str(weight.dtype).removeprefix('torch.')}, not float32, bfloat16 or float16"
    if len({weight.dtype for weight in weights.values()}) > 1:
        return "its parameters have several dtypes"
    return unsupported_placement(module)
