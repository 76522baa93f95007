"""The experts of a mixture of a patched model: MLPs in two tensors, of which each token uses a few.

The tensors may be stored by rows or transposed (read in place), with biases, and gate and up may alternate. The router,
whatever it computes, and the block around them run as they are; mixture.py has the block of Llama 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ...ops.fused_experts import ACTIVATIONS
from ..checks.conditions import dense_last, needs_fallback, unhooked, unsupported_weights
from ..checks.probe import HALF, LENGTHS, PROBE_SEED, SIZES, WIDTH, frozen, probe_module, random, tokens, with_nan
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported
from .mlp import ACTIVATION_NAMES, GATES

fused_experts = torch.ops.infini.fused_experts.default

_FIRST = ("gate_up_proj", "up_proj")  # names of the weight of the first product, with and without gate
_SECOND = "down_proj"
# Classes of activations of experts without gate, and their numbers for the op.
_ALONE: dict[type[nn.Module], int] = {type(ACT2FN["relu2"]): ACTIVATIONS["relu2_no_mul"]}
_EXPERTS, _INNER, _CHOSEN = 4, 24, 2  # of a probe module
_LARGE = 30.0  # magnitude of gate and up for which a formula may clamp
_SHARE = "infini_share"  # attribute of experts that ranks share: the op's (first_expert, total_experts); it stays
_ALL = (0, -1)


class ExpertsPlan(NamedTuple):
    """What the experts compute, and how their weights are stored.

    Attributes:
        activation: Its number, as torch.ops.infini.fused_experts takes it.
        module: The name of the activation's module; "" if the forward computes it.
        transposed: Whether the weights are [experts, hidden, 2 * inner] and [experts, inner, hidden].
        interleaved: Whether gate and up alternate.
        alpha: As the op takes it.
        limit: Likewise.
        is_dense: Whether the forward takes rows for every expert, those of the first expert first, and no index.
        first: The name of the first product's weight.
    """

    activation: int
    module: str
    transposed: bool = False
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = inf
    is_dense: bool = False
    first: str = _FIRST[0]

    @property
    def has_gate(self) -> bool:
        return self.first == _FIRST[0]


def has_experts(module: nn.Module) -> bool:
    """Return whether a module keeps the weights of several MLPs in two tensors."""
    weights = [module._parameters.get(name) for name in weights_of(module)]
    return isinstance(module, Experts) or all(weight is not None and weight.dim() == 3 for weight in weights)


def weights_of(module: nn.Module) -> tuple[str, str]:
    """Return the names of the weights of the first and the second product."""
    if isinstance(module, Experts):
        return module.experts_plan.first, _SECOND
    return next((name for name in _FIRST if name in module._parameters), _FIRST[0]), _SECOND


def biases_of(module: nn.Module) -> tuple[str, str]:
    """Return the names of their biases, which may be missing."""
    first, second = weights_of(module)
    return f"{first}_bias", f"{second}_bias"


class Experts(Patched):
    """y[t] = the sum of weights[t, j] * MLP_e(x[t]) over the chosen experts e = index[t, j].

    If the plan is dense, the module takes [experts * rows, hidden] instead, and returns MLP_e of the rows of each e.
    """

    infini_ops = "fused_experts"
    on_cuda = True  # whether the op takes such weights there

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        plans = plans_of(module)
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return plans

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        small = small_experts(module)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        def call(
            when: str,
            x: Tensor,
            size: float = 1,
            dtype: torch.dtype = torch.float32,
            wide: bool = False,
            gates: float = 1,
        ) -> ProbeCall:
            """Return a call with x of magnitude `size`, and gate and up of magnitude `gates`.

            wide: with weights in float32, whatever x is.
            """
            count = len(x)
            order = random(count, _EXPERTS, seed=2).argsort(1)[:, :_CHOSEN]
            weights = random(count, _CHOSEN, seed=3).softmax(1).to(torch.float32 if wide else dtype)
            name, _ = weights_of(small)
            given = {"": {name: small.get_parameter(name) * gates / size}} if size != gates else {}
            rows = x.repeat(_EXPERTS, 1) if is_dense(small) else x
            more = () if is_dense(small) else (order, weights)
            run = lambda forward: forward((size * rows).to(dtype, copy=True), *(one.clone() for one in more))
            return ProbeCall(when, run, HALF.get(dtype, 1e-4), given, dtype=dtype)

        few = random(5, WIDTH)
        limit = limit_of(small)  # plans that clamp differ from others where they do
        yield call("", few, gates=limit if limit < inf else 1)
        yield call("for gates of about 1", few)
        yield call(f"for gates of about {_LARGE:g}", few, gates=_LARGE)
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", random(length, WIDTH))
        for size in SIZES:
            yield call(f"for hidden states of about {size:g}", few, size)
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", few, dtype=dtype)
            yield call(f"in {str(dtype).removeprefix('torch.')} with float32 weights", few, dtype=dtype, wide=True)
        yield call("for hidden states with NaN", with_nan(few[None])[0])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plan = self.experts_plan
        if len(args) != (0 if plan.is_dense else 2) or kwargs or hidden_states.dim() != 2:
            return self.forward_of_original(hidden_states, *args, **kwargs)
        # As is_computed says, without a call of Python.
        if (
            (hidden_states.is_cuda and not self.on_cuda)
            or needs_fallback(self, hidden_states)
            or (plan.module and not unhooked(self._modules[plan.module]))
        ):
            return self.forward_of_original(hidden_states, *args, **kwargs)
        if plan.is_dense:
            experts = self.sizes[0]
            index = torch.arange(experts, device=hidden_states.device).repeat_interleave(len(hidden_states) // experts)
            return self.product(hidden_states, index[:, None], hidden_states.new_ones(len(hidden_states), 1))
        return self.product(hidden_states, *args)

    def is_computed(self, hidden_states: Tensor) -> bool:
        """Return whether the op computes a call with these inputs, for a caller of product."""
        if hidden_states.dim() != 2 or (hidden_states.is_cuda and not self.on_cuda):
            return False
        if needs_fallback(self, hidden_states):
            return False
        name = self.experts_plan.module
        return not name or unhooked(self._modules[name])

    def forward_of_original(self, *args: Any, **kwargs: Any) -> Tensor:
        if _SHARE in self.__dict__:
            args = own_choices(self, *args)
        result: Tensor = super().forward(*args, **kwargs)
        return result

    def product(self, x: Tensor, index: Tensor, weights: Tensor, weights_on_input: bool = False) -> Tensor:
        """Compute forward for a caller that has already ruled out the original's."""
        parameters = self._parameters
        # Each call of Python counts here.
        activation, _, transposed, interleaved, alpha, limit, _, first = self.__dict__[PLAN]
        gate_up, down = parameters[first], parameters["down_proj"]
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return fused_experts(
            dense_last(x),
            gate_up,
            down,
            index,
            weights,
            activation,
            None,
            None,
            parameters.get(f"{first}_bias"),
            parameters.get("down_proj_bias"),
            interleaved,
            alpha,
            limit,
            -1,
            -1,
            weights_on_input,
            *self.share,
        )

    @property
    def share(self) -> tuple[int, int]:
        """The op's first_expert and total_experts."""
        share: tuple[int, int] = self.__dict__.get(_SHARE, _ALL)
        return share

    def rows(self, name: str) -> Tensor:
        """Return a weight as [experts, n, k], whose rows give the columns of a product: a view."""
        return self.as_stored(self.get_parameter(name).detach())

    def as_stored(self, weight: Tensor) -> Tensor:
        """Return a weight [experts, n, k] with the dimensions of the parameter, or the reverse: a view."""
        return weight.transpose(1, 2) if self.experts_plan.transposed else weight

    @property
    def experts_plan(self) -> ExpertsPlan:
        plan: ExpertsPlan = self.__dict__[PLAN]
        return plan

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of experts, of columns of x, and of columns inside."""
        return sizes(self)


def small_experts(module: nn.Module, experts: int = _EXPERTS) -> nn.Module:
    """Return a probe module of experts, of which the weights may be quantized: few, small ones."""
    old, transposed = sizes(module), is_transposed(module)
    inner = WIDTH if old[1] == old[2] else _INNER
    (first, second), biases = weights_of(module), biases_of(module)
    n = 2 * inner if first == _FIRST[0] else inner
    weights = {
        first: random(experts, n, WIDTH) / WIDTH**0.5,
        second: random(experts, WIDTH, inner, seed=1) / inner**0.5,
    }
    if transposed:
        weights = {name: weight.transpose(1, 2).contiguous() for name, weight in weights.items()}
    if module._parameters.get(biases[0]) is not None:
        weights |= {biases[0]: random(experts, n, seed=4), biases[1]: random(experts, WIDTH, seed=5)}
    small = probe_module(module, {name: frozen(weight) for name, weight in weights.items()}, module._modules)
    vars(small)[PROBE_SEED] = 0
    vars(small).pop(_SHARE, None)
    resize(small, module, old, (experts, WIDTH, inner))
    return small


def own_choices(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of the original's forward of experts that ranks share, where it has this rank's alone.

    Other experts become the first one, with weights of 0.
    """
    first, number = vars(module)[_SHARE][0], sizes(module)[0]
    own = (index >= first) & (index < first + number)
    return x, (index - first).where(own, 0), weights.where(own, 0)


def share_experts(module: nn.Module, first: int, number: int) -> None:
    """Note that a module gets some experts alone, of which ranks share all: its weights are cut by the caller."""
    total, _, _ = sizes(module)
    vars(module)[_SHARE] = (first, total)
    for name, value in list(vars(module).items()):
        if type(value) is int and "num" in name and value == total:
            vars(module)[name] = number


def resize(small: nn.Module, module: nn.Module, old: Sequence[int], new: Sequence[int]) -> None:
    """Write the sizes of a probe module, (experts, hidden, inner), to its attributes, from which a forward may read."""
    for name, value in vars(module).items():
        if type(value) is int and "num" in name:
            vars(small)[name] = new[0] if value == old[0] else value
        elif type(value) is int and value in old[1:]:
            vars(small)[name] = new[1 + list(old[1:]).index(value)]


def plans_of(module: nn.Module) -> list[ExpertsPlan]:
    """Return the plans by the module's structure, which Experts.probe checks; its weights may be on meta.

    Raises:
        Unsupported: For another structure.
    """
    if getattr(module, "_is_expert_parallel", False):
        raise Unsupported("its experts are divided among ranks")
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    (first, second), biases = weights_of(module), biases_of(module)
    if sorted(names) not in (sorted((first, second)), sorted((first, second, *biases))):
        raise Unsupported(f"its experts have more than {first} and {second}: {', '.join(names)}")
    shape, (experts, hidden, inner) = tuple(module.get_parameter(first).shape), sizes(module)
    transposed, has_gate = is_transposed(module), first == _FIRST[0]
    n = 2 * inner if has_gate else inner
    if shape != ((experts, hidden, n) if transposed else (experts, n, hidden)):
        rule = f"[experts, {'2 * ' * has_gate}inner, hidden]"
        raise Unsupported(f"its {first} has shape {list(shape)}, not {rule} as its {second} says")
    for name, columns in zip(biases, (n, hidden), strict=True):
        bias = module._parameters.get(name)
        if bias is not None and tuple(bias.shape) != (experts, columns):
            raise Unsupported(f"its {name} has shape {list(bias.shape)}, not {[experts, columns]} as its weights say")
    activation = next((name for name in ACTIVATION_NAMES if name in module._modules), "")
    is_silu = any(vars(module).get(name) is nn.functional.silu for name in ACTIVATION_NAMES)  # as in LFM2's
    limit, alpha = limit_of(module), attribute(module, "alpha")
    if len(module._modules) > bool(activation) or (not activation and not is_silu and limit == inf):
        raise Unsupported(f"it has no activation ({' or '.join(ACTIVATION_NAMES)}), or other submodules")
    kind = type(module._modules[activation]) if activation else None
    if not has_gate:
        if kind not in _ALONE:
            raise Unsupported(
                f"its activation without gate is {kind.__name__ if kind else 'unknown'}, not squared ReLU"
            )
        return [ExpertsPlan(_ALONE[kind], activation, first=first, is_dense=is_dense(module))]
    formulas = ["swiglu"] if is_silu else []
    if kind is not None:
        if kind not in GATES:
            raise Unsupported(f"its activation is {kind.__name__}, neither SiLU nor GELU by tanh")
        op: Any = GATES[kind]
        formulas.append(op.name().removeprefix("infini::"))
    if limit < inf:
        formulas += ["swiglu_clamped", *(["swiglu_oai"] if alpha is not None else [])]
    return [
        ExpertsPlan(
            ACTIVATIONS[formula],
            activation,
            transposed,
            interleaved,
            1.0 if alpha is None else alpha,
            limit,
            is_dense(module),
        )
        for formula in formulas
        for interleaved in (False, True)
    ]


def attribute(module: nn.Module, name: str) -> float | None:
    """Return the module's number of this name, or whose name ends with it."""
    for key, value in vars(module).items():
        if (key == name or key.endswith(f"_{name}")) and type(value) in (int, float):
            return float(value)
    return None


def limit_of(module: nn.Module) -> float:
    """Return the number to which gate and up may be clamped; infinity for none."""
    limit = attribute(module, "limit")
    return inf if limit is None or limit <= 0 else limit


def is_dense(module: nn.Module) -> bool:
    """Return whether the forward takes rows for every expert, and no index."""
    original = getattr(module, "infini_original", type(module))
    return len(inspect.signature(original.forward).parameters) == 2  # and self


def is_transposed(module: nn.Module) -> bool:
    """Return whether the products are of x with the weights themselves, and not with their transposes."""
    if isinstance(module, Experts):
        return module.experts_plan.transposed
    first, second = weights_of(module)
    if first != _FIRST[0]:
        return False  # the two weights have each other's shapes in any case
    _, n, k = module.get_parameter(second).shape
    return tuple(module.get_parameter(first).shape[1:]) == (k, 2 * n)


def sizes(module: nn.Module) -> tuple[int, int, int]:
    """Return (experts, hidden, inner) by the weight of the second product, or of quantized experts."""
    weight = module._parameters.get("down_proj")
    if weight is None:
        assert isinstance(module, Experts)
        return module.sizes
    experts, hidden, inner = weight.shape
    return (experts, inner, hidden) if is_transposed(module) else (experts, hidden, inner)
