"""Attention by a caller of the whole model: while one is set, attention modules of its thread hand q, k and v to it.

So that the engine computes a model of transformers over its paged cache (paged/). Patched modules call it themselves,
others by the attention implementation PAGED_NAME.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

PAGED_NAME = "infini_paged"


class Scores(NamedTuple):
    """How an attention module makes probabilities of q and k, beside the mask.

    Attributes:
        scale: Factor of q k^T.
        softcap: The scores s become softcap * tanh(s / softcap); 0: they stay.
        sinks: [H], a score of each head that takes part in the softmax and has no value; None: there are none.
        causal: Whether a query sees no later key where there is no mask.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    causal: bool = True


class AttentionCaller(Protocol):
    """What computes the attention of a model's modules.

    Attributes:
        fuses: Whether attend_fused may be called.
    """

    fuses: bool

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
        """Compute attention of new tokens.

        Args:
            module: The attention module, by which the caller knows its cache.
            q: [B, S, H, D], rotated.
            k, v: [B, S, Hkv, D]; v may be narrower.
            mask: What the module was given.
            scores: How it makes probabilities.

        Returns:
            [B, S, H, columns of v].
        """

    def attend_fused(
        self, module: nn.Module, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, interleaved: bool, scores: Scores
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


class _Calls(threading.local):
    caller: AttentionCaller | None = None


CALLS = _Calls()


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
    """Attention function of transformers for PAGED_NAME: the caller of the thread computes it.

    Raises:
        RuntimeError: Outside of a call by the engine.
        NotImplementedError: For terms of the scores that no caller knows.
    """
    caller = CALLS.caller
    if caller is None:
        raise RuntimeError(
            f"torch_infini: attn_implementation {PAGED_NAME!r} must be used by torch_infini.LLM alone, got a call of "
            "another caller (use 'infini')"
        )
    for name in ("position_bias", "relative_position_bias", "alibi"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention adds a bias to the scores ({name})")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scores = Scores(scale, kwargs.get("softcap") or 0.0, kwargs.get("s_aux"), causal)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return caller.attend(module, q, k, v, attention_mask, scores), None
