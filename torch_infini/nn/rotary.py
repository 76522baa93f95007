"""Rotary position embedding: the tables of cos and sin for rope and qkv_rope_cache, with the scalings of configs.

The numbers are those of transformers' LlamaRotaryEmbedding, computed once for all positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

rope = torch.ops.infini.rope.default

THETA = 10000.0  # for configs without rope_theta
Position = TypeVar("Position", int, Tensor)


class RotarySwitch(NamedTuple):
    """Which of two rotations each token of a sequence gets, where this depends on the sequence's length (longrope).

    transformers rotates a call by the short factors if no position is beyond `length`, else by the long ones. So a
    prompt of at most `length` tokens is short and a longer one is long, from its first token on. Where generated tokens
    exceed `length`, most models keep the keys of earlier tokens as they are, and rotate the new ones by the long
    factors; some compute all tokens anew.

    A token's row in the tables says both its position and its rotation: rows up to `length` are short, those from there
    to `offset` long, and the long rows of the first positions follow from `offset` on.

    Attributes:
        length: The most tokens of a short sequence.
        offset: The number of positions, M.
        recomputes: Whether all tokens are computed anew when generated ones exceed `length`.
    """

    length: int
    offset: int
    recomputes: bool = False

    def row(self, position: Position, is_long: bool | Tensor) -> Position:
        """Return the row of a position, or of a tensor of positions, in a sequence that is long from its first token
        on, or not; plain positions are the rows of a sequence that is not.
        """
        further: Any = self.offset * ((position < self.length) & is_long)
        row: Position = position + further
        return row

    def position(self, row: Tensor) -> Tensor:
        """Return the positions of rows."""
        return row - self.offset * (row >= self.offset)

    def is_long(self, row: Tensor) -> Tensor:
        """Return which rows are rotated by the long factors."""
        return row >= self.length


class RotaryEmbedding(nn.Module):
    """cos and sin of all positions, and the rotation of queries or keys by them.

    Frequency i is theta^(-2i / R), modified by `scaling`; the angle of position p is p times that. Everything is
    computed in float32 and rounded once to dtype, as transformers rounds to the dtype of the hidden states: in the
    model's dtype the tables have the bits of transformers' cos and sin. float32 tables for a half-type model are
    allowed, and more precise.

    In transformers, two scalings depend on the sequence's length:

    * "longrope" uses long_factor once the length exceeds original_max_position_embeddings. If max_positions does, the
      tables have the rows of both, and `switch` says which row a token gets. With plain positions, prompts up to the
      original length, and tokens that are generated after them beyond it, are rotated as in transformers; for longer
      prompts give switch.row(positions, True).
    * "dynamic" recomputes theta whenever a sequence exceeds the previous maximum. Here theta is chosen once, by
      max_positions: unscaled up to original_max_position_embeddings, which config.json's max_position_embeddings
      always is for dynamic, so that all lengths that fit equal transformers; else that for the length max_positions.

    Args:
        head_dim: Columns of a head.
        max_positions: Rows of the tables, the longest sequence.
        theta: The base of the frequencies.
        scaling: None, or a mapping with "rope_type" ("type" in older configs; "su" is longrope) and its parameters;
            other keys are ignored.
            default: nothing. linear: factor. dynamic: factor, original_max_position_embeddings.
            llama3: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
            yarn: original_max_position_embeddings; factor, unless it is max_positions divided by that; beta_fast (32),
            beta_slow (1), truncate (True), and attention_factor, or mscale and mscale_all_dim, or neither.
            longrope: short_factor and long_factor (a number per frequency), original_max_position_embeddings;
            factor as for yarn; attention_factor, unless it is sqrt(1 + log(factor) / log(original)).
            The attention factor of yarn and longrope multiplies cos and sin.
        partial: The share of head_dim that is rotated: R = int(head_dim * partial), even.
        interleaved: Pairs are columns 2i and 2i + 1 (GPT-J) instead of i and i + R/2.
        dtype: The tables' dtype; torch's default if None.
        device: The tables' device. On "meta" they are filled by reset_parameters(), after to_empty().

    Attributes:
        switch: The RotarySwitch of tables for two rotations, or None.
        cos: [rows, R/2], not saved with the model. The rows are max_positions, with a switch max_positions + length.
        sin: [rows, R/2], not saved with the model.

    Raises:
        ValueError: For sizes below 1, an odd R, a theta that is not above 0, an unknown rope_type, or a factor that is
            missing or invalid.

    Source: Su et al., RoFormer, 2021, arXiv:2104.09864; Peng et al., YaRN, 2023, arXiv:2309.00071 (yarn, dynamic); Chen
        et al., Extending Context Window of Large Language Models via Positional Interpolation, 2023, arXiv:2306.15595
        (linear); Ding et al., LongRoPE, 2024, arXiv:2402.13753; Llama 3.1's model code (llama3).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float = THETA,
        scaling: Mapping[str, Any] | None = None,
        partial: float = 1.0,
        interleaved: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_integer("RotaryEmbedding", "head_dim", head_dim)
        _check_integer("RotaryEmbedding", "max_positions", max_positions)
        _check_positive("RotaryEmbedding", "theta", theta)
        if not _is_number(partial) or not 0 < partial <= 1:
            raise _error("RotaryEmbedding", "partial", "be a number above 0 and at most 1", partial)
        self.rotated = int(head_dim * partial)
        if self.rotated % 2 or self.rotated == 0:
            rule = f"make int(head_dim * partial) even and above 0, with head_dim {head_dim}"
            raise _error("RotaryEmbedding", "partial", rule, partial)
        _check_scaling("RotaryEmbedding", scaling or {}, self.rotated)
        self.max_positions = int(max_positions)
        self.theta = float(theta)
        self.scaling = dict(scaling or {})
        self.interleaved = interleaved
        original = self.scaling.get("original_max_position_embeddings", self.max_positions)
        has_both = _kind(self.scaling) == "longrope" and self.max_positions > original
        self.switch = RotarySwitch(original, self.max_positions) if has_both else None
        rows = self.max_positions + (original if has_both else 0)
        for name in ("cos", "sin"):  # empty_like on meta would import sympy: 0.3 s
            table = torch.empty(rows, self.rotated // 2, dtype=dtype, device=device)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Recompute the tables, in their dtype and on their device."""
        if self.cos.is_meta:
            return
        switch, positions = self.switch, torch.arange(self.max_positions, device="cpu")
        if switch is None:
            self._fill(slice(None), positions, self.max_positions, self.scaling)
            return
        # The attention factor is that of the longest sequence in both.
        scaling = {**self.scaling, "factor": _first(self.scaling.get("factor"), switch.offset / switch.length)}
        self._fill(slice(0, switch.length), positions[: switch.length], switch.length, scaling)
        self._fill(slice(switch.length, None), positions.roll(-switch.length), switch.offset, scaling)

    def _fill(self, rows: slice, positions: Tensor, longest: int, scaling: Mapping[str, Any]) -> None:
        """Compute rows of the tables: those of positions in a sequence of `longest` tokens."""
        frequencies, factor = inverse_frequencies(self.rotated, longest, self.theta, scaling)
        # On the CPU, so that the bits are the same on all devices.
        angles = positions[:, None].float() * frequencies
        self.cos[rows].copy_(angles.cos() * factor)
        self.sin[rows].copy_(angles.sin() * factor)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: [S, H, head_dim] or [B, S, H, head_dim], of the tables' dtype, or a half type if they are float32; stride
                1 in the last dimension.
            positions: [S] or [B, S] integers below max_positions; with a switch, rows of the tables.

        Returns:
            The shape and dtype of x, contiguous.

        Raises:
            RuntimeError: As torch_infini.ops.rope.
        """
        return rope(x, self.cos, self.sin, positions, self.interleaved)

    def extra_repr(self) -> str:
        scaling = f", scaling={self.scaling}" if self.scaling else ""
        return f"{self.rotated} columns, {self.max_positions} positions, theta={self.theta}{scaling}"


def rotary_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return RotaryEmbedding's arguments from a model's config.json.

    Reads the form of transformers 5 (rope_parameters, which contains rope_theta and partial_rotary_factor) and that of
    transformers 4 (rope_scaling with "rope_type" or "type"; rope_theta and partial_rotary_factor beside it). As in
    transformers, a missing head_dim is hidden_size / num_attention_heads; a missing theta is 10000; the original length
    is the config's original_max_position_embeddings, else the scaling's, else max_position_embeddings (for dynamic
    always the last).

    Args:
        config: The mapping in config.json.

    Returns:
        head_dim, max_positions (max_position_embeddings), theta, scaling, partial. To serve longer or shorter
        sequences, replace max_positions: the scaling contains everything else that it needs from the config.

    Raises:
        ValueError: For an unknown rope_type, a factor that is missing or invalid, settings that differ by layer, or a
            config without the sizes.
    """
    function = "rotary_settings"
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise _error(function, "config", "have a mapping as rope_parameters", repr(parameters))
    if nested := [key for key, value in parameters.items() if isinstance(value, Mapping)]:
        raise _error(function, "config", "have the same rope_parameters for all layers", f"some for {nested}")
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden, heads = (_needed(function, config, name) for name in ("hidden_size", "num_attention_heads"))
        head_dim = hidden // heads
    _check_integer(function, "config's head_dim", head_dim)
    longest = _needed(function, config, "max_position_embeddings")
    theta, partial = (
        _first(parameters.get(name), config.get(name), default)
        for name, default in (("rope_theta", THETA), ("partial_rotary_factor", 1.0))
    )
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    kind = _kind(scaling)
    original = "original_max_position_embeddings"
    if kind == "dynamic":
        scaling[original] = longest
    elif kind in ("llama3", "yarn", "longrope"):
        scaling[original] = _first(config.get(original), scaling.get(original), longest)
    if kind in ("yarn", "longrope") and scaling.get("factor") is None:
        _check_integer(function, original, scaling[original])
        scaling["factor"] = longest / scaling[original]
    _check_positive(function, "rope_theta", theta)
    if not _is_number(partial):
        raise _error(function, "partial_rotary_factor", "be a number", repr(partial))
    _check_scaling(function, scaling, int(head_dim * partial))
    return {
        "head_dim": head_dim,
        "max_positions": longest,
        "theta": float(theta),
        "scaling": None if kind == "default" else scaling,
        "partial": float(partial),
    }


def inverse_frequencies(
    columns: int, max_positions: int, theta: float = THETA, scaling: Mapping[str, Any] | None = None
) -> tuple[Tensor, float]:
    """Compute the angle of each pair of columns between two positions, and the factor of cos and sin.

    Args:
        columns: R, the columns that are rotated.
        max_positions: The longest sequence, as in RotaryEmbedding.
        theta: The base.
        scaling: As in RotaryEmbedding, already validated.

    Returns:
        ([R/2] float32 on the CPU, the attention factor).
    """
    scaling = scaling or {}
    return SCALINGS[_kind(scaling)](columns, max_positions, theta, scaling)


# The formulas, in transformers' order of operations, because the bits depend on it.


def _powers(columns: int, theta: float | Tensor) -> Tensor:
    """Return theta^(2i / R) for each frequency i."""
    return theta ** (torch.arange(0, columns, 2, device="cpu").float() / columns)


def _default(columns: int, max_positions: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(columns, theta), 1.0


def _linear(columns: int, max_positions: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(columns, theta) / scaling["factor"], 1.0


def _dynamic(columns: int, max_positions: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    if max_positions <= original:
        return _default(columns, max_positions, theta, scaling)
    length = torch.tensor(max_positions, device="cpu")  # transformers has a tensor here too: float32 from here on
    stretched = theta * (factor * length / original - (factor - 1)) ** (columns / (columns - 2))
    return 1.0 / _powers(columns, stretched), 1.0


def _llama3(columns: int, max_positions: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Interpolate long wavelengths, keep short ones, and blend those in between."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    frequencies = 1.0 / _powers(columns, theta)
    lengths = 2 * math.pi / frequencies
    share = (original / lengths - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    result = torch.where(lengths > original / low, frequencies / factor, between)
    return torch.where(lengths < original / high, frequencies, result), 1.0


def _yarn(columns: int, max_positions: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Interpolate gradually, from the pair that turns beta_fast times in the original length to that of beta_slow."""
    original = scaling["original_max_position_embeddings"]
    factor = _first(scaling.get("factor"), max_positions / original)

    def pair_that_turns(times: float) -> float:
        return columns * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, columns - 1)
    if low == high:
        high += 0.001
    powers = _powers(columns, theta)
    ramp = ((torch.arange(columns // 2, device="cpu").float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        one, all_columns = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = magnitude(one) / magnitude(all_columns) if one and all_columns else magnitude(1)
    return frequencies, attention


def _longrope(columns: int, max_positions: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    original = scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if max_positions > original else "short_factor"]
    attention = scaling.get("attention_factor")
    if attention is None:
        factor = _first(scaling.get("factor"), max_positions / original)
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * _powers(columns, theta)), attention


SCALINGS: dict[str, Callable[..., tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
# Required and optional numbers of each scaling.
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings",),
}
ALLOWED = {
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = _first(scaling.get("rope_type"), scaling.get("type"), "default")
    return "longrope" if kind == "su" else kind  # the name in the first Phi-3 configs


def _check_scaling(function: str, scaling: Mapping[str, Any], columns: int) -> None:
    kind = _kind(scaling)
    if kind not in SCALINGS:
        raise _error(function, "rope_type", f"be one of {', '.join(SCALINGS)}", repr(kind))
    if scaling.get("mrope_section") is not None:
        raise _error(function, "scaling", "be for positions in text alone", "one with mrope_section")
    for name in NEEDED[kind]:
        _check_positive(function, name, scaling.get(name), f" for {kind}")
    for name in ALLOWED.get(kind, ()):
        if scaling.get(name) is not None and not (name.startswith("mscale") and scaling[name] == 0):
            _check_positive(function, name, scaling[name], f" for {kind}")
    if kind in ("linear", "dynamic", "llama3") and scaling["factor"] < 1:
        raise _error(function, "factor", f"be at least 1 for {kind}", scaling["factor"])
    if kind == "dynamic" and columns <= 2:
        raise _error(function, "rope_type", "be another for 2 rotated columns", "dynamic")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        rule = f"be above low_freq_factor, {scaling['low_freq_factor']}"
        raise _error(function, "high_freq_factor", rule, scaling["high_freq_factor"])
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = scaling.get(name)
            if not isinstance(factors, (list, tuple)) or not all(_is_number(f) and f > 0 for f in factors):
                raise _error(function, name, "be numbers above 0, one for each frequency", repr(factors))
            if len(factors) != columns // 2:
                raise _error(function, name, f"have {columns // 2} numbers, one for each frequency", len(factors))


def _check_integer(function: str, name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise _error(function, name, "be an integer of at least 1", repr(value))


def _check_positive(function: str, name: str, value: object, more: str = "") -> None:
    if not _is_number(value) or value <= 0:
        raise _error(function, name, f"be a finite number above 0{more}", repr(value))


def _needed(function: str, config: Mapping[str, Any], name: str) -> Any:
    _check_integer(function, f"config's {name}", config.get(name))
    return config[name]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _error(function: str, argument: str, rule: str, came: object) -> ValueError:
    return ValueError(f"torch_infini.nn.{function}: {argument} must {rule}, got {came}")
