"""Runs the classes of tests/support/device_type_cases.py, which torch instantiates for the device infini."""

from __future__ import annotations

import importlib

import pytest

from support.device_processes import in_process


def run(name: str) -> tuple[int, int, list[str]]:
    """In a process that has not imported torch's list of devices yet."""
    return importlib.import_module("support.device_type_cases").run(name)


@pytest.mark.full
def test_classes() -> None:
    """13 dtypes, three of them with large sizes, seven operators and three tests without either."""
    ran, skipped, failures = in_process(run, "TestOnDevice")
    assert failures == []
    assert (ran, skipped) == (2 * 12 + 3 + 7 + 3, 0)


@pytest.mark.full
def test_a_wrong_class_fails() -> None:
    ran, _, failures = in_process(run, "TestWrong")
    assert ran == len(failures) == 1 and "not close" in failures[0]
