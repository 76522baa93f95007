"""The forwards that patched modules run: those of LLaMA's layers, made of infini ops.

They read weights where the original forward reads them, at every call, and step aside for the original where autograd,
autocast, a hook or a replaced submodule asks for it. Host time counts here: at batch 1 a small model waits for Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from transformers.activations import SiLUActivation

from ..ops._registry import FLOATS
from .interface import attend
from .swap import Patched

rms_norm = torch.ops.infini.rms_norm.default
add_rms_norm = torch.ops.infini.add_rms_norm.default
linear = torch.ops.infini.linear.default
swiglu = torch.ops.infini.swiglu.default
rope_ = torch.ops.infini.rope_.default

LLAMA_ROUNDING = 1  # the normalised value is rounded to the input's dtype before it is multiplied by the weight
SILU = (nn.SiLU, SiLUActivation)
# Keyword arguments that say nothing to attention, and the values of others that ask for what is done anyway.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_hidden_states", "return_dict", "num_items_in_batch"}
)
NEUTRAL = {"output_attentions": False}


def must_step_aside(module: nn.Module, x: Tensor) -> bool:
    """Whether the original forward has to run: a backward may follow, autocast picks dtypes, hooks see all modules."""
    return (
        (torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())))
        or torch.is_autocast_enabled("cpu")
        or bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)
    )


def unwatched(module: nn.Module) -> bool:
    """Whether nothing but the module's class decides what a call of it does."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def plain(*modules: nn.Module) -> bool:
    """Whether the modules are linear layers whose product may be computed without calling them."""
    for module in modules:  # noqa: SIM110 (all() over a generator takes twice the time)
        if type(module) is not nn.Linear or not unwatched(module):
            return False
    return True


def place_refusal(module: nn.Module) -> str | None:
    """Why the module's forward cannot be another, or not run here; None if it can."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            return f"{name} is on {tensor.device}, not cpu"
    return None


def weights_refusal(module: nn.Module) -> str | None:
    """Why the kernels cannot read the parameters of the module and its submodules; None if they can."""
    for name, weight in module.named_parameters():
        if type(weight) is not nn.Parameter:
            return f"{name} is a {type(weight).__name__}, not a plain parameter"
        if weight.dtype not in FLOATS:
            return f"{name} is {str(weight.dtype).removeprefix('torch.')}, not float32, bfloat16 or float16"
    if len({weight.dtype for weight in module.parameters()}) > 1:
        return "its parameters have several dtypes"
    return place_refusal(module)


def linears_refusal(module: nn.Module, *names: str) -> str | None:
    """Why the submodules of these names are not plain linear layers; None if they are."""
    for name in names:
        child = getattr(module, name)
        if type(child) is not nn.Linear:
            return f"{name} is {type(child).__name__}, not torch.nn.Linear"
    return weights_refusal(module)


def project(x: Tensor, module: nn.Module) -> Tensor:
    """A linear layer's product; its parameters are looked up directly, which nn.Module's getattr is slow at."""
    parameters = module._parameters
    return linear(x, parameters["weight"], parameters["bias"])


def normalise(x: Tensor, module: nn.Module) -> Tensor:
    """A norm's result, without a call of the module."""
    return rms_norm(x, module._parameters["weight"], module.variance_epsilon, LLAMA_ROUNDING)


class RMSNorm(Patched):
    """y = x / sqrt(mean(x^2) + variance_epsilon), rounded, times weight."""

    infini_ops = "rms_norm"
    infini_reads = ("variance_epsilon",)
    infini_probe = ("hidden",)
    infini_precision = 0.01  # only the order of the sum may differ: where the result is rounded may not

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        return weights_refusal(module)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if must_step_aside(self, hidden_states):
            return super().forward(hidden_states)
        return normalise(hidden_states, self)


class GatedMLP(Patched):
    """y = down_proj(silu(gate_proj(x)) * up_proj(x))."""

    infini_ops = "linear, swiglu"
    infini_probe = ("hidden",)

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if type(module.act_fn) not in SILU:
            return f"its activation is {type(module.act_fn).__name__}, not SiLU"
        return linears_refusal(module, "gate_proj", "up_proj", "down_proj")

    def forward(self, x: Tensor) -> Tensor:
        modules = self._modules
        gate, up, down, act = modules["gate_proj"], modules["up_proj"], modules["down_proj"], modules["act_fn"]
        served = plain(gate, up, down) and type(act) in SILU and unwatched(act)
        if must_step_aside(self, x) or not served:
            return super().forward(x)
        return project(swiglu(project(x, gate), project(x, up)), down)


class PositionEmbeddings(tuple):
    """(cos, sin) as transformers has them, each half twice, and `half`: what rope needs, sliced once for all layers."""

    half: tuple[Tensor, Tensor]


def halves(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The first halves of cos and sin."""
    cos, sin = position_embeddings
    middle = cos.shape[-1] // 2
    return cos[..., :middle], sin[..., :middle]


class RotaryEmbedding(Patched):
    """cos and sin of the positions; the numbers are the original's."""

    infini_ops = "rope (sliced once for all layers)"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        return place_refusal(module)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        position_embeddings = super().forward(x, position_ids)
        if torch.compiler.is_compiling():  # a slice costs nothing there
            return position_embeddings
        result = PositionEmbeddings(position_embeddings)
        result.half = halves(result)
        return result


class Attention(Patched):
    """Projections, rotary position embedding in place, the model's own cache, attention without repeated heads."""

    infini_ops = "linear, rope, attention"
    infini_reads = ("config", "head_dim", "scaling", "layer_idx", "attention_dropout", "is_causal")
    infini_probe = ("hidden", "position_embeddings", "position_ids", "attention_mask")

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if getattr(module.config, "output_attentions", False):
            return "config.output_attentions is set, and the kernel stores no attention weights"
        return linears_refusal(module, "q_proj", "k_proj", "v_proj", "o_proj")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        modules = self._modules
        q_proj, k_proj, v_proj, o_proj = modules["q_proj"], modules["k_proj"], modules["v_proj"], modules["o_proj"]
        if (
            must_step_aside(self, hidden_states)
            or not plain(q_proj, k_proj, v_proj, o_proj)
            or (self.training and self.attention_dropout)
            or any(
                value is not None and value is not NEUTRAL.get(name)
                for name, value in kwargs.items()
                if name not in HARMLESS
            )
            or not (attention_mask is None or isinstance(attention_mask, Tensor))
        ):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        batch, length, _ = hidden_states.shape
        shape = (batch, length, -1, self.head_dim)
        q = project(hidden_states, q_proj).view(shape)
        k = project(hidden_states, k_proj).view(shape)
        v = project(hidden_states, v_proj).view(shape)
        if type(position_embeddings) is PositionEmbeddings:
            cos, sin = position_embeddings.half
        else:
            cos, sin = halves(position_embeddings)
        rope_(q, cos, sin)
        rope_(k, cos, sin)
        if past_key_values is not None:  # keeps [B, heads, length, D]
            k, v = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        y = attend(q, k, v, attention_mask, self.scaling, self.is_causal)
        return project(y.view(batch, length, -1), o_proj), None


class DecoderLayer(Patched):
    """The residual addition behind attention and the norm that follows it become one op."""

    infini_ops = "add_rms_norm"
    infini_probe = ("hidden", "position_embeddings", "position_ids", "attention_mask")

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        for name in ("input_layernorm", "post_attention_layernorm"):
            if not isinstance(getattr(module, name), RMSNorm):
                return f"its {name} was left"
        return place_refusal(module)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        modules = self._modules
        first, second = modules["input_layernorm"], modules["post_attention_layernorm"]
        served = isinstance(first, RMSNorm) and isinstance(second, RMSNorm) and unwatched(first) and unwatched(second)
        if args or not served or must_step_aside(self, hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        normed = normalise(hidden_states, first)
        attended, _ = modules["self_attn"](hidden_states=normed, **kwargs)
        weight = second._parameters["weight"]
        normed, stream = add_rms_norm(attended, hidden_states, weight, second.variance_epsilon, LLAMA_ROUNDING)
        return stream.add_(modules["mlp"](normed))


class Linear(Patched):
    """A linear layer that is called by itself, such as lm_head."""

    infini_ops = "linear"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if type(module) is not nn.Linear:
            return "it is not a torch.nn.Linear"
        return weights_refusal(module)

    def forward(self, input: Tensor) -> Tensor:
        if must_step_aside(self, input):
            return super().forward(input)
        return project(input, self)
