"""OpSpec: what makes an op callable: schema, wrapper, fake and decomposition.

Each file of this folder whose name does not begin with an underscore describes one op by a public function with the
docstring and SPEC, an OpSpec; or a family of similar ops by their functions and SPECS. `register` makes
torch.ops.infini.<name> of each: adding an op means adding files. Reference, samples and benchmarks of an op are in
testing/ops.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _autograd
from ._inductor import add_missing_lowering

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def torch_release() -> tuple[int, int]:
    """Return (major, minor) of the running torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


_library = torch.library.Library("infini", "DEF")
_autograd.define(_library)


@dataclass(frozen=True)
class OpSpec:
    """One op, as it is registered and called. torch_infini.testing.OpInfo adds reference, samples and costs.

    Attributes:
        function: The public Python function; carries the documentation.
        fake: Takes the op's arguments and returns empty, contiguous outputs of the right shape and dtype.
        schema: Arguments and results in torch's syntax, without a name: "(Tensor x, float eps=1e-6) -> Tensor"; "":
            derived from the function. An op that writes into its arguments (a cache) marks them and returns nothing,
            "(Tensor(a!) cache, Tensor k) -> ()", on one line; it has neither an out form nor an in-place form.
        name: torch.ops.infini.<name>; "": the function's name.
        inplace: The argument that the in-place form `name_` overwrites with the result; None: no such form.
        decomposition: The functional form in aten ops, with the op's own rounding, for a compiler that may fuse them
            with neighbouring ops; takes the op's arguments. None: the op always stays a call.
        devices: The devices that the op has kernels for, whether or not this build has them.
        contiguous: The arguments that must be contiguous, because they have a special layout.
    """

    function: Callable[..., Any]
    fake: Callable[..., Any]
    schema: str = ""
    name: str = ""
    inplace: str | None = None
    decomposition: Callable[..., Any] | None = None
    devices: Sequence[str] = ("cpu", "cuda")
    contiguous: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.function.__name__)
        object.__setattr__(self, "schema", self.schema or schema_of(self.function))

    @property
    def op(self) -> torch._ops.OpOverload:
        """The functional overload, torch.ops.infini.<name>.default."""
        return getattr(torch.ops.infini, self.name).default

    @property
    def out(self) -> torch._ops.OpOverload:
        """The out overload, torch.ops.infini.<name>.out."""
        return getattr(torch.ops.infini, self.name).out

    @property
    def outputs(self) -> int:
        """The number of tensors that the op returns."""
        return self.schema.split("->")[1].count("Tensor")

    @property
    def out_names(self) -> list[str]:
        """The out overload's keyword arguments: out, or out0, out1, ...; none if the op writes into its arguments."""
        return ["out"] if self.outputs == 1 else [f"out{i}" for i in range(self.outputs)]

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments, in order."""
        parts = self.schema[1 : self.schema.index(") ->")].split(", ")
        return [part.split("=")[0].split()[-1] for part in parts if part != "*"]

    @property
    def mutates(self) -> list[str]:
        """The arguments that the op writes into."""
        return re.findall(r"Tensor\([a-z]!\)\?? (\w+)", self.schema)

    @property
    def backends(self) -> list[str]:
        """The devices that have a kernel in this build."""
        names = {"CPU": "cpu", "CUDA": "cuda"}
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [device for key, device in names.items() if has(f"infini::{self.name}", key)]


REGISTRY: dict[str, OpSpec] = {}
TYPES = {"Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool", "torch.dtype": "ScalarType"}


def schema_of(function: Callable[..., Any]) -> str:
    """Return the schema of a function's arguments (without out) and result, from their annotations."""
    arguments = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation.removesuffix(" | None")
        if name != "out":
            assert kind in TYPES, f"{function.__name__}: no type of a schema for {name}: {kind} (give the schema)"
            optional = "?" if kind != parameter.annotation else ""
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            arguments.append(f"{TYPES[kind]}{optional} {name}{default}")
    result = function.__annotations__["return"].replace("tuple[", "(").replace("]", ")")
    return f"({', '.join(arguments)}) -> {result}"


def like_first(x: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
    """Return the fake result of ops whose result has the shape and dtype of their first argument."""
    return x.new_empty(x.shape)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Return nothing: the fake of ops that write into their arguments."""


def out_schema(spec: OpSpec) -> str:
    """Return the schema of the out overload, from the functional one: outputs become keyword-only arguments."""
    arguments = spec.schema[1 : spec.schema.index(") ->")]
    marks = [f"Tensor({chr(ord('a') + i)}!)" for i in range(spec.outputs)]
    outs = ", ".join(f"{mark} {name}" for mark, name in zip(marks, spec.out_names, strict=True))
    separator = ", " if "*," in arguments else ", *, "
    result = marks[0] if spec.outputs == 1 else f"({', '.join(marks)})"
    return f"({arguments}{separator}{outs}) -> {result}"


def inplace_schema(spec: OpSpec) -> str:
    """Return the schema of the in-place form: the overwritten argument is marked, and nothing is returned."""
    marked, count = re.subn(rf"Tensor {spec.inplace}\b", f"Tensor(a!) {spec.inplace}", spec.schema)
    assert count == 1, f"{spec.name}: no argument Tensor {spec.inplace} in {spec.schema}"
    return f"{marked.split('->')[0]}-> ()"


def check_same_device(op: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raise unless all tensors are on the device of the first."""
    tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    for name, tensor in tensors[1:]:
        if tensor.device != tensors[0][1].device:
            raise RuntimeError(
                f"infini::{op}: {name} must be on the device of {tensors[0][0]}, {tensors[0][1].device}, "
                f"got {tensor.device}"
            )


def same_device(spec: OpSpec, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the fake in a check that all tensors are on one device.

    The dispatcher sends a call with a single meta tensor to the fake, which must not compute results for the other
    tensors.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        check_same_device(spec.name, [*zip(spec.arguments, args, strict=False), *kwargs.items()])
        return fake(*args, **kwargs)

    return checked


def writing(spec: OpSpec, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the fake of an op that writes into its arguments; a compiler calls it before any kernel.

    Kernels reject arguments that autograd tracks (csrc/torch/tensor.h); in compiled code only the fake can see those.
    """

    def prepared(*args: Any, **kwargs: Any) -> Any:
        _autograd.refuse_gradient(spec.name, zip(spec.arguments, args, strict=False))
        add_missing_lowering()
        return fake(*args, **kwargs)

    return prepared


def register(spec: OpSpec) -> None:
    """Define the op's overloads and their fakes. The library that is loaded afterwards registers the kernels."""
    assert spec.name not in REGISTRY, f"two descriptions of {spec.name}"
    assert bool(spec.mutates) != bool(spec.outputs), f"{spec.name} must either return tensors or write into arguments"
    _library.define(spec.name + spec.schema)
    fake = writing(spec, spec.fake) if spec.mutates else spec.fake
    torch.library.register_fake(f"infini::{spec.name}", same_device(spec, fake), lib=_library)
    REGISTRY[spec.name] = spec
    prepare(spec, spec.op, spec.mutates)
    if spec.mutates:
        return
    _autograd.trace(spec)
    # With this tag Inductor lets the out variant write into buffers that it has planned. torch 2.13 has the tag, but
    # fails on dynamic shapes (pytorch issue 185503). Of an op with several results that are not all used, Inductor of
    # 2.14 (and 2.15, by its source) passes buffers that it has removed (NameError: name 'buf77' is not defined).
    tags = (torch.Tag.out,) if spec.outputs == 1 and torch_release() >= (2, 14) else ()
    _library.define(f"{spec.name}.out{out_schema(spec)}", tags=tags)

    def fake_out(*args: Any, **kwargs: Any) -> Any:
        outs = tuple(kwargs[name] for name in spec.out_names)
        return outs[0] if len(outs) == 1 else outs

    fake_out = same_device(spec, writing(spec, fake_out))
    torch.library.register_fake(f"infini::{spec.name}.out", fake_out, lib=_library)
    prepare(spec, spec.out, [])
    _autograd.trace_out(spec)
    if spec.inplace:
        _library.define(f"{spec.name}_{inplace_schema(spec)}")
        fake_ = same_device(spec, writing(spec, lambda *args, **kwargs: None))
        torch.library.register_fake(f"infini::{spec.name}_", fake_, lib=_library)
        prepare(spec, getattr(torch.ops.infini, f"{spec.name}_").default, [spec.inplace])


def prepare(spec: OpSpec, op: torch._ops.OpOverload, written: list[str]) -> None:
    """Register what precedes an overload's kernels; `written`: arguments that it writes and does not return."""
    name = op._name.removeprefix("infini::")
    _library.impl(name, _autograd.refuse_transforms(spec, op), "FuncTorchDynamicLayerFrontMode", with_keyset=True)
    if written:
        _library.impl(name, _autograd.refuse_negated(spec, op, written), "Negative")
        _library.impl(name, torch.library.fallthrough_kernel, "Conjugate")  # the rules reject complex numbers


def all_ops() -> Iterator[OpSpec]:
    """Yield every registered op, by name."""
    return iter(sorted(REGISTRY.values(), key=lambda spec: spec.name))
