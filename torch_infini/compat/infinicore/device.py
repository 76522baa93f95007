"""device: the device of a tensor, with torch's names for device types."""

from __future__ import annotations

from .lib import _infinicore

_Type = _infinicore.Device.Type
# Types that several vendors serve list them all: an index counts through the existing devices, in this order.
_TYPES = {
    "cpu": (_Type.CPU,),
    "cuda": (_Type.NVIDIA, _Type.METAX, _Type.ILUVATAR, _Type.QY, _Type.KUNLUN, _Type.HYGON),
    "mlu": (_Type.CAMBRICON,),
    "npu": (_Type.ASCEND,),
    "musa": (_Type.MOORE,),
}
_ALIASES = {"nvidia": "cuda"}


class DeviceNotFoundError(KeyError, RuntimeError):
    """Raised if a device is used that this machine or this build does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class device:
    """A device: device("cuda:1"), device("cuda", 1), device("cpu"), or a copy of another one.

    Args:
        type: "cpu" (the default), "cuda" ("nvidia" is the same), "mlu", "npu" or "musa", with or without ":INDEX"; or a
            device.
        index: The device's index, from 0; not together with ":INDEX".

        Any device can be named; the first use of one that does not exist raises DeviceNotFoundError, a KeyError.
    """

    def __init__(self, type: str | device | None = None, index: int | None = None) -> None:
        self.type: str
        self.index: int
        if isinstance(type, device):
            if index is not None:
                raise ValueError(f"infinicore.device: index must not be given beside a device, got {index}")
            index = type.index
            type = type.type
        if type is None:
            type = "cpu"
        if not isinstance(type, str):
            raise TypeError(f"infinicore.device: type must be a name or a device, got {type!r}")
        name, colon, number = type.partition(":")
        if colon:
            if index is not None:
                raise ValueError(f'infinicore.device: index must not be given beside "{type}", got {index}')
            if not number.isdecimal():
                raise ValueError(f'infinicore.device: type must be a name or "NAME:INDEX", got "{type}"')
            index = int(number)
        name = _ALIASES.get(name, name)
        if name not in _TYPES:
            raise ValueError(f'infinicore.device: type must be one of {", ".join(_TYPES)}, got "{type}"')
        if index is not None and (not isinstance(index, int) or index < 0):
            raise ValueError(f"infinicore.device: index must be an integer of at least 0, got {index!r}")
        self.type = name
        self.index = index or 0
        self._device: _infinicore.Device | None = None

    @property
    def _underlying(self) -> _infinicore.Device:
        if self._device is None:
            self._device = self._to_infinicore_device(self.type, self.index)
        return self._device

    @staticmethod
    def _to_infinicore_device(type: str, index: int) -> _infinicore.Device:
        """Return the `_infinicore.Device` of a name and an index."""
        before = 0
        for kind in _TYPES[type]:
            count = _infinicore.get_device_count(kind)
            if index < before + count:
                return _infinicore.Device(kind, index - before)
            before += count
        raise DeviceNotFoundError(
            f'infinicore.device: there is no device "{type}:{index}": found {before} of type {type}'
        )

    @staticmethod
    def _from_infinicore_device(underlying: _infinicore.Device) -> device:
        """Return the device that has this name here."""
        before = 0
        for name, kinds in _TYPES.items():
            if underlying.type in kinds:
                for kind in kinds[: kinds.index(underlying.type)]:
                    before += _infinicore.get_device_count(kind)
                found = device(name, before + underlying.index)
                found._device = underlying
                return found
        raise ValueError(f"infinicore.device: {underlying} has no name here")

    def __reduce__(self) -> tuple[type[device], tuple[str, int]]:
        return device, (self.type, self.index)

    def __eq__(self, other: object) -> bool:
        return (self.type, self.index) == (other.type, other.index) if isinstance(other, device) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.type, self.index))

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device(type='{self.type}', index={self.index})"
