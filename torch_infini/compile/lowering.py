"""Makes Inductor call the out variants of infini ops on buffers that it plans and reuses.

Otherwise Inductor calls the functional ops, which allocate their results. From torch 2.14 on, a tag on the out variant
has the same effect (see ops/_registry.py); this module serves earlier releases, and the backend "infini" in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..ops import OpSpec, all_ops


@cache
def register() -> None:
    """Register the lowerings, once."""
    from torch._inductor.lowering import register_lowering

    for spec in all_ops():
        if spec.outputs == 1:
            register_lowering(spec.op, type_promotion_kind=None)(lowering(spec))


def lowering(spec: OpSpec) -> Callable[..., Any]:
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    functional = fallback_handler(spec.op, add_to_fallback_set=False)

    def lower(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(spec.arguments, args, strict=False)), **kwargs}
        tensors = []
        for name in spec.arguments:
            if not isinstance(values.get(name), ir.TensorBox):
                break
            tensors.append(values.pop(name))
        result = V.graph.current_node.meta["val"]
        later = any(isinstance(value, ir.IRNode) for value in values.values())
        # ExternKernelOut passes tensors first, and the C++ wrapper would need a declaration of the op.
        if later or V.graph.cpp_wrapper or not isinstance(result, torch.Tensor):
            return functional(*args, **kwargs)
        shape, strides = (convert_shape_to_inductor(n) for n in (result.shape, result.stride()))
        layout = ir.FixedLayout(result.device, result.dtype, shape, strides)
        node = ir.ExternKernelOut(
            layout=layout,
            inputs=[ir.ExternKernel.realize_input(tensor) for tensor in tensors],
            kwargs=values,
            python_kernel_name=f"torch.ops.infini.{spec.name}.out",
            op_overload=spec.out,
        )
        return ir.TensorBox.create(node)

    return lower
