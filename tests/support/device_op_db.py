"""torch's operator database on the device infini: results, gradients, out= and non-contiguous samples equal the CPU's.

    python tests/support/device_op_db.py --samples 8 --dtypes float32,bfloat16

Samples are made on the CPU; each is called there and, moved, on infini, after the same seed. tests/test_device_ops.py
runs it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

FORMS = ("forward", "backward", "out", "noncontiguous")
SEED = 1234

# Results whose elements are not defined: shapes, strides and dtypes count alone.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
UNINITIALIZED |= {"resize_as_"}

# What may differ from the CPU, by operator and form ("*": all): the reason.
HALVES = "torch adds halves up in float32 on devices that it knows by name, else in halves: pass acc_dtype."
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("nn.functional.linear_cross_entropy.chunked", "backward"): HALVES,
    ("nn.functional.linear_cross_entropy.chunked_none", "*"): HALVES,
    ("to_sparse", "*"): "The device has dense tensors only, and says so; unwrap(x) has all layouts.",
}


class Outcome(NamedTuple):
    """What came of one operator, dtype and form.

    Attributes:
        samples: How many were compared; the CPU refuses some, which do not count.
        error: The first difference; None where there is none.
        inexact: Samples whose bits differ within the dtype's tolerance.
    """

    op: str
    dtype: torch.dtype
    form: str
    samples: int
    error: str | None
    inexact: int

    @property
    def reason(self) -> str | None:
        """Why it may fail, where it may."""
        return EXCEPTIONS.get((self.op, self.form)) or EXCEPTIONS.get((self.op, "*"))


def moved(tree: Any) -> Any:
    """A sample's arguments on infini, each tensor with the strides and the offset that it has on the CPU."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return moved_tensor(leaf.detach()).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.device) and leaf.type == "cpu" or isinstance(leaf, str) and leaf == "cpu":
            return torch.device("infini")
        return leaf

    return pytree.tree_map(move, tree)


def moved_tensor(x: torch.Tensor) -> torch.Tensor:
    if x.layout != torch.strided or x.untyped_storage().nbytes() == x.nbytes and x.is_contiguous() and not x.is_conj():
        return x.to("infini")
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # as_strided may read what x does not
    y = whole.to("infini").as_strided(x.shape, x.stride(), x.storage_offset())
    return y.conj() if x.is_conj() else y


def copied(sample: SampleInput) -> Any:
    """Input, args and kwargs; tensors have memory of their own, with the same strides."""
    return copy.deepcopy(pytree.tree_map_only(torch.Tensor, detached, (sample.input, sample.args, sample.kwargs)))


def detached(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def difference(got: Any, want: Any, only_form: bool) -> str | None:
    """What is wrong with a result, "" where bits differ within the tolerance, None where all is equal."""
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(got) != len(want):
        return f"{len(want)} results must come, got {len(got)}"
    exact = True
    for one, other in zip(got, want, strict=True):
        if not isinstance(other, torch.Tensor):
            if type(one) is not type(other) or not (one == other or one != one and other != other):
                return f"{other!r} must come, got {one!r}"
            continue
        if not isinstance(one, torch.Tensor) or one.device.type != "infini":
            return f"a tensor on infini must come, got {getattr(one, 'device', one)}"
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return f"{other.dtype} {list(other.shape)} must come, got {one.dtype} {list(one.shape)}"
        if other.layout == torch.strided and one.stride() != other.stride():
            return f"strides {other.stride()} must come, got {one.stride()}"
        if only_form:
            continue
        here, there = one.detach().cpu(), other.detach()
        try:
            torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)
        except AssertionError:
            exact = False
            try:
                torch.testing.assert_close(here, there, equal_nan=True)
            except AssertionError as error:
                return " ".join(str(error).split())[:300]
    return None if exact else ""


def run_forward(op: OpInfo, sample: SampleInput) -> Any:
    torch.manual_seed(SEED)
    with torch.no_grad():
        return op(sample.input, *sample.args, **sample.kwargs)


def run_backward(op: OpInfo, sample: SampleInput) -> Any:
    """The gradients of the sum of all results, weighted so that no two elements have the same gradient."""
    torch.manual_seed(SEED)
    inputs = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    results = op(sample.input, *sample.args, **sample.kwargs)
    if sample.output_process_fn_grad is not None:
        results = sample.output_process_fn_grad(results)
    results = [t for t in tensors(results) if t.requires_grad]
    weights = [torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t.device, t.dtype) for t in results]
    return torch.autograd.grad(results, inputs, weights, allow_unused=True)


def run_out(op: OpInfo, sample: SampleInput) -> Any:
    """Write into tensors of the right shape, and into empty ones, which are resized."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected = op(sample.input, *sample.args, **sample.kwargs)
        single = isinstance(expected, torch.Tensor)
        if not tensors(expected) or any(not isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(expected)):
            raise NotImplementedError("no tensor comes")
        found = []
        for make in (torch.zeros_like, lambda t: t.new_empty(0)):
            out = [make(t) for t in tensors(expected)]
            torch.manual_seed(SEED)
            op(sample.input, *sample.args, **sample.kwargs, out=out[0] if single else tuple(out))
            found.append(out)
        return found


RUN: dict[str, Callable[[OpInfo, SampleInput], Any]] = {
    "forward": run_forward,
    "noncontiguous": run_forward,
    "backward": run_backward,
    "out": run_out,
}


def has_form(op: OpInfo, dtype: torch.dtype, form: str) -> bool:
    if form == "backward":
        return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    return op.supports_out if form == "out" else True


def compared(op: OpInfo, dtype: torch.dtype, form: str, count: int) -> Outcome:
    """Compare the first `count` samples of an operator; an exception that the CPU does not raise is a difference."""
    run, name, done, inexact = RUN[form], op.full_name, 0, 0
    only_form = op.name.rpartition(".")[2] in UNINITIALIZED
    torch.manual_seed(SEED)
    samples = op.sample_inputs("cpu", dtype, requires_grad=form == "backward")
    for sample in itertools.islice(samples, count):
        try:
            sample = sample.noncontiguous() if form == "noncontiguous" else sample
            arguments = copied(sample)  # an op may write into its arguments
            want = run(op, sample)
        except Exception:  # the sample does not fit this form
            continue
        done += 1
        try:
            input, args, kwargs = moved(arguments)
            there = SampleInput(input, args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad)
            found = difference(run(op, there), want, only_form)
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if found:
            return Outcome(name, dtype, form, done, f"sample {done}: {found}", inexact)
        inexact += found is not None
    return Outcome(name, dtype, form, done, None, inexact)


def walk(dtypes: Iterable[torch.dtype], count: int, forms: Sequence[str] = FORMS) -> Iterator[Outcome]:
    """What comes of every operator of the database that has the dtype and the form.

    Args:
        dtypes: Of the samples.
        count: Samples of each operator.
        forms: Of FORMS.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            for dtype in dtypes:
                if dtype in op.supported_dtypes("cpu"):
                    for form in forms:
                        if has_form(op, dtype, form):
                            outcome = compared(op, dtype, form, count)
                            if outcome.samples:
                                yield outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="of each operator (default: 8)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="with commas between")
    parser.add_argument("--forms", default=",".join(FORMS), help="with commas between (default: all)")
    parser.add_argument("--ops", help="names, with commas between (default: all)")
    options = parser.parse_args(argv)
    import torch_infini.device

    torch_infini.device.enable("cpu")
    if options.ops:
        op_db[:] = [op for op in op_db if op.full_name in options.ops.split(",")]
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    status = 0
    totals: dict[tuple[torch.dtype, str], list[Outcome]] = {}
    for outcome in walk(dtypes, options.samples, options.forms.split(",")):
        totals.setdefault((outcome.dtype, outcome.form), []).append(outcome)
        if outcome.error:
            status |= outcome.reason is None
            print(f"{outcome.op} {outcome.dtype} {outcome.form}: {outcome.reason or outcome.error}", flush=True)
    for (dtype, form), outcomes in totals.items():
        equal = sum(outcome.error is None for outcome in outcomes)
        inexact = sum(outcome.inexact > 0 for outcome in outcomes)
        samples = sum(outcome.samples for outcome in outcomes)
        print(
            f"{dtype} {form}: {equal} of {len(outcomes)} operators, {samples} samples, {inexact} equal but for rounding"
        )
        status |= equal < 0.99 * len(outcomes)
    return status


if __name__ == "__main__":
    sys.exit(main())
