"""Test classes in the manner of torch's own, instantiated for the device infini by instantiate_device_type_tests."""

from __future__ import annotations

import io
import unittest
from typing import Any

import pytest
import torch
from torch.testing import make_tensor
from torch.testing._internal.common_device_type import (
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
    onlyNativeDeviceTypes,
    ops,
)
from torch.testing._internal.common_dtype import all_types_and_complex_and
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase

pytestmark = pytest.mark.usefixtures("infini")
DTYPES = all_types_and_complex_and(torch.half, torch.bfloat16, torch.bool)
OPS = [
    op
    for op in op_db
    if op.full_name in ("add", "matmul", "softmax", "sort", "linalg.svd", "nn.functional.gelu", "sum")
]
assert len(OPS) == 7, OPS


class OnDevice:
    """Becomes a test class for each device; `device` is its string, such as infini:0."""

    def test_device(self: Any, device: str) -> None:
        self.assertEqual(torch.device(device).type, "infini")
        self.assertEqual(torch.ones(2, device=device).device.type, "infini")

    @dtypes(*DTYPES)
    def test_round_trip(self: Any, device: str, dtype: torch.dtype) -> None:
        x = make_tensor((5, 7), device="cpu", dtype=dtype)
        self.assertEqual(x.to(device).cpu(), x, rtol=0, atol=0)
        self.assertEqual(x.to(device).t().contiguous().cpu(), x.t(), rtol=0, atol=0)
        self.assertEqual(x.to(device)[::2, 1:].clone().cpu(), x[::2, 1:], rtol=0, atol=0)

    @dtypes(*DTYPES)
    def test_made_on_the_device(self: Any, device: str, dtype: torch.dtype) -> None:
        x = make_tensor((3, 4), device=device, dtype=dtype, noncontiguous=True)
        self.assertFalse(x.is_contiguous())
        self.assertEqual(x.clone(), x, rtol=0, atol=0)
        self.assertEqual(torch.stack([x, x])[1], x, rtol=0, atol=0)
        self.assertEqual(torch.where(x == x, x, 0).cpu(), x.cpu(), rtol=0, atol=0)

    @dtypes(torch.float, torch.double, torch.bfloat16)
    def test_large_odd_empty(self: Any, device: str, dtype: torch.dtype) -> None:
        for shape in ((0,), (1,), (3, 0, 2), (1031,), (17, 513), (1 << 20,)):
            x = make_tensor(shape, device="cpu", dtype=dtype)
            self.assertEqual((x.to(device) * 2 - 1).cpu(), x * 2 - 1, rtol=0, atol=0)
            self.assertEqual(x.to(device).sum().cpu(), x.sum(), rtol=0, atol=0)

    @onlyNativeDeviceTypes
    def test_counts_as_native(self: Any, device: str) -> None:
        self.assertEqual(torch.zeros(3, device=device).sum().item(), 0)

    @deviceCountAtLeast(1)
    def test_devices(self: Any, devices: list[str]) -> None:
        self.assertTrue(all(torch.device(device).type == "infini" for device in devices))

    @ops(OPS, allowed_dtypes=(torch.float,))
    def test_op(self: Any, device: str, dtype: torch.dtype, op: Any) -> None:
        """Samples that are made on the device, not moved there."""
        for sample in op.sample_inputs(device, dtype):
            there = sample.transform(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)
            got = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(got, op(there.input, *there.args, **there.kwargs), exact_device=False)


def run(case: type[unittest.TestCase]) -> unittest.TestResult:
    suite = unittest.TestLoader().loadTestsFromTestCase(case)
    return unittest.TextTestRunner(io.StringIO()).run(suite)


def instantiated(generic: type) -> type[unittest.TestCase]:
    """The class that torch makes of a generic one for infini; it needs the device at this moment."""
    body = {name: value for name, value in vars(generic).items() if not name.startswith("__")}
    scope: dict[str, Any] = {generic.__name__: type(generic.__name__, (TestCase,), {**body, "__module__": __name__})}
    instantiate_device_type_tests(scope[generic.__name__], scope, only_for=("infini", "privateuse1"))
    made = [value for name, value in scope.items() if isinstance(value, type) and issubclass(value, TestCase)]
    assert len(made) == 1, f"torch must make a class for infini alone, got {made}"
    return made[0]


def test_classes() -> None:
    result = run(instantiated(OnDevice))
    assert result.testsRun >= 2 * len(DTYPES) + 3 + len(OPS) + 3
    assert not result.skipped and not result.errors and not result.failures, (result.errors + result.failures)[:1]


def test_a_wrong_class_fails() -> None:
    class Wrong:
        def test_one(self: Any, device: str) -> None:
            self.assertEqual(torch.ones(2, device=device), torch.zeros(2, device=device))

    result = run(instantiated(Wrong))
    assert (result.testsRun, len(result.failures)) == (1, 1)
