"""DLPack for infini tensors: torch looks a device up by the name that it had before it was renamed."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import DLDeviceType


def install() -> None:
    """Make Tensor.__dlpack_device__ and Tensor.__dlpack__ support infini.

    An infini tensor has DLPack's device type kDLExtDev, which torch.from_dlpack() imports as infini. A consumer that
    asks for the CPU (numpy.from_dlpack(x, device="cpu")) gets the memory of the backing CPU without a copy.
    """
    of_torch, capsule_of_torch = Tensor.__dlpack_device__, Tensor.__dlpack__

    def device(self: Tensor) -> tuple[IntEnum, int]:
        if self.device.type == "infini":
            return DLDeviceType.kDLExtDev, self.device.index or 0
        return of_torch(self)

    def capsule(self: Tensor, **options: Any) -> Any:
        if self.device.type != "infini":
            return capsule_of_torch(self, **options)
        wanted = options.get("dl_device")
        if wanted is not None and tuple(wanted) != device(self):
            return torch.ops.infini_device.unwrap(self).__dlpack__(**options)
        if self.requires_grad or self.is_conj():  # torch's own errors
            return capsule_of_torch(self, **options)
        tensor = self.clone() if options.get("copy") else self
        return torch.utils.dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]

    Tensor.__dlpack_device__ = device  # type: ignore[method-assign]
    Tensor.__dlpack__ = capsule  # type: ignore[method-assign]
