"""Test classes in the manner of torch's own, instantiated for the device infini by instantiate_device_type_tests.

torch lists the devices that it makes classes for when common_device_type is imported: infini is enabled before that, as
in any file of such tests. tests/test_device_types.py runs the classes in a process of their own.
"""

from __future__ import annotations

import io
import unittest
from typing import Any

import torch

import torch_infini.device

torch_infini.device.enable("cpu")

from torch.testing import make_tensor  # noqa: E402
from torch.testing._internal.common_device_type import (  # noqa: E402
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
    onlyNativeDeviceTypes,
    ops,
)
from torch.testing._internal.common_dtype import all_types_and_complex_and  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_utils import TestCase  # noqa: E402

DTYPES = all_types_and_complex_and(torch.half, torch.bfloat16, torch.bool)
OPS = [
    op
    for op in op_db
    if op.full_name in ("add", "matmul", "softmax", "sort", "linalg.svd", "nn.functional.gelu", "sum")
]
assert len(OPS) == 7, OPS


class TestOnDevice(TestCase):
    """Becomes a test class for each device; `device` is its string, such as infini:0."""

    def test_device(self, device: str) -> None:
        self.assertEqual(torch.device(device).type, "infini")
        self.assertEqual(torch.ones(2, device=device).device.type, "infini")

    @dtypes(*DTYPES)
    def test_round_trip(self, device: str, dtype: torch.dtype) -> None:
        x = make_tensor((5, 7), device="cpu", dtype=dtype)
        self.assertEqual(x.to(device).cpu(), x, rtol=0, atol=0)
        self.assertEqual(x.to(device).t().contiguous().cpu(), x.t(), rtol=0, atol=0)
        self.assertEqual(x.to(device)[::2, 1:].clone().cpu(), x[::2, 1:], rtol=0, atol=0)

    @dtypes(*DTYPES)
    def test_made_on_the_device(self, device: str, dtype: torch.dtype) -> None:
        x = make_tensor((3, 4), device=device, dtype=dtype, noncontiguous=True)
        self.assertFalse(x.is_contiguous())
        self.assertEqual(x.clone(), x, rtol=0, atol=0)
        self.assertEqual(torch.stack([x, x])[1], x, rtol=0, atol=0)
        self.assertEqual(torch.where(x == x, x, x).cpu(), x.cpu(), rtol=0, atol=0)

    @dtypes(torch.float, torch.double, torch.bfloat16)
    def test_large_odd_empty(self, device: str, dtype: torch.dtype) -> None:
        for shape in ((0,), (1,), (3, 0, 2), (1031,), (17, 513), (1 << 20,)):
            x = make_tensor(shape, device="cpu", dtype=dtype)
            self.assertEqual((x.to(device) * 2 - 1).cpu(), x * 2 - 1, rtol=0, atol=0)
            self.assertEqual(x.to(device).sum().cpu(), x.sum(), rtol=0, atol=0)

    @onlyNativeDeviceTypes
    def test_counts_as_native(self, device: str) -> None:
        self.assertEqual(torch.zeros(3, device=device).sum().item(), 0)

    @deviceCountAtLeast(1)
    def test_devices(self, devices: list[str]) -> None:
        self.assertTrue(all(torch.device(device).type == "infini" for device in devices))

    @ops(OPS, allowed_dtypes=(torch.float,))
    def test_op(self, device: str, dtype: torch.dtype, op: Any) -> None:
        """Samples that are made on the device, not moved there."""
        for sample in op.sample_inputs(device, dtype):
            there = sample.transform(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)
            got = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(got, op(there.input, *there.args, **there.kwargs), exact_device=False)


class TestWrong(TestCase):
    """Fails, which shows that the classes can."""

    def test_one(self, device: str) -> None:
        self.assertEqual(torch.ones(2, device=device), torch.zeros(2, device=device))


instantiate_device_type_tests(TestOnDevice, globals(), only_for="infini")
instantiate_device_type_tests(TestWrong, globals(), only_for="infini")


def run(name: str) -> tuple[int, int, list[str]]:
    """The tests that ran, those that were skipped, and what failed in a class."""
    (case,) = (value for key, value in globals().items() if key.startswith(name))  # a suffix names the device
    suite = unittest.TestLoader().loadTestsFromTestCase(case)
    result = unittest.TextTestRunner(io.StringIO()).run(suite)
    return result.testsRun, len(result.skipped), [text for _, text in result.errors + result.failures]
