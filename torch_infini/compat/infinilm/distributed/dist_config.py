"""DistConfig: the devices of a tensor-parallel model. On the CPU they are processes."""

from __future__ import annotations

from collections.abc import Sequence


class DistConfig:
    """The devices of a tensor-parallel model: DistConfig(), DistConfig(4), DistConfig([0, 2]) or by the names below.

    Args:
        tp_size: The number of devices, 0 to tp_size - 1; as a positional argument also a list of devices.
        tp_device_ids: The devices' numbers; at most one of the two may be given. Neither: [0].

    Attributes:
        tp_device_ids: The devices' numbers; can be set.

    Raises:
        TypeError: For arguments that are no integers.
        ValueError: For fewer than one device, a duplicate device, a number below 0, or both arguments.
    """

    def __init__(self, tp_size: int | Sequence[int] | None = None, tp_device_ids: Sequence[int] | None = None) -> None:
        if tp_size is not None and tp_device_ids is not None:
            raise ValueError(f"{_NAME}: tp_device_ids must be None where tp_size is given, got both")
        if tp_size is None:
            self.tp_device_ids = [0] if tp_device_ids is None else list(tp_device_ids)
        elif isinstance(tp_size, int) and not isinstance(tp_size, bool):
            if tp_size < 1:
                raise ValueError(f"{_NAME}: tp_size must be at least 1, got {tp_size}")
            self.tp_device_ids = list(range(tp_size))
        elif isinstance(tp_size, Sequence) and not isinstance(tp_size, str):
            self.tp_device_ids = list(tp_size)
        else:
            raise TypeError(f"{_NAME}: tp_size must be an integer or a list of devices, got {tp_size!r}")
        ids = self.tp_device_ids
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise TypeError(f"{_NAME}: tp_device_ids must be integers, got {ids}")
        if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
            raise ValueError(f"{_NAME}: tp_device_ids must be different devices, at least one, from 0 on, got {ids}")

    def __getattr__(self, name: str) -> DistConfig:
        # Scripts pass `distributed_config._underlying` on. Not a property, which a subclass could not set.
        if name == "_underlying":
            return self
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"DistConfig(tp_device_ids={self.tp_device_ids})"


_NAME = "infinilm.DistConfig"
