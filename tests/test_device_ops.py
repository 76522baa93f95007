"""A sample of each operator of torch's database on infini, half of them in float32 and half in bfloat16.

make test-device-ops takes all samples in both.
"""

from __future__ import annotations

import device_op_db
import pytest
import torch
from device_op_db import EXCEPTIONS, FORMS, compared, op_db, walk

pytestmark = pytest.mark.usefixtures("infini")
PARTS = 4  # for pytest-xdist


@pytest.mark.parametrize("part", range(PARTS))
def test_operators(part: int) -> None:
    dtype = (torch.float32, torch.bfloat16)[part % 2]
    outcomes = [*walk([dtype], 1, every=PARTS, first=part)]
    found = [f"{o.op} {o.form}: {o.error}" for o in outcomes if o.error and not o.reason]
    assert found == []
    equal = sum(o.error is None for o in outcomes)
    assert len(outcomes) > 400 and equal >= 0.99 * len(outcomes)


def test_exceptions_are_needed() -> None:
    """Each exception names an operator of the database that does fail."""
    ops = {op.full_name: op for op in op_db}
    for (name, form), reason in EXCEPTIONS.items():
        assert reason.endswith(".") and name in ops, name
        forms = FORMS if form == "*" else (form,)
        outcomes = [
            compared(ops[name], torch.float32, one, 8)
            for one in forms
            if device_op_db.has_form(ops[name], torch.float32, one)
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
