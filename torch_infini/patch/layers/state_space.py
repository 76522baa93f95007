"""State space layers of a patched model, Mamba's and Mamba-2's mixers: their own forward, with our ops for convolution
and scan.

So caches, masks of padded batches, gates and norms are the module's, as in linear_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ..checks.conditions import dense_last
from .linear_attention import FUNCTIONS, STEP_FUNCTIONS, RecurrentLayer, own_forward, running

ssd = torch.ops.infini.ssd.default
selective_scan = torch.ops.infini.selective_scan.default

_CHUNKS, _SCAN = "mamba2_chunk_scan", "mamba_selective_scan"


def float_states(x: Tensor, shape: tuple[int, ...], given: Tensor | None, wanted: bool) -> Tensor | None:
    """Return states of a batch to be written: a copy of those given, or zeros if some are wanted."""
    if given is not None:
        return given.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return torch.zeros(shape, dtype=torch.float32, device=x.device) if wanted else None


def compute_chunks(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (transformers' names)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int = 64,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Mamba-2's state space of a batch; return the result in float32 and, if asked for, the last states."""
    x = dense_last(hidden_states)
    shape = (x.shape[0], *x.shape[2:], B.shape[-1])
    state = float_states(x, shape, initial_states, return_final_states)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    terms = A.float(), dense_last(B), dense_last(C), D, dt_bias
    ssd(out, x, dt, *terms, state, None, None, dt_softplus, *dt_limit)
    return (out, state) if return_final_states and state is not None else out


def compute_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute one token [batch, H, P] of Mamba-2's state space; the state is written.

    A mixer gives what belongs to a head for each of the head's columns. The limits of dt are not applied here.
    """
    x = dense_last(hidden_states)[:, None]
    out = torch.empty(x.shape, dtype=x.dtype if z is None else torch.float32, device=x.device)
    terms = (
        *(dt[:, None, :, 0], A[:, 0, 0].float(), dense_last(B)[:, None], dense_last(C)[:, None]),
        *(one if one is None else one[:, 0] for one in (D, dt_bias)),
    )
    kept = state if state.dtype == torch.float32 else state.float()
    ssd(out, x, *terms, kept, None, None, dt_softplus)
    if kept is not state:
        state.copy_(kept)
    return out[:, 0] if z is None else (out[:, 0] * silu(z.float())).to(x.dtype)


def compute_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Mamba's state space of a batch [batch, channels, length]; return also, if asked for, the last states."""
    x = dense_last(hidden_states.mT)
    state = float_states(x, (x.shape[0], *A.shape), None, return_last_state)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    terms = dense_last(A.float()), dense_last(B.mT), dense_last(C.mT), D, delta_bias, None if z is None else z.mT
    selective_scan(out, x, dt.mT, *terms, state, None, None, delta_softplus)
    return (out.mT, state) if state is not None else out.mT


def compute_scan_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute one token [batch, channels] of Mamba's state space; the state is written."""
    x = dense_last(hidden_states)[:, None]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    terms = dense_last(A.float()), dense_last(B)[:, None], dense_last(C)[:, None], D, dt_bias
    kept = state if state.dtype == torch.float32 else state.float()
    selective_scan(out, x, dt[:, None], *terms, None if z is None else z[:, None], kept, None, None, dt_softplus)
    if kept is not state:
        state.copy_(kept)
    return out[:, 0]


def compute_chunks_in_step(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    backend, module = running()
    terms = A.float(), dense_last(B), dense_last(C), D, dt_bias
    return backend.ssd(module, dense_last(hidden_states), dt, *terms, dt_softplus, dt_limit)


def compute_scan_in_step(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> Tensor:
    backend, module = running()
    terms = dense_last(A.float()), dense_last(B.mT), dense_last(C.mT), D, delta_bias, None if z is None else z.mT
    return backend.selective_scan(module, dense_last(hidden_states.mT), dt.mT, *terms, delta_softplus).mT


def has_scan(module: nn.Module, name: str) -> bool:
    return name in own_forward(type(module)).__code__.co_names


def is_mamba_mixer(module: nn.Module) -> bool:
    """Return whether the module's forward, or that of the class that it had, calls Mamba's scan."""
    return isinstance(module, MambaMixer) or has_scan(module, _SCAN)


def is_mamba2_mixer(module: nn.Module) -> bool:
    """Return whether the module's forward, or that of the class that it had, calls Mamba-2's scan."""
    return isinstance(module, Mamba2Mixer) or has_scan(module, _CHUNKS)


def reads_weight(module: nn.Module, name: str) -> bool:
    """Return whether the forward multiplies by the weight of a linear layer of its own, and does not call the layer."""
    return name == "dt_proj" and is_mamba_mixer(module)


_Functions = dict[str, Callable[..., Any]]


class MambaMixer(RecurrentLayer):
    """The module's own forward over causal_conv1d and selective_scan."""

    infini_ops = "causal_conv1d, selective_scan"
    functions: ClassVar[_Functions] = {
        **FUNCTIONS,
        _SCAN: compute_scan,
        "mamba_selective_state_update": compute_scan_step,
    }
    step_functions: ClassVar[_Functions] = {**STEP_FUNCTIONS, _SCAN: compute_scan_in_step}


class Mamba2Mixer(RecurrentLayer):
    """The module's own forward over causal_conv1d and ssd."""

    infini_ops = "causal_conv1d, ssd"
    functions: ClassVar[_Functions] = {
        **FUNCTIONS,
        _CHUNKS: compute_chunks,
        "mamba2_selective_state_update": compute_step,
    }
    step_functions: ClassVar[_Functions] = {**STEP_FUNCTIONS, _CHUNKS: compute_chunks_in_step}
