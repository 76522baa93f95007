"""Method, by which formats of quantized layers register, and Fields, by which they parse quantization_config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .experts import ExpertsFormat
from .weight import StoredFormat

NAME = "torch_infini.checkpoints"


class Fields:
    """The fields of a quantization_config, or of an object in it.

    Args:
        config: The object.
        where: The file, for errors.
        at: The object's own field, for errors.

    Raises:
        ValueError: If config is not an object.
    """

    def __init__(self, config: Any, where: str, at: str = "quantization_config") -> None:
        self._where, self._at = where, at
        if not isinstance(config, Mapping):
            raise self.fault("", "be an object", config)
        self.config: Mapping[str, Any] = config

    def __getitem__(self, field: str) -> Any:
        """Return the value of a field; None without it."""
        return self.config.get(field)

    def inside(self, field: str) -> Fields:
        """Return the fields of an object in this one."""
        return Fields(self[field], self._where, f"{self._at}.{field}")

    def fault(self, field: str, rule: str, got: object) -> ValueError:
        """Return the error of a field that breaks a rule; "" is the object itself."""
        return ValueError(f"{NAME}: {self._path(field)} in {self._where} must {rule}, got {got!r}")

    def unsupported(self, field: str, what: str) -> NotImplementedError:
        """Return the error of a field that asks for something that is not supported."""
        return NotImplementedError(
            f"{NAME}: {what} is not supported, got {self._path(field)} in {self._where} that asks for it"
        )

    def _path(self, field: str) -> str:
        return f"{self._at}.{field}" if field else self._at

    def one_of(self, field: str, values: tuple[Any, ...], default: Any = None) -> Any:
        value = self.config.get(field, default)
        if not any(value is known or (type(value) is type(known) and value == known) for known in values):
            raise self.fault(field, f"be {' or '.join(repr(known) for known in values)}", value)
        return value

    def group_size(self, field: str) -> int:
        value = self[field]
        if type(value) is not int or (value != -1 and value < 1):
            raise self.fault(field, "be a positive integer, or -1 for a whole row", value)
        return value

    def block(self, field: str) -> tuple[int, int]:
        """Return the rows and columns of a block."""
        value = self[field]
        if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(b) is int and b > 0 for b in value)):
            raise self.fault(field, "be two positive integers", value)
        return value[0], value[1]


Reader = Callable[[str], Tensor]  # returns a tensor of the checkpoint by its name; KeyError without it


def split(name: str) -> tuple[str, str]:
    """Return the layer and the last part of a tensor's name."""
    layer, _, last = name.rpartition(".")
    return layer, last


class Method(NamedTuple):
    """A quant_method.

    Attributes:
        name: The value of quant_method.
        markers: The tensors, by the last part of their names, that only a quantized layer has.
        parse: Returns the function from a layer's name to its format; raises the errors of Fields.
        file: In older folders, whose layers have the first marker, the file beside config.json that describes it.
        experts: How it stores the experts of mixtures; None: it does not.
        parse_reading: In place of `parse`, with a reader of tensors, for layers that some of theirs describe.
        split: Returns the layer's name of a tensor's, and the rest, by which the format knows the tensor.
    """

    name: str
    markers: tuple[str, ...]
    parse: Callable[[Fields], Callable[[str], StoredFormat]] | None = None
    file: str | None = None
    experts: ExpertsFormat | None = None
    parse_reading: Callable[[Fields, Reader], Callable[[str], StoredFormat]] | None = None
    split: Callable[[str], tuple[str, str]] = split
