"""show(name, value): one line of JSON for each value, exact, which tests/test_infinicore_scripts.py reads."""

import json

import infinicore
import torch


def show(name, value):
    """Print a tensor as shape, strides, dtype and values in row-major order; anything else as JSON has it."""
    if isinstance(value, infinicore.Tensor):
        infinicore.sync_stream()
        value = {
            "shape": value.shape,
            "strides": value.stride(),
            "dtype": repr(value.dtype),
            "values": torch.from_dlpack(value.to(infinicore.device("cpu"))).flatten().tolist(),
        }
    print(json.dumps({"name": name, "value": value}))
