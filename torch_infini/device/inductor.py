"""Inductor on device infini backed by the CPU: C++ code generation that uses infini's memory directly.

Importing Inductor takes seconds, so torch.infini provides these classes when torch first compiles and looks them up by
name. Only this file uses torch's private modules.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

from .._core.devices import INFINI, backing_type
from .._core.import_hooks import after_import

# The names that torch._inductor.codegen.common looks up in torch.infini, once per process.
NAMES = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


def codegen(name: str) -> Any:
    """Return the class of one of NAMES, for torch.infini.

    Raises:
        AttributeError: If infini is not in the CPU's memory; Inductor then reports an unknown device.
    """
    if name not in NAMES or backing_type(INFINI) != "cpu":
        raise AttributeError(f"module 'torch.infini' has no attribute {name!r}")
    return _classes()[name]


@cache
def _classes() -> dict[str, Any]:
    """Make Inductor's classes for infini."""
    from torch._inductor import scheduler
    from torch._inductor.codegen import common, cpp, wrapper, wrapper_fxir
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.virtualized import V

    class Scheduling(cpp.CppScheduling):
        """C++ code for loops over infini's memory. torch looks up the code generator by the device's name."""

        def codegen_node(self, node: Any) -> None:
            with V.graph.set_current_device(torch.device("cpu")):
                super().codegen_node(node)

        def codegen_template(self, *args: Any, **kwargs: Any) -> Any:
            with V.graph.set_current_device(torch.device("cpu")):
                return super().codegen_template(*args, **kwargs)

    class Calls(wrapper.PythonWrapperCodegen):
        """Python code that allocates on infini and calls the C++ code as for the CPU."""

        @staticmethod
        def create(is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None) -> Any:
            return SubgraphCalls(subgraph_name, parent_wrapper, partition_signatures) if is_subgraph else Calls()  # type: ignore[no-untyped-call]

        def _generate_kernel_call_helper(self, *args: Any, **kwargs: Any) -> None:
            super()._generate_kernel_call_helper(*args, **{**kwargs, "device": torch.device("cpu")})

    class SubgraphCalls(Calls, wrapper.SubgraphPythonWrapperCodegen):
        """The same for a graph nested in a graph."""

    # The scheduler fuses loops in the way that suits C++ code if a node is a CPU node.
    of_cpu = scheduler.BaseSchedulerNode.is_cpu

    def is_cpu(node: Any) -> bool:
        device = node.get_device()
        return of_cpu(node) or (device is not None and device.type == INFINI)

    scheduler.BaseSchedulerNode.is_cpu = is_cpu  # type: ignore[method-assign, assignment]
    common.register_device_op_overrides(INFINI, CpuDeviceOpOverrides())
    return {
        "Scheduling": Scheduling,
        "PythonWrapperCodegen": Calls,
        "CppWrapperCodegen": NoCppWrapper,
        "WrapperFxCodegen": wrapper_fxir.WrapperFxCodegen,
    }


class NoCppWrapper:
    """Replaces Inductor's C++ wrapper, which knows only torch's devices."""

    supports_caching = True

    @staticmethod
    def create(*_: Any) -> Any:
        raise NotImplementedError(
            "infini: Inductor must write its wrapper in Python, got cpp_wrapper=True or an AOTInductor package (export "
            "the model on the CPU for one)"
        )


def register() -> None:
    """Register the device with Dynamo: at once if Dynamo has been imported, otherwise when it is."""
    after_import("torch._dynamo.device_interface", _add_interface)


def _add_interface(module: ModuleType) -> None:
    """Register the functions that compiled code uses for the device's streams and memory."""
    device_module = torch.get_device_module(INFINI)

    class InfiniInterface(module.DeviceInterface):  # type: ignore[name-defined, misc]
        device = device_module.device
        Event = torch.Event
        Stream = torch.Stream

        class Worker:
            """Compilation in other processes, which use no device."""

            set_device = staticmethod(device_module.set_device)
            current_device = staticmethod(device_module.current_device)

            @staticmethod
            def get_device_properties(device: Any = None) -> Any:
                return module.CpuInterface.Worker.get_device_properties("cpu")

        current_device = staticmethod(device_module.current_device)
        set_device = staticmethod(device_module.set_device)
        device_count = staticmethod(device_module.device_count)
        is_available = staticmethod(device_module.is_available)
        stream = staticmethod(device_module.stream)
        current_stream = staticmethod(device_module.current_stream)
        synchronize = staticmethod(device_module.synchronize)
        memory_allocated = staticmethod(device_module.memory_allocated)

        @staticmethod
        def set_stream(stream: Any) -> None:
            torch.accelerator.set_stream(stream)

        @staticmethod
        def get_raw_stream(_: int) -> int:
            return 0  # C++ code for the CPU runs in the calling thread

        @classmethod
        def exchange_device(cls, index: int) -> int:
            before: int = cls.current_device()
            cls.set_device(index)
            return before

        @classmethod
        def maybe_exchange_device(cls, index: int) -> int:
            return cls.exchange_device(index) if index >= 0 else cls.current_device()

        @staticmethod
        def get_compute_capability(_: Any = None) -> str:
            return ""

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

    module.register_interface_for_device(INFINI, InfiniInterface)
    for index in range(device_module.device_count()):
        module.register_interface_for_device(f"{INFINI}:{index}", InfiniInterface)
