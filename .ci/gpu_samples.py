"""Calls every op that has a CUDA kernel once, for compute-sanitizer: no pytest, small tensors, few kernels of torch.

    compute-sanitizer --tool racecheck python .ci/gpu_samples.py --seconds 40

Of each op one sample, the largest of moderate size, in bfloat16 where the op takes it. The ops whose threads share
memory in the most ways go first: a sanitizer may slow them down a hundred times, and after --seconds no other starts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

START = time.monotonic()  # before the import of torch, which takes long under a sanitizer

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from torch_infini.testing import call, cuda_device, moved  # noqa: E402
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos  # noqa: E402

FIRST = ("attention", "paged_attention", "linear_int4", "random_sample", "paged_caching", "layer_norm")
MOST_ELEMENTS = 1 << 16


def elements(sample: Sample) -> int:
    return sum(v.numel() for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, Tensor))


def chosen_sample(spec: OpInfo) -> tuple[torch.dtype, Sample]:
    """The op's largest sample of at most MOST_ELEMENTS, else its smallest that is not empty."""
    dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else spec.dtypes[0]
    samples = sorted(spec.samples_on_cuda(dtype), key=elements)
    fitting = [sample for sample in samples if elements(sample) <= MOST_ELEMENTS]
    return dtype, fitting[-1] if fitting else samples[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no op after that time")
    parser.add_argument("--ops", help="names, separated by commas (default: all that have a CUDA kernel)")
    options = parser.parse_args(arguments)
    device = cuda_device()
    if device is None:
        print("gpu_samples: there is no GPU, or torch_infini's CUDA kernels are not registered: nothing ran")
        return 1
    wanted = options.ops.split(",") if options.ops else None
    specs = [spec for spec in all_op_infos() if "cuda" in spec.devices and (wanted is None or spec.name in wanted)]
    specs.sort(key=lambda spec: FIRST.index(spec.name) if spec.name in FIRST else len(FIRST))
    ran = failed = 0
    for spec in specs:
        if time.monotonic() - START > options.seconds:
            break
        dtype, sample = chosen_sample(spec)
        try:
            with torch.no_grad():
                call(spec, moved(sample, device))
                if device == "cuda":
                    torch.cuda.synchronize()
        except Exception as error:  # the next op may work
            failed += 1
            print(f"FAILED  {spec.name}, {sample.name}: {error}", flush=True)
        else:
            print(f"ran     {spec.name}, {str(dtype).removeprefix('torch.')}, {sample.name}", flush=True)
        ran += 1
    left = f"; the time was up before {', '.join(spec.name for spec in specs[ran:])}" if specs[ran:] else ""
    print(f"gpu_samples: {ran} of {len(specs)} ops ran, {failed} failed{left}")
    return int(failed > 0 or ran == 0)


if __name__ == "__main__":
    sys.exit(main())
