"""The description of a quantized checkpoint: quantization_config of config.json, parsed into a StoredFormat a layer.

Whatever is unknown, contradictory or not served is refused here, by one sentence, before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .packed import AWQ, GPTQ, PackQuantized
from .scaled import MXFP4, Float8, IntQuantized
from .weight import StoredFormat

NAME = "torch_infini.checkpoints"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8")
OURS = "torch_infini"  # quant_method of save_patched, whose tensors torch_infini.models reads itself
_MARKERS = {  # tensors that only a quantized layer has
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "fbgemm_fp8": ("weight_scale",),
}


class TensorInfo(NamedTuple):
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class QuantizedLayer(NamedTuple):
    """A quantized linear layer, of out_features n and in_features k.

    Attributes:
        names: The names of its tensors by their last part, as the StoredFormat calls them.
    """

    format: StoredFormat
    n: int
    k: int
    names: Mapping[str, str]


def shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layers_of(config: Any, tensors: Mapping[str, TensorInfo], where: str) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a checkpoint, by name.

    Args:
        config: The entry quantization_config.
        tensors: All tensors of the checkpoint.
        where: The file of the config, for errors.

    Raises:
        ValueError: For a config that is unknown or contradicts itself, or tensors that contradict it.
        NotImplementedError: For a variant that is not served.
    """
    description = Description(config, where)
    markers = _MARKERS[description.method]
    names = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in markers}
    names |= {
        name.rpartition(".")[0]
        for name, info in tensors.items()
        if info.dtype in (torch.float8_e4m3fn, torch.int8) and name.endswith(".weight")
    }
    if not names:
        raise ValueError(
            f"{NAME}: a checkpoint of quant_method {description.method!r} must have layers with "
            f"{' or '.join(markers)}, got {len(tensors)} tensors without them in {where}"
        )
    return {name: checked_layer(name, description.format_of(name), tensors) for name in sorted(names)}


def checked_layer(name: str, format: StoredFormat, tensors: Mapping[str, TensorInfo]) -> QuantizedLayer:
    """Return a layer whose tensors have the dtypes and shapes of its format; ValueError naming the one that has not."""
    found = {last: f"{name}.{last}" for last in _LASTS if f"{name}.{last}" in tensors}
    shapes = {last: tensors[key].shape for last, key in found.items()}
    try:
        n, k = format.size(shapes)
    except KeyError as missing:
        raise ValueError(
            f"{NAME}: {name} must have {missing.args[0]}, as {format.name} has, got {', '.join(sorted(found))}"
        ) from None
    except ValueError:
        raise ValueError(
            f"{NAME}: the weight of {name} must have 2 dimensions, as {format.name} has, got shapes {shapes}"
        ) from None
    try:
        expected = format.expected(n, k)
    except ValueError as error:
        raise ValueError(f"{NAME}: {name}, {format.name}: {error}") from None
    for last, rule in expected.items():
        if last not in found:
            if rule.optional:
                continue
            raise ValueError(f"{NAME}: {name} must have {last}, as {format.name} has, got {', '.join(sorted(found))}")
        info = tensors[found[last]]
        if info.shape not in rule.shapes:
            allowed = " or ".join(str(list(shape)) for shape in rule.shapes)
            raise ValueError(
                f"{NAME}: {found[last]} must have shape {allowed} ({format.name}, {n} x {k}), got {list(info.shape)}"
            )
        if info.dtype not in rule.dtypes:
            dtypes = " or ".join(shown(dtype) for dtype in rule.dtypes)
            raise ValueError(f"{NAME}: {found[last]} must be {dtypes} ({format.name}), got {shown(info.dtype)}")
    for last in found:
        if last not in expected and last not in _OF_ACTIVATIONS:
            raise ValueError(
                f"{NAME}: {name} must have {', '.join(expected)} alone, as {format.name} with these settings has, got "
                f"{last} too: the description contradicts the tensors"
            )
    return QuantizedLayer(format, n, k, {last: found[last] for last in expected if last in found})


_OF_ACTIVATIONS = ("input_scale", "input_scale_ub")  # which stay as they are
_LASTS = (
    *("weight", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape"),
    *("weight_zero_point", "weight_g_idx", "weight_scale_inv", *_OF_ACTIVATIONS),
)


class Description:
    """A quantization_config, parsed.

    Args:
        config: The entry of config.json.
        where: The file.

    Attributes:
        method: One of METHODS.

    Raises:
        ValueError, NotImplementedError: As layers_of.
    """

    def __init__(self, config: Any, where: str) -> None:
        self._where = where
        if not isinstance(config, Mapping):
            raise self._fault("", "be an object", config)
        self._config = config
        method = config.get("quant_method")
        if method not in METHODS:
            raise self._fault("quant_method", f"be one of {', '.join(METHODS)}", method)
        self.method: str = method
        parsers: dict[str, Callable[[], Callable[[str], StoredFormat]]] = {
            "awq": self._awq,
            "gptq": self._gptq,
            "compressed-tensors": self._compressed_tensors,
            "fp8": self._fp8,
            "fbgemm_fp8": lambda: lambda name: Float8(name="fbgemm_fp8"),
        }
        self.format_of = parsers[method]()

    def _fault(self, field: str, rule: str, got: object) -> ValueError:
        at = f"quantization_config.{field}" if field else "quantization_config"
        return ValueError(f"{NAME}: {at} in {self._where} must {rule}, got {got!r}")

    def _missing(self, field: str, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{NAME}: {what} is not served, got quantization_config.{field} in {self._where} that asks for it"
        )

    def _one_of(self, config: Mapping[str, Any], field: str, at: str, values: tuple[Any, ...], default: Any) -> Any:
        value = config.get(field, default)
        if not any(value is known or (type(value) is type(known) and value == known) for known in values):
            raise self._fault(at + field, f"be {' or '.join(repr(known) for known in values)}", value)
        return value

    def _group_size(self, value: Any, at: str) -> int:
        if type(value) is not int or (value != -1 and value < 1):
            raise self._fault(at, "be a positive integer, or -1 for a whole row", value)
        return value

    def _awq(self) -> Callable[[str], StoredFormat]:
        config = self._config
        self._one_of(config, "w_bit" if "w_bit" in config else "bits", "", (4,), None)
        self._one_of(config, "version", "", ("gemm", "GEMM"), "gemm")
        self._one_of(config, "zero_point", "", (True,), True)
        field = "q_group_size" if "q_group_size" in config else "group_size"
        format = AWQ(self._group_size(config.get(field), field))
        return lambda name: format

    def _gptq(self) -> Callable[[str], StoredFormat]:
        config = self._config
        if config.get("dynamic"):
            raise self._missing("dynamic", "GPTQ with other settings for some layers")
        bits = self._one_of(config, "bits", "", (4, 8), None)
        version = self._one_of(config, "checkpoint_format", "", ("gptq", "gptq_v2", "", None), "gptq")
        symmetric = self._one_of(config, "sym", "", (True, False), True)
        act_order = self._one_of(config, "desc_act", "", (True, False), False)
        size = self._group_size(config.get("group_size"), "group_size")
        format = GPTQ(bits, size, symmetric, 2 if version == "gptq_v2" else 1, act_order and size != -1)
        return lambda name: format

    def _fp8(self) -> Callable[[str], StoredFormat]:
        block = self._config.get("weight_block_size")
        if block is None:
            return lambda name: Float8()
        if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
            raise self._fault("weight_block_size", "be two positive integers or null", block)
        format = Float8("weight_scale_inv", (block[0], block[1]), "fp8 in blocks")
        return lambda name: format

    # ---- compressed-tensors ----

    def _compressed_tensors(self) -> Callable[[str], StoredFormat]:
        config = self._config
        for field, what in (
            ("kv_cache_scheme", "a quantized cache of a checkpoint"),
            ("transform_config", "a rotation of weights and activations"),
        ):
            if config.get(field):
                raise self._missing(field, what)
        sparsity = config.get("sparsity_config") or {}
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
            raise self._missing("sparsity_config", f"sparse weights ({sparsity.get('format')!r})")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise self._fault("config_groups", "be an object of groups", groups)
        schemes: list[tuple[str, StoredFormat]] = []
        for key, group in groups.items():
            at = f"config_groups.{key}"
            if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
                raise self._fault(at, "be an object with targets, a list", group)
            format = self._scheme(at, group)
            schemes += [(str(target), format) for target in group["targets"]]

        def format_of(name: str) -> StoredFormat:
            """The scheme whose target is the name, else a pattern of it, else the class."""
            for target, format in schemes:
                if target == name:
                    return format
            for target, format in schemes:
                if target.startswith("re:") and re.match(target[3:], name):
                    return format
            for target, format in schemes:
                if target == "Linear":
                    return format
            targets = ", ".join(target for target, _ in schemes)
            raise self._fault("config_groups", f"have a target for {name}, which is quantized", targets)

        return format_of

    def _scheme(self, at: str, group: Mapping[str, Any]) -> StoredFormat:
        weights, inputs = group.get("weights"), group.get("input_activations")
        if not isinstance(weights, Mapping):
            raise self._fault(f"{at}.weights", "be an object", weights)
        whole = self._config.get("format")
        kind = group.get("format") or (None if whole == "mixed-precision" else whole)
        kinds = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
        if kind not in kinds:
            raise self._fault("format" if whole == kind else f"{at}.format", f"be one of {', '.join(kinds)}", kind)
        at += ".weights."
        type_ = self._one_of(weights, "type", at, ("int", "float"), "int")
        symmetric = self._one_of(weights, "symmetric", at, (True, False), True)
        if kind == "naive-quantized":
            kind = "int-quantized" if type_ == "int" else "float-quantized"
        bits = self._one_of(
            weights, "num_bits", at, {"pack-quantized": (4, 8), "mxfp4-pack-quantized": (4,)}.get(kind, (8,)), None
        )
        if (type_ == "int") != (kind in ("pack-quantized", "int-quantized")):
            raise self._fault(at + "type", f"go with format {kind}", type_)
        strategies = {
            "pack-quantized": ("group", "channel"),
            "int-quantized": ("channel", "tensor", "group"),
            "float-quantized": ("channel", "tensor", "block"),
            "mxfp4-pack-quantized": ("group",),
        }[kind]
        strategy = self._one_of(weights, "strategy", at, strategies, None)
        size = self._group_size(weights.get("group_size"), at + "group_size") if strategy == "group" else -1
        if isinstance(inputs, Mapping) and type_ == "int" and inputs.get("dynamic") not in (True, "local"):
            raise self._missing(f"{at}input_activations", "int8 activations with a fixed scale")
        if kind == "pack-quantized":
            return PackQuantized(bits, size, symmetric, weights.get("actorder") in (True, "group"))
        if kind == "int-quantized":
            return IntQuantized(size, symmetric)
        if not symmetric:
            raise self._fault(at + "symmetric", f"be true for format {kind}", symmetric)
        if kind == "mxfp4-pack-quantized":
            if size != 32:
                raise self._fault(at + "group_size", "be 32 for MXFP4", size)
            return MXFP4()
        block = weights.get("block_structure")
        if strategy == "block":
            if not (
                isinstance(block, (list, tuple)) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
            ):
                raise self._fault(at + "block_structure", "be two positive integers", block)
            return Float8("weight_scale", (block[0], block[1]), "compressed-tensors float-quantized in blocks")
        return Float8(name="compressed-tensors float-quantized")
