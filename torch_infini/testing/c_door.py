"""c_op: describes an operator of the C ABI by the OpInfo of the torch op that runs the same kernel.

Samples, reference, tolerances and error messages are the OpInfo's, with the names of the C header. The caller adds what
only the C ABI has (negative strides, NULL, more dtypes).
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .c_ops import DTYPES, INTERFACE, TOLERANCES, CErrorCase, COp, CSample, Described, clone
from .layouts import LAYOUTS, relayout
from .op_info import ErrorCase, OpInfo, Sample

UNWRITTEN = 77  # the value of outputs before the call, so that elements that are not written show

Arguments = dict[str, Any]

# The status for a message, by its end or its rule; the first match counts.
_STATUSES = (
    (r"share no memory|infinit|finite number", "BAD_PARAM"),
    (r"got strides \[|broadcast view|stride 1|contiguous", "BAD_TENSOR_STRIDES"),
    (r"got (b?float\d+|u?int\d+|bool|complex\d+)$", "BAD_TENSOR_DTYPE"),
    (r"shape|dimensions|columns|rows|broadcast", "BAD_TENSOR_SHAPE"),
)


def status_of(message: str) -> str:
    """Return the status for a message, by its rule: shapes, dtypes or strides; otherwise BAD_PARAM."""
    return next((status for pattern, status in _STATUSES if re.search(pattern, message)), "BAD_PARAM")


def bound(info: OpInfo, case: Sample | ErrorCase) -> Arguments:
    """Return all arguments of a call of the torch op by name, including the schema's defaults."""
    given = dict(zip(info.arguments, case.args, strict=False)) | case.kwargs
    defaults = {a.name: a.default_value for a in info.op._schema.arguments if a.has_default_value()}
    return defaults | given


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an output as it is before the call."""
    return torch.full(tuple(shape), UNWRITTEN).to(dtype)


def renamed(names: Mapping[str, str], fixed: Mapping[str, Any], args: Arguments) -> Arguments | None:
    """Return the arguments under the header's names, without the fixed ones; None if a fixed one has another value."""
    if any(args[name] != value for name, value in fixed.items()):
        return None
    return {names.get(name, name): value for name, value in args.items() if name not in fixed}


def reworded(words: Mapping[str, str], message: str) -> str:
    """Return the message with each of these words replaced."""
    names = "|".join(map(re.escape, words))
    return re.sub(rf"\b({names})\b", lambda found: words[found[0]], message) if words else message


def backwards(tensor: Tensor) -> Described:
    """Return the same elements with the first dimension stored in reverse: a negative stride."""
    base = tensor.flip(0).contiguous()
    strides = (-base.stride(0), *base.stride()[1:])
    return Described(base, tuple(base.shape), strides, (base.shape[0] - 1) * base.stride(0))


def sizes(sample: CSample) -> list[int]:
    """Return the number of elements of each tensor."""
    return [value.numel() for value in sample.args.values() if isinstance(value, Tensor)]


def has_several(sample: CSample) -> bool:
    """Return whether each tensor with dimensions has several elements."""
    return min((v.numel() for v in sample.args.values() if isinstance(v, Tensor) and v.dim()), default=1) > 1


def all_but(*names: str) -> Callable[[ErrorCase], bool]:
    """Return a `refuses` for c_op that accepts every error case except those of these names."""
    return lambda case: case.name not in names


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def c_op(
    info: OpInfo,
    name: str,
    outputs: Sequence[str],
    names: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    *,
    samples: Callable[[], Iterable[Sample | CSample]] = tuple,
    errors: Callable[[], Iterable[CErrorCase]] = tuple,
    to_c: Callable[[Arguments], Arguments | None] | None = None,
    to_torch: Callable[[Arguments], Arguments] | None = None,
    statuses: Mapping[str, str] | None = None,
    refuses: Callable[[ErrorCase], bool] = lambda case: True,
    words: Mapping[str, str] | None = None,
    updates: Sequence[str] = (),
    reference: Callable[..., dict[str, Tensor]] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    largest: float = math.inf,
    reversible: Sequence[str] = (),
    variants: Callable[[Arguments], Iterable[tuple[str, Arguments]]] | None = None,
    varied: Callable[[torch.dtype], Iterable[Sample]] | None = None,
    **more: Any,
) -> COp:
    """Derive the description of infiniop<name>.

    Args:
        info: The torch op's.
        name: As in infiniopCreate<name>Descriptor.
        outputs: The header's names of the outputs, in the order of the torch op's results.
        names: The header's name for each argument of the torch op that has another name there.
        fixed: Arguments that the C operator lacks, with the value that it uses. Samples and error cases with another
            value are skipped.
        samples: Calls besides those of `info`: a Sample of the torch op's arguments (for example of a dtype that only
            the C operator supports), or a CSample for what torch cannot express (negative strides, an output's layout).
        errors: Calls besides those of `info` that only the C ABI can reject.
        to_c, to_torch: Instead of `names` and `fixed`, if arguments differ in more than their names: convert the torch
            op's arguments, all by name, to the C operator's inputs (None: it has no such call), and back. The inputs
            may include all outputs, if they differ from the torch op's.
        statuses: The status of an error case, by its name, if `status_of` is wrong about it.
        refuses: Which of the torch op's error cases the C operator rejects with the same message.
        words: Words of the torch op's messages that the C operator replaces: {"out": "y"}.
        updates: The outputs that the op reads before it writes them; `to_c` provides them. All outputs, if the torch op
            writes into its arguments.
        reference: Replaces the torch op's reference and comparison if the results differ.
        dtypes: The dtypes that samples are made for, if not those of `info`.
        largest: The most elements of a tensor; larger samples of `info` are skipped, to save time.
        reversible: The header's names of tensors whose first dimension may have a negative stride: one call per dtype
            has all of them so.
        variants: Takes the C operator's arguments of a call, returns further named calls: other strides, NULL.
        varied: For a dtype, the calls to vary. By default the first sample with several elements.
        more: Further fields of COp.
    """
    names, fixed, statuses, words = names or {}, fixed or {}, statuses or {}, words or {}
    assert {*names, *fixed} <= set(info.arguments), f"{info.name} lacks arguments of {[*names, *fixed]}"
    back = {c_name: torch_name for torch_name, c_name in names.items()}
    forward = to_c or (lambda args: renamed(names, fixed, args))
    backward = to_torch or (lambda args: {back.get(key, key): value for key, value in args.items()} | dict(fixed))

    create, run = (INTERFACE.functions[f"infiniop{function}"] for function in (f"Create{name}Descriptor", name))
    ints = {argument.name for argument in (*create.arguments, *run.arguments) if argument.type == "int"}
    described = {argument.name.removesuffix("_desc") for argument in create.arguments}
    tolerances = {**TOLERANCES, **info.tolerances}
    read = set(outputs if info.mutates else updates)

    def inputs_of(args: Arguments) -> Arguments:
        return backward({key: value for key, value in args.items() if key not in outputs or key in read})

    def can_be_stated(key: str, value: Any) -> bool:
        """Return whether the C ABI can take the value: host memory, and dtypes and numbers that it has."""
        if isinstance(value, Tensor):
            return value.device.type == "cpu" and value.dtype in DTYPES
        if isinstance(value, float):
            return math.isfinite(ctypes.c_float(value).value) == math.isfinite(value)
        return key not in ints or ctypes.c_int(value).value == value

    def to_state(args: Arguments) -> Arguments | None:
        """Return the C operator's inputs; None if it has no such call."""
        inputs = forward(dict(args))
        return inputs if inputs is not None and all(can_be_stated(*item) for item in inputs.items()) else None

    def of_torch(**args: Any) -> dict[str, Tensor]:
        return dict(zip(outputs, as_tuple(info.reference(**inputs_of(args))), strict=True))

    def results(args: Arguments, inputs: Arguments) -> Arguments:
        if inputs.keys() >= set(outputs):
            return {}
        made = as_tuple(info.fake(*(args[name] for name in info.arguments)))
        return {key: unwritten(like.shape, like.dtype) for key, like in zip(outputs, made, strict=True)}

    def called(sample: Sample, label: str, tolerance: tuple[float, float] | None) -> CSample | None:
        args = bound(info, sample)
        inputs = to_state(args)
        return None if inputs is None else CSample(label, results(args, inputs) | inputs, tolerance)

    def calls_of(made: Iterable[Sample], label: str, tolerance: tuple[float, float] | None) -> list[CSample]:
        calls = (called(sample, f"{label} {sample.name}".strip(), tolerance) for sample in made)
        return [call for call in calls if call is not None]

    def further(usual: Arguments) -> Iterator[tuple[str, Arguments]]:
        """Yield the call in every layout that each op supports, and in place."""
        # Tensors without a descriptor have the layout that the header states.
        dense = {names.get(argument, argument) for argument in info.contiguous} | usual.keys() - described
        for layout in (name for name, (_, must_serve) in LAYOUTS.items() if must_serve):
            yield layout, {k: v if k in dense else relayout(layout, v) for k, v in usual.items()}
        if info.inplace is not None:
            yield "in place", {**usual, outputs[0]: usual[names.get(info.inplace, info.inplace)]}
        if reversible:
            yield "negative strides", {**usual, **{key: backwards(usual[key]) for key in reversible if key in usual}}

    def derived(dtype: torch.dtype) -> Iterator[CSample]:
        label, tolerance = str(dtype).removeprefix("torch."), tolerances.get(dtype)
        calls = [call for call in calls_of(info.samples(dtype), label, tolerance) if max(sizes(call)) <= largest]
        usual = next(call for call in calls if has_several(call))
        further_calls: list[CSample] = []  # created before any call writes its results
        bases = [usual] if varied is None else calls_of(varied(dtype), label, tolerance)
        for base, vary in [(usual, further)] + [(base, variants) for base in bases if variants is not None]:
            start = label if base is usual else base.name
            for what, args in vary(dict(base.args)):
                further_calls.append(CSample(f"{start} {what}", clone(args), tolerance))
        yield from calls
        yield from further_calls

    def all_samples() -> Iterator[CSample]:
        for dtype in dtypes or info.dtypes:
            yield from derived(dtype)
        for sample in samples():
            made = sample if isinstance(sample, CSample) else called(sample, sample.name, None)
            assert made is not None, f"{name} has no call {sample.name}"
            yield made

    def all_errors() -> Iterator[CErrorCase]:
        valid = next(iter(info.samples(info.dtypes[0])))
        for case in filter(refuses, info.errors()):
            args = bound(info, case)
            outs = {c_name: args.pop(out) for c_name, out in zip(outputs, info.out_names, strict=False) if out in args}
            inputs = to_state(args)
            if inputs is None or not all(can_be_stated(*item) for item in outs.items()):
                continue
            try:
                usual = results(args, inputs)
            except (RuntimeError, IndexError, ZeroDivisionError):  # the fake needs an argument that the call lacks
                usual = results(bound(info, valid), inputs)
            at = "run" if case.of_values or "share no memory" in case.message else "create"
            status = statuses.get(case.name) or ("BAD_PARAM" if case.of_values else status_of(case.message))
            message = reworded(words, case.message)
            yield CErrorCase(case.name, usual | inputs | outs, status, message, at, case.of_values)
        yield from errors()

    def ordered(args: Arguments) -> tuple[Any, ...]:
        by_name = inputs_of(args)
        return tuple(by_name[argument] for argument in info.arguments)

    if info.compare is not None and reference is None:
        comparison = info.compare

        def compare(sample: CSample, written: dict[str, Tensor]) -> None:
            actual = tuple(written[key] for key in outputs)
            comparison(actual if len(actual) > 1 else actual[0], Sample(sample.name, ordered(dict(sample.args))))

        more.setdefault("compare", compare)
    if info.cuda_slack is not None:
        of_cuda = info.cuda_slack
        more.setdefault("cuda_slack", lambda expected, args: of_cuda(*expected.values(), *ordered(args)))
    more.setdefault("tolerances", tolerances)
    return COp(name, outputs, reference or of_torch, all_samples, all_errors, **more)
