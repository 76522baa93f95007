"""ctypes bindings of libinfinirt and libinfiniop, with the tools that operator test scripts use.

Those scripts begin with `from torch_infini.compat.libinfiniop import *`. LIBINFINIOP combines both libraries; the tools
need numpy.
"""

from .datatypes import InfiniDtype, InfiniDtypeNames
from .devices import InfiniDeviceEnum, InfiniDeviceNames, infini_device_map, torch_device_map
from .liboperators import LIBINFINIOP, InfiniLib, open_lib
from .op_register import OpRegister
from .structs import (
    Handle,
    OpDescriptor,
    TensorDescriptor,
    infiniopHandle_t,
    infiniopOperatorDescriptor_t,
    infiniopTensorDescriptor_t,
)
from .utils import (
    CTensor,
    TestTensor,
    TestWorkspace,
    check_error,
    create_handle,
    debug,
    destroy_handle,
    get_args,
    get_sync_func,
    get_test_devices,
    get_tolerance,
    print_discrepancy,
    profile_operation,
    rearrange_tensor,
    synchronize_device,
    test_operator,
    timed_op,
    to_numpy_dtype,
    to_torch_dtype,
)

__all__ = [
    "LIBINFINIOP",
    "CTensor",
    "Handle",
    "InfiniDeviceEnum",
    "InfiniDeviceNames",
    "InfiniDtype",
    "InfiniDtypeNames",
    "InfiniLib",
    "OpDescriptor",
    "OpRegister",
    "TensorDescriptor",
    "TestTensor",
    "TestWorkspace",
    "check_error",
    "create_handle",
    "debug",
    "destroy_handle",
    "get_args",
    "get_sync_func",
    "get_test_devices",
    "get_tolerance",
    "infini_device_map",
    "infiniopHandle_t",
    "infiniopOperatorDescriptor_t",
    "infiniopTensorDescriptor_t",
    "open_lib",
    "print_discrepancy",
    "profile_operation",
    "rearrange_tensor",
    "synchronize_device",
    "test_operator",
    "timed_op",
    "to_numpy_dtype",
    "to_torch_dtype",
    "torch_device_map",
]
