"""torch's operator database on infini, in float32 and bfloat16: tests/support/device_op_db.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from support import device_op_db
from support.device_op_db import EXCEPTIONS, FORMS, compared, op_db

pytestmark = pytest.mark.usefixtures("infini")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operators(dtype: str) -> None:
    """The whole database, in a process of its own: under pytest it takes five times as long."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", device_op_db.__file__, "--dtypes", dtype], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.findall(r"(\d+) of (\d+) operators, (\d+) samples", done.stdout)
    assert len(found) == len(FORMS)
    for equal, operators, samples in (map(int, numbers) for numbers in found):
        assert equal >= 0.99 * operators and operators > 200 and samples > 1000


def test_exceptions_are_needed() -> None:
    """Each exception names an operator of the database that does fail."""
    ops = {op.full_name: op for op in op_db}
    for (name, form), reason in EXCEPTIONS.items():
        assert reason.endswith(".") and name in ops, name
        forms = FORMS if form == "*" else (form,)
        outcomes = [
            compared(ops[name], dtype, one, 8)
            for dtype in (torch.float32, torch.bfloat16)
            for one in forms
            if device_op_db.has_form(ops[name], dtype, one)
        ]
        assert any(outcome.error for outcome in outcomes), f"{name} {form} is as on the CPU: drop the exception"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (lambda x: [x + 1e-3], lambda x: [x]),
        (lambda x: [x.double()], lambda x: [x]),
        (lambda x: [x.t()], lambda x: [x]),
        (lambda x: [x.cpu()], lambda x: [x]),
        (lambda x: [x, x], lambda x: [x]),
        (lambda x: [x.sum().item()], lambda x: [x]),
        (lambda x: [2], lambda x: [3]),
    ],
)
def test_differences_are_found(got: object, want: object) -> None:
    assert callable(got) and callable(want)
    x = torch.randn(3, 3)
    assert device_op_db.difference(got(x.to("infini")), want(x), False)
    assert device_op_db.difference([x.to("infini")], [x], False) is None
