"""InfiniDeviceEnum: the device types of the C ABI (infiniDevice_t), their names, and torch's names for them."""

from enum import IntEnum


class InfiniDeviceEnum(IntEnum):
    """infiniDevice_t."""

    CPU = 0
    NVIDIA = 1
    CAMBRICON = 2
    ASCEND = 3
    METAX = 4
    MOORE = 5
    ILUVATAR = 6
    KUNLUN = 7
    HYGON = 8
    QY = 9


InfiniDeviceNames: dict[InfiniDeviceEnum, str] = {
    device: device.name if device.name in ("CPU", "NVIDIA", "QY") else device.name.title()
    for device in InfiniDeviceEnum
}

# Several vendors are "cuda" in torch; the inverse map returns the first of them.
torch_device_map: dict[InfiniDeviceEnum, str] = dict.fromkeys(InfiniDeviceEnum, "cuda") | {
    InfiniDeviceEnum.CPU: "cpu",
    InfiniDeviceEnum.CAMBRICON: "mlu",
    InfiniDeviceEnum.ASCEND: "npu",
    InfiniDeviceEnum.MOORE: "musa",
}
infini_device_map: dict[str, InfiniDeviceEnum] = {
    torch_device: device for device, torch_device in reversed(torch_device_map.items())
}
