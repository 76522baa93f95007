"""The quantized layers in a folder of save_patched, as its descriptions name them: integers of torch_infini.weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..weights import FORMATS


class StoredLayer(NamedTuple):
    """The format in which a folder stores a linear layer, and its group size (0 if the format has only one)."""

    format: str
    group: int


def saved_layers(value: Any, file: str, where: str) -> dict[str, StoredLayer]:
    """Return the layers of a description, {name: {"format": ..., "group": ...}}.

    Args:
        value: The field "quantized".
        file: The file of the description, for errors.
        where: The caller, which errors begin with.

    Raises:
        ValueError: For a format or a group that torch_infini.weights does not have.
    """

    def invalid(name: str, rule: str, got: object) -> ValueError:
        at = f"quantized[{name!r}]" if name else "quantized"
        return ValueError(f"{where}: {at} in {file} must {rule}, got {str(got)[:200]}")

    if not isinstance(value, dict):
        raise invalid("", "be an object of layers", value)
    layers = {}
    for name, layer in value.items():
        format = FORMATS.get(str(layer.get("format"))) if isinstance(layer, dict) else None
        if format is None:
            raise invalid(name, f"be an object with format {' or '.join(map(repr, FORMATS))}", layer)
        if type(layer.get("group")) is not int or layer["group"] not in format.groups:
            rule = f"have group {' or '.join(map(str, format.groups))} for {format.name}"
            raise invalid(name, rule, repr(layer.get("group")))
        layers[name] = StoredLayer(format.name, layer["group"])
    return layers
