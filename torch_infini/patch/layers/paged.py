"""AttentionBackend: while one is set, the attention modules of its thread pass q, k and v to it.

The engine thus computes a model of transformers over its paged cache (paged/). Patched modules call the backend
themselves, others by the attention implementation PAGED_NAME.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

PAGED_NAME = "infini_paged"


class ScoreTerms(NamedTuple):
    """How an attention module computes scores, besides the mask.

    Attributes:
        scale: Factor of q k^T.
        softcap: The scores s become softcap * tanh(s / softcap); 0: no cap.
        sinks: [H], scores that take part in each head's softmax and have no value; None: there are none.
        causal: Whether, without a mask, a query sees no later key.
        window: Of the keys that the mask shows, how many, the newest, the module shows; 0: all.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    causal: bool = True
    window: int = 0


class AttentionBackend(Protocol):
    """Computes attention for the modules of a model.

    Attributes:
        fuses: Whether attend_fused may be called.
    """

    fuses: bool

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: ScoreTerms
    ) -> Tensor:
        """Compute attention of new tokens.

        Args:
            module: The attention module, which determines the layer of the cache.
            q: [B, S, H, D], rotated.
            k, v: [B, S, Hkv, D]; v may be narrower.
            mask: The module's mask.
            scores: How the module computes scores.

        Returns:
            [B, S, H, columns of v].
        """

    def attend_fused(
        self,
        module: nn.Module,
        qkv: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        scores: ScoreTerms,
    ) -> Tensor:
        """Rotate the new tokens' q and k, and compute attention as attend.

        Args:
            module: As in attend.
            qkv: [B, S, (H + 2 Hkv) D], the product of the three projections.
            heads: H.
            cos, sin: [B or 1, S, columns] halves, as ops.rope takes them.
            interleaved: The layout of pairs.
            scores: As in attend.

        Returns:
            As attend.
        """

    def convolve(self, module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Convolve new tokens behind those before, as ops.causal_conv1d.

        Args:
            module: The module, which has a state for each of its calls in a forward.
            x: [B, S, channels].
            weight, bias, silu: As the op's.

        Returns:
            [B, S, channels].
        """

    def delta_rule(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool
    ) -> Tensor:
        """Compute ops.gated_delta_rule of new tokens behind those before; arguments as convolve's and the op's.

        Returns:
            [B, S, Hv, Dv].
        """

    def ssd(
        self,
        module: nn.Module,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
    ) -> Tensor:
        """Compute ops.ssd of new tokens behind those before; arguments as convolve's and the op's.

        Returns:
            [B, S, H, P] float32.
        """

    def selective_scan(
        self,
        module: nn.Module,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        dt_softplus: bool,
    ) -> Tensor:
        """Compute ops.selective_scan of new tokens behind those before; arguments as convolve's and the op's.

        Returns:
            [B, S, channels].
        """


class _CurrentBackend(threading.local):
    backend: AttentionBackend | None = None


CURRENT = _CurrentBackend()


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers for PAGED_NAME: the thread's backend computes it.

    Raises:
        RuntimeError: Outside of a call by the engine.
        NotImplementedError: For terms of the scores that no backend supports.
    """
    backend = CURRENT.backend
    if backend is None:
        raise RuntimeError(
            f"torch_infini: attn_implementation {PAGED_NAME!r} must be used by torch_infini.LLM alone, got a call from "
            "elsewhere (use 'infini')"
        )
    for name in ("position_bias", "relative_position_bias", "alibi"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention adds a bias to the scores ({name})")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scores = ScoreTerms(scale, kwargs.get("softcap") or 0.0, kwargs.get("s_aux"), causal)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return backend.attend(module, q, k, v, attention_mask, scores), None
