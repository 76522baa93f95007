"""The core of device `infini`: memory, streams, random numbers, errors, sharing between processes.

Each test runs in a process of its own, because a registered device stays for the whole of one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from torch_infini.device import _load

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < _load.OLDEST_TORCH, reason="the device needs a newer torch"
)

HEAD = """
import gc, os, pytest, torch, torch_infini
from torch_infini import device
"""


def run(body: str, enable: bool = True, **variables: str) -> None:
    """Run code in a new process, after enabling the device."""
    script = HEAD + ("device.enable('cpu')\n" if enable else "") + textwrap.dedent(body)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True
    )
    # Nor at exit, where autograd's threads are waited for.
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-4000:]


def test_memory_is_shared_and_counted() -> None:
    run(
        """
        a = torch.arange(12.).view(3, 4)[:, 1:]
        b = device.wrap(a)
        b.add_(1)
        c = device.unwrap(b)
        assert a.data_ptr() == b.data_ptr() == c.data_ptr() and b.stride() == a.stride()
        assert a.tolist() == c.tolist() == (torch.arange(12.).view(3, 4)[:, 1:] + 1).tolist()
        assert torch.infini.memory_allocated() == 0  # the memory is not the device's
        x = torch.empty(1000, device="infini")
        view = x[3:]
        assert torch.infini.memory_allocated() == 4000
        del x
        assert torch.infini.memory_allocated() == 4000
        del view
        assert torch.infini.memory_allocated() == 0 and torch.infini.max_memory_allocated() >= 4000
        torch.infini.reset_peak_memory_stats()
        assert torch.infini.max_memory_allocated() == 0
        y = torch.empty(4, device="infini")
        y.resize_(100)
        assert torch.infini.memory_allocated() == 400
        y.untyped_storage().resize_(0)
        assert torch.infini.memory_allocated() == 0
        z = torch.empty(0, device="infini")
        torch.add(torch.ones(5, device="infini"), 1, out=z)
        assert z.shape == (5,) and z.tolist() == [2] * 5
        free, total = torch.accelerator.get_memory_info()
        assert 0 < free <= total
        with pytest.raises(RuntimeError, match="not resizable"):
            a.resize_(100)
        d = device.wrap(torch.ones(2))
        for change in (lambda: d.resize_(100), lambda: d.set_(d.untyped_storage(), 0, (100,))):
            with pytest.raises(RuntimeError, match="not resizable"):
                change()
            assert d.tolist() == [1, 1]  # as it was, not beyond its memory
        """
    )


def test_gradients_pass_wrap_and_unwrap() -> None:
    run(
        """
        x = torch.randn(3, requires_grad=True)
        (device.unwrap(device.wrap(x) * 3) * 2).sum().backward()
        assert x.grad.tolist() == [6, 6, 6] and x.grad.device.type == "cpu"
        """
    )


def test_infini_ops_refuse_gradients_and_count_writes() -> None:
    run(
        """
        x = torch.randn(3, device="infini", requires_grad=True)
        y = torch.ops.infini.silu(x)
        with pytest.raises(RuntimeError, match="silu has no backward"):
            y.sum().backward()
        out = torch.empty(3, device="infini")
        torch.ops.infini.silu.out(x.detach(), out=out)
        assert out._version == 1
        with torch.no_grad():
            assert torch.equal(torch.ops.infini.silu(x).cpu(), torch.ops.infini.silu(x.cpu()))
        with pytest.raises(RuntimeError, match="detached"):
            torch.ops.infini.silu.out(x, out=out)
        with torch.inference_mode():
            out = torch.empty(3, device="infini")
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            torch.ops.infini.silu.out(x.detach(), out=out)
        """
    )


def test_backward_kernels_are_whole() -> None:
    """An op that torch both decomposes and has a CPU kernel for, as silu's backward, has the CPU's bits."""
    run(
        """
        for function in (torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.mish):
            bits = []
            for name in ("cpu", "infini"):
                torch.manual_seed(0)
                x = torch.randn(1000).to(name).requires_grad_()
                function(x).square().sum().backward()
                bits.append(x.grad.cpu())
            assert torch.equal(*bits), function
        """
    )


def test_streams_and_events() -> None:
    run(
        """
        stream = torch.infini.Stream()
        default = torch.infini.current_stream()
        assert default == torch.infini.default_stream() and stream != default
        with torch.infini.stream(stream):
            assert torch.infini.current_stream() == stream == torch.accelerator.current_stream()
        assert torch.infini.current_stream() == default
        done = []
        stream.runtime.launch(done.append, 1)
        stream.synchronize()
        assert done == [1] and stream.query() and stream.runtime.handle == stream.native_handle
        start, end = (torch.infini.Event(enable_timing=True) for _ in range(2))
        start.record()
        end.record(stream)
        end.synchronize()
        assert start.elapsed_time(end) >= 0 and start.query() and isinstance(start, torch.infini.Event)
        torch.ones(3, device="infini").record_stream(stream)
        torch.infini.synchronize()
        """
    )


def test_properties_and_summaries() -> None:
    """What torch.infini says of the device and its memory, by torch.cuda's names."""
    run("""
        found = torch.infini.get_device_properties()
        assert found == torch.infini.get_device_properties("infini:0") and found.name == torch.infini.get_device_name()
        assert found.total_memory == torch.accelerator.get_memory_info()[1] > 0
        assert found.multi_processor_count == len(os.sched_getaffinity(0))
        with pytest.raises(RuntimeError, match="out of range: 7 of 1"):
            torch.infini.get_device_properties(7)
        x = torch.empty(1 << 20, device="infini")
        torch.empty(1 << 21, device="infini")
        summary = torch.infini.memory_summary().splitlines()
        assert summary[0].startswith("infini (cpu), device 0: 0 times out of memory")
        row, = (line.split() for line in summary if line.startswith("Bytes of tensors"))
        current, peak, allocated, freed = (int(number.replace(",", "")) for number in row[3:])
        stats = torch.infini.memory_stats()
        assert current == torch.infini.memory_allocated() >= 4 << 20 and peak == torch.infini.max_memory_allocated()
        assert peak >= 12 << 20 and allocated - freed == current
        assert len(torch.infini.memory_summary(abbreviated=True)) < len(torch.infini.memory_summary())
        nested = torch.infini.memory_stats_as_nested_dict()
        assert nested["allocated_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"] == current
        assert nested["num_ooms"] == 0 and torch.infini.OutOfMemoryError is torch.OutOfMemoryError
        with pytest.raises(torch.infini.OutOfMemoryError):
            torch.empty(1 << 48, device="infini")
        assert "1 times out of memory" in torch.infini.memory_summary()
        assert not torch.infini.is_tf32_supported() and not hasattr(torch.infini, "CUDAGraph")
    """)


def test_random_numbers_are_the_default_generators() -> None:
    run(
        """
        torch.manual_seed(5)
        expected = torch.randn(7), torch.rand(3)
        torch.manual_seed(5)
        got = torch.randn(7, device="infini"), torch.rand(3, device="infini")
        assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, got))
        state = torch.infini.get_rng_state()
        x = torch.native_dropout(torch.ones(100, device="infini"), 0.5, True)[0]
        torch.infini.set_rng_state(state)
        torch.rand(3)  # the CPU's generator has no part in it
        assert torch.equal(x, torch.native_dropout(torch.ones(100, device="infini"), 0.5, True)[0])
        own = torch.Generator("infini").manual_seed(5)
        assert torch.equal(torch.randn(7, device="infini", generator=own).cpu(), expected[0])
        assert torch.infini.initial_seed() == 5
        with pytest.raises(RuntimeError, match="Expected a 'infini' device type for generator but found 'cpu'"):
            torch.randn(7, device="infini", generator=torch.Generator())
        """
    )


def test_bad_input() -> None:
    run(
        """
        x = torch.ones(3, device="infini")
        mixed = "Expected all tensors to be on the same device"
        for call, error, text in (
            (lambda: torch.ones(3, device="infini:7"), RuntimeError, "out of range: infini:7 .* there is 1"),
            (lambda: torch.infini.set_device(1), RuntimeError, "out of range"),
            (lambda: x + torch.ones(3), RuntimeError, mixed),
            (lambda: torch.add(x, 1, out=torch.empty(3)), RuntimeError, mixed),
            (lambda: torch.arange(4)[x.long()], RuntimeError, mixed),
            (lambda: torch.ops.infini.rms_norm(x, torch.ones(3), 1e-6), RuntimeError, "infini::rms_norm"),
            (lambda: x.numpy(), TypeError, "Use Tensor.cpu"),
            (lambda: torch.empty(1 << 58, device="infini"), torch.OutOfMemoryError, f"allocate {1 << 60} bytes"),
            (lambda: x[:1].expand(1 << 58) + 1, torch.OutOfMemoryError, f"{1 << 60} bytes"),
            (lambda: torch.empty(3, device="infini", pin_memory=True), RuntimeError, "Only dense CPU tensors"),
            (lambda: x.to_sparse(), NotImplementedError, "dense strided"),
            (lambda: device.wrap(x), TypeError, "wrap: tensor must be on cpu"),
            (lambda: device.unwrap(torch.ones(3)), TypeError, "unwrap: tensor must be on infini"),
            (lambda: device.enable("cuda"), RuntimeError, "infini is enabled on cpu already"),
            (lambda: device.enable("tpu"), ValueError, "backing must be cpu or cuda, .*got 'tpu'"),
            (lambda: device.fallback("never"), ValueError, "mode must be one of"),
        ):
            with pytest.raises(error, match=text):
                call()
        assert (x + torch.tensor(1.)).tolist() == [2, 2, 2]  # numbers of the CPU are welcome, as on CUDA
        assert x[torch.tensor([0, 2])].tolist() == [1, 1]
        """
    )


def test_enabling() -> None:
    run(
        """
        assert not device.is_enabled() and not hasattr(torch, "infini")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is None or accelerator.type != "infini"
        with pytest.raises(RuntimeError, match="not enabled"):
            device.wrap(torch.ones(3))
        with pytest.raises(ValueError, match="TORCH_INFINI_DEVICE must be cpu or cuda, .*got 'tpu'"):
            device.enable()
        device.enable("cpu")
        device.enable("cpu")
        assert device.backing() == "cpu" and torch.accelerator.current_accelerator().type == "infini"
        """,
        enable=False,
        TORCH_INFINI_DEVICE="tpu",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",  # an installed torch_infini would raise at `import torch`
    )
    run(
        """
        torch.utils.rename_privateuse1_backend("npu")
        with pytest.raises(RuntimeError, match="'npu' is registered"):
            device.enable("cpu")
        """,
        enable=False,
    )


def test_other_releases_of_torch(tmp_path) -> None:
    (tmp_path / "libinfini_device-2.13.so").touch()
    assert _load.library("2.13.1+cu130", tmp_path).name == "libinfini_device-2.13.so"
    with pytest.raises(ImportError, match=r"built for torch 2\.13, and torch 2\.15\.0 is installed: run `pip install"):
        _load.library("2.15.0", tmp_path)
    with pytest.raises(ImportError, match=r"needs torch >= 2\.13, found 2\.12\.1"):
        _load.library("2.12.1", tmp_path)


def test_fallback_modes_and_report() -> None:
    run(
        """
        import warnings
        x = torch.ones(3, device="infini")
        device.fallback_report(clear=True)
        x + 1, x + 1, x * 2
        torch.ops.infini.silu(x), x.view(3, 1), x.cpu(), x.sum
        assert device.fallback_report() == {"aten::add.Tensor": 2, "aten::mul.Tensor": 1}
        with device.fallback("error"):
            with pytest.raises(NotImplementedError, match="aten::add.Tensor has no kernel of infini"):
                x + 1
            torch.ops.infini.silu(torch.zeros(3, device="infini"))
            assert x[0].item() == 1
        with warnings.catch_warnings(record=True) as caught, device.fallback("warn"):
            warnings.simplefilter("always")
            x + 1, x + 1
        assert len([w for w in caught if "aten::add.Tensor has no kernel" in str(w.message)]) == 1
        x + 1
        """
    )


def test_dlpack_and_pinned_memory() -> None:
    run(
        """
        import numpy
        x = torch.arange(4., device="infini")
        y = torch.from_dlpack(x)  # memory that this library did not make
        y += 1
        assert y.device.type == "infini" and y.data_ptr() == x.data_ptr() and x.tolist() == [1, 2, 3, 4]
        assert torch.ops.infini.silu(y).shape == (4,) and y[1:].add(y[:3]).tolist() == [3, 5, 7]
        assert numpy.from_dlpack(x, device="cpu").tolist() == [1, 2, 3, 4]
        del x
        gc.collect()
        assert y.tolist() == [1, 2, 3, 4]
        pinned = torch.ones(8).pin_memory()
        assert pinned.is_pinned() and pinned[3:].is_pinned() and not torch.ones(8).is_pinned()
        assert pinned.to("infini", non_blocking=True).tolist() == [1] * 8
        """
    )


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_tensors(method: str, tmp_path) -> None:
    script = tmp_path / "share.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import torch, torch.multiprocessing as mp
            from torch_infini import device

            def child(x, parameter, answers):
                x += 1
                parameter.sum().backward()
                answers.put((str(x.device), parameter.grad.tolist(), (x * 2).tolist(), parameter.requires_grad))

            if __name__ == "__main__":
                device.enable("cpu")
                context = mp.get_context({method!r})
                x, parameter = torch.zeros(3, device="infini"), torch.nn.Parameter(torch.ones(2, device="infini"))
                view, answers = x[1:], context.SimpleQueue()
                process = context.Process(target=child, args=(x[:2], parameter, answers))
                process.start()
                assert answers.get() == ("infini:0", [1, 1], [2, 2], True)
                process.join()
                assert process.exitcode == 0
                if {method!r} == "spawn":  # a child of fork() has memory of its own
                    assert x.tolist() == [1, 1, 0] and view.tolist() == [1, 0]
                    assert x.data_ptr() == device.unwrap(x).data_ptr()
            """
        )
    )
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]


def test_autocast() -> None:
    """Each of the rules of torch's autocast, by a few ops: the dtypes that CUDA's has."""
    run(
        """
        F, low = torch.nn.functional, torch.bfloat16
        x = torch.randn(4, 4, device="infini")
        half, wide = x.to(low), x.double()
        with torch.autocast("infini", dtype=low):
            results = {
                low: [x @ x, F.linear(x, x, x[0]), torch.linalg.multi_dot([x, x, half]), half.softmax(-1, low),
                      torch.addcmul(half, half, half)],
                torch.float32: [half.exp(), half.softmax(-1), half.sum(), half.norm(), half.norm(2, 1),
                                torch.addcmul(x, half, half), half.cumsum(0)],
                torch.float64: [wide @ wide, wide.sum(), wide.norm(), torch.addcmul(wide, wide, wide)],
            }
            assert half.cumsum(0, dtype=low).dtype == low
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(half.sigmoid(), half.sigmoid())
        for dtype, tensors in results.items():
            assert [tensor.dtype for tensor in tensors] == [dtype] * len(tensors)
        expected = (x.cpu().to(low) @ x.cpu().to(low)).float()
        assert torch.equal(results[low][0].cpu().float(), expected)
        """
    )
