"""The C ABI's structures for ctypes: handles and operator descriptors begin with their device; the rest is opaque."""

from ctypes import POINTER, Structure, c_int


class TensorDescriptor(Structure):
    """struct InfiniopTensorDescriptor."""

    _fields_ = []


class Handle(Structure):
    """struct InfiniopHandle."""

    _fields_ = [("device", c_int), ("device_id", c_int)]


class OpDescriptor(Structure):
    """struct InfiniopDescriptor."""

    _fields_ = [("device", c_int), ("device_id", c_int)]


infiniopTensorDescriptor_t = POINTER(TensorDescriptor)
infiniopHandle_t = POINTER(Handle)
infiniopOperatorDescriptor_t = POINTER(OpDescriptor)
