"""HookRegistry: callbacks that receive a model's tensors as they are computed, for debugging.

Hooks are attached for one pass at a time, so passes without callbacks cost nothing extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...models import Llama
from ...nn import RMSNorm

Callback = Callable[[str, Any, int], object]


class HookRegistry:
    """Callbacks by the names of tensors; InferEngine.register_hooks connects it to an engine.

    The names, for tensors [tokens, columns] of the pass (the sequences concatenated, without padding):

    * "embed_tokens", "norm" and, only for the last token of each sequence, "lm_head", with layer_index -1;
    * for each layer "input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "self_attn", "post_attention_layernorm",
      "gate_proj", "up_proj", "down_proj", "mlp", each the result of the transformers module of that name, and "layer",
      the result of the whole layer;
    * if a model has them, "q_norm" and "k_norm" [tokens, heads, head_dim].

    A pass without callbacks skips the parts of its last layer that logits do not need, so their last bits may differ.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}

    def register_hook(self, name: str, callback: Callback) -> None:
        """Call a function with a tensor in every pass from the next on.

        Args:
            name: The tensor's name; it may have several callbacks.
            callback: Called as callback(name, tensor, layer_index) in the order of computation. The tensor is a copy on
                the engine's device, torch's or infinicore's as input_ids are. Exceptions of it are raised by forward,
                whose tokens are lost, and no further callback is called; if several ranks share the model, they finish
                the pass first.

        Raises:
            TypeError: For a callback that cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"{_NAME}.register_hook: callback must be callable, got {type(callback).__name__}")
        self._callbacks.setdefault(name, []).append(callback)

    def clear(self) -> None:
        """Remove all callbacks."""
        self._callbacks.clear()

    def has_hooks(self) -> bool:
        """Return whether there are callbacks."""
        return bool(self._callbacks)

    def check(self, model: Llama) -> None:
        """Raise ValueError if a callback's name is not one of the model's tensors."""
        names = [name for name in NAMES if model.config.qk_norm or name not in ("q_norm", "k_norm")]
        for name in self._callbacks:
            if name not in names:
                raise ValueError(f"{_NAME}: name must be one of {', '.join(names)}, got {name!r}")


NAMES = (
    "embed_tokens",
    "input_layernorm",
    "q_proj",
    "k_proj",
    "v_proj",
    "q_norm",
    "k_norm",
    "o_proj",
    "self_attn",
    "post_attention_layernorm",
    "gate_proj",
    "up_proj",
    "down_proj",
    "mlp",
    "layer",
    "norm",
    "lm_head",
)
_NAME = "infinilm.HookRegistry"


@contextmanager
def tapped(model: Llama, registry: HookRegistry | None, convert: Callable[[Tensor], Any]) -> Iterator[None]:
    """Attach the registry's callbacks to the model for the body.

    Args:
        convert: Converts a torch tensor for the callbacks.
    """
    if registry is None or not registry.has_hooks():
        yield
        return
    registry.check(model)
    callbacks = {name: list(callbacks) for name, callbacks in registry._callbacks.items()}
    # Other ranks wait for this one within the pass: an exception must not leave it before they have finished.
    tap = _Tap(callbacks, convert, defers_errors=model.tp_group is not None)
    try:
        tap.attach(model)
        yield
    finally:
        tap.remove()
    if tap.error is not None:
        raise tap.error


class _Tap:
    """The hooks of one pass."""

    def __init__(
        self, callbacks: dict[str, list[Callback]], convert: Callable[[Tensor], Any], defers_errors: bool
    ) -> None:
        self._callbacks = callbacks
        self._convert = convert
        self._defers_errors = defers_errors
        self.error: Exception | None = None
        self._handles: list[Any] = []
        self._norms: list[RMSNorm] = []

    def attach(self, model: Llama) -> None:
        self._result(model.embed, -1, "embed_tokens")
        for i, layer in enumerate(model.layers):
            attention, mlp = layer.attention, layer.mlp
            q, kv = (n * attention.head_dim for n in (attention.heads, attention.kv_heads))
            self._norm(layer.attention_norm, i, "input_layernorm", i - 1)
            self._parts(attention.qkv, i, {"q_proj": q, "k_proj": kv, "v_proj": kv})
            if attention.q_norm is not None and attention.k_norm is not None:
                self._result(attention.q_norm, i, "q_norm")
                self._result(attention.k_norm, i, "k_norm")
            self._result(attention.out, i, "o_proj")
            self._result(attention, i, "self_attn")
            self._norm(layer.mlp_norm, i, "post_attention_layernorm")
            inner = mlp.down.in_features
            self._parts(mlp.gate_up, i, {"gate_proj": inner, "up_proj": inner})
            self._result(mlp.down, i, "down_proj")
            self._result(mlp, i, "mlp")
        self._norm(model.norm, -1, "norm", len(model.layers) - 1)
        self._result(model.head, -1, "lm_head")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for norm in self._norms:
            vars(norm).pop("after", None)  # a callback may have run a pass itself

    def _call(self, name: str, tensor: Tensor, layer: int) -> None:
        for callback in self._callbacks.get(name, ()):
            if self.error is not None:
                return
            try:
                callback(name, self._convert(tensor.clone()), layer)  # the pass may overwrite the memory
            except Exception as error:
                if not self._defers_errors:
                    raise
                self.error = error

    def _result(self, module: nn.Module, layer: int, name: str) -> None:
        if name in self._callbacks:
            self._handles.append(module.register_forward_hook(lambda _, args, y: self._call(name, y, layer)))

    def _parts(self, module: nn.Module, layer: int, parts: dict[str, int]) -> None:
        """Hook a product of several projections with these numbers of columns."""

        def call(module: nn.Module, args: object, y: Tensor) -> None:
            for name, part in zip(parts, y.split(list(parts.values()), -1), strict=True):
                self._call(name, part, layer)

        if parts.keys() & self._callbacks.keys():
            self._handles.append(module.register_forward_hook(call))

    def _norm(self, norm: RMSNorm, layer: int, name: str, before: int = -1) -> None:
        """Hook a norm, including its fused form, which torch's hooks miss; its sum is the result of layer `before`."""
        self._result(norm, layer, name)

        def after(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            y, total = RMSNorm.after(norm, x, residual)
            if before >= 0:
                self._call("layer", total, before)
            self._call(name, y, layer)
            return y, total

        if {"layer", name} & self._callbacks.keys():
            norm.after = after  # type: ignore[method-assign]
            self._norms.append(norm)
