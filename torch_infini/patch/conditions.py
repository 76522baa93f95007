"""When an infini op may stand for a module's own forward: questions asked once while patching, and at every call.

Those of a call cost host time, of which a small model has little: they look attributes up directly, without getattr.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks

from ..ops._registry import FLOATS, REGISTRY
from .shares import only_for_gradients

CUDA = "cuda" in REGISTRY["rms_norm"].backends  # whether this build has kernels for it
functorch_level = torch._C._functorch.peek_interpreter_stack  # None outside of the transforms of torch.func


def must_step_aside(module: nn.Module, x: Tensor) -> bool:
    """Whether the original forward has to run.

    Where a backward may follow, autocast picks dtypes, hooks see all modules, a transform of torch.func or forward-mode
    AD is at work, or the model was moved to a device or a dtype that the kernels do not know.
    """
    return (
        (torch.is_grad_enabled() and (x.requires_grad or may_need_grad(module)))
        or watched_globally()
        or not has_kernels(x)
    )


def has_kernels(x: Tensor) -> bool:
    """Whether kernels know the tensor's device and dtype, and neither autocast nor a transform is at work."""
    here = x.is_cpu or (CUDA and x.is_cuda and not torch.is_autocast_enabled("cuda"))
    return here and x.dtype in FLOATS and not torch.is_autocast_enabled("cpu") and not transformed()


def transformed() -> bool:
    """Whether torch.vmap, another transform of torch.func or forward-mode AD is at work.

    The ops have no batching rules and no tangents. Asking for the level, not the tensors, costs 0.06 us, and also finds
    weights that are batched or dual.
    """
    # Dynamo takes the level for an object where there is none.
    level = functorch_level() is not None and not torch.compiler.is_compiling()
    return level or forward_ad._current_level >= 0


def carries_tangents() -> bool:
    """Whether forward-mode AD is at work."""
    return forward_ad._current_level >= 0


def dense_last(x: Tensor) -> Tensor:
    """x, copied where its last dimension has another stride than 1, which the kernels do not read."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def may_need_grad(module: nn.Module) -> bool:
    """Whether a parameter needs a gradient, or a hook inside may bring in something that does."""
    return any(p.requires_grad for p in module.parameters()) or not all(unwatched(m) for m in module.modules())


def watched_globally() -> bool:
    """Whether hooks are registered for the forwards of all modules."""
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def unwatched(module: nn.Module) -> bool:
    """Whether nothing but the module's class decides what a call of it does."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_plain(module: nn.Module) -> bool:
    """Whether the module is a linear layer whose product may be computed without calling it."""
    return type(module) is nn.Linear and unwatched(module)


def place_refusal(module: nn.Module) -> str | None:
    """Why the module's forward cannot be another, or not run here; None if it can."""
    if "forward" in module.__dict__ and not only_for_gradients(module):
        return "its forward was replaced on the instance"
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if not (tensor.is_cpu or (CUDA and tensor.is_cuda)):
            return f"{name} is on {tensor.device}, not {'cpu or cuda' if CUDA else 'cpu'}"
    places = sorted({str(tensor.device) for _, tensor in tensors})
    return f"it is spread over {', '.join(places)}" if len(places) > 1 else None


def weights_refusal(module: nn.Module, *names: str) -> str | None:
    """Why the kernels cannot read the module's own parameters and those of the plain linear layers it names.

    Layers of other kinds are called as they are, so nothing is asked of them.
    """
    weights = dict(module.named_parameters(recurse=False))
    for name in names:
        child = module.get_submodule(name)
        if type(child) is nn.Linear:
            weights |= {f"{name}.{key}": p for key, p in child.named_parameters()}
    for name, weight in weights.items():
        if type(weight) is not nn.Parameter:
            return f"{name} is a {type(weight).__name__}, not a plain parameter"
        if weight.dtype not in FLOATS:
            return f"{name} is {str(weight.dtype).removeprefix('torch.')}, not float32, bfloat16 or float16"
    if len({weight.dtype for weight in weights.values()}) > 1:
        return "its parameters have several dtypes"
    return place_refusal(module)
