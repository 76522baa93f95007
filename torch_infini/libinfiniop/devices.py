"""InfiniDeviceEnum: the device types of the C ABI (infiniDevice_t), their names, and what torch calls them."""

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
    InfiniDeviceEnum.CPU: "CPU",
    InfiniDeviceEnum.NVIDIA: "NVIDIA",
    InfiniDeviceEnum.CAMBRICON: "Cambricon",
    InfiniDeviceEnum.ASCEND: "Ascend",
    InfiniDeviceEnum.METAX: "Metax",
    InfiniDeviceEnum.MOORE: "Moore",
    InfiniDeviceEnum.ILUVATAR: "Iluvatar",
    InfiniDeviceEnum.KUNLUN: "Kunlun",
    InfiniDeviceEnum.HYGON: "Hygon",
    InfiniDeviceEnum.QY: "QY",
}

# Several vendors answer to "cuda" in torch; the way back leads to the first of them.
torch_device_map: dict[InfiniDeviceEnum, str] = {
    InfiniDeviceEnum.CPU: "cpu",
    InfiniDeviceEnum.NVIDIA: "cuda",
    InfiniDeviceEnum.CAMBRICON: "mlu",
    InfiniDeviceEnum.ASCEND: "npu",
    InfiniDeviceEnum.METAX: "cuda",
    InfiniDeviceEnum.MOORE: "musa",
    InfiniDeviceEnum.ILUVATAR: "cuda",
    InfiniDeviceEnum.KUNLUN: "cuda",
    InfiniDeviceEnum.HYGON: "cuda",
    InfiniDeviceEnum.QY: "cuda",
}
infini_device_map: dict[str, InfiniDeviceEnum] = {
    torch_device: device for device, torch_device in reversed(torch_device_map.items())
}
