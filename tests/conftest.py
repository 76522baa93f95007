"""Fixtures for all tests, the determinism they rely on, and what keeps a bad CUDA kernel from failing all later tests.

INFINI_TEST_SAMPLE: N:TEXT runs one in N of the tests marked `full`; the text decides which.
INFINI_TEST_SECONDS: a time limit for each test. A test that exceeds it shows its stacks and ends its process: no signal
can interrupt a call that waits for a GPU. pytest-xdist reports that test as failed and starts another worker.
"""

import atexit
import faulthandler
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

# Compiled graphs of earlier builds must not be used here; pytest-xdist's workers share this run's.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_infini_inductor_")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
# Workers that spin where they wait take each other's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Nor a table of products that somebody measured on this machine.
os.environ.setdefault("INFINI_PRODUCTS", "default")

import torch

TEST_SECONDS = float(os.environ.get("INFINI_TEST_SECONDS", "0"))
STICKY_ERROR = 70  # exit status of a worker
STDERR = pytest.StashKey[TextIO]()

pytest.register_assert_rewrite("support.host_streams", "support.runtime_cases")  # which test files import


def pytest_configure(config: pytest.Config) -> None:
    # While pytest captures, file descriptor 2 is a file that is lost when the process ends.
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.fdopen(os.dup(2), "w")


def limit_time(config: pytest.Config) -> None:
    if TEST_SECONDS:
        faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=config.stash[STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    failed_before = item.session.testsfailed
    limit_time(item.config)
    try:
        result = yield
        # After an illegal access every CUDA call of the process fails. The controller has this test's reports by now,
        # and starts another worker for the tests that are left.
        failed = item.session.testsfailed > failed_before
        if failed and hasattr(item.config, "workerinput") and torch.cuda.is_initialized():
            limit_time(item.config)  # pytest ends a limit where a test fails
            try:
                torch.cuda.synchronize()
            except Exception as error:
                line = str(error).strip().partition("\n")[0]
                print(
                    f"{item.nodeid}: this process can use the GPU no more: {line}",
                    file=item.config.stash[STDERR],
                    flush=True,
                )
                os._exit(STICKY_ERROR)
        return result
    finally:
        if TEST_SECONDS:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Skip what torch cannot do: Inductor does not quote torch's folder (2.13), so below a space it links nothing."""
    report = yield
    if report.failed and " " in torch.__file__ and "cannot find -ltorch" in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], f"Inductor cannot link: a space in {torch.__file__}")
    return report


def is_sampled(nodeid: str, share: int, text: str) -> bool:
    return zlib.crc32(f"{text} {nodeid}".encode()) % share == 0


def unmark_first(items: list[pytest.Item]) -> None:
    """Of a test marked `full(beyond=N)` the first N cases are not `full`."""
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "full" and "beyond" in mark.kwargs]:
            case = item.path, item.nodeid.partition("[")[0]
            cases[case] += 1
            if cases[case] <= mark.kwargs["beyond"]:
                item.own_markers.remove(mark)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the device infini go last: once enabled, it is torch.accelerator to the end of the process.

    Workers of pytest-xdist take tests in no fixed order, so beside others they leave these out.
    """
    unmark_first(items)
    others = [item for item in items if not item.path.name.startswith("test_device")]
    on_device = [item for item in items if item.path.name.startswith("test_device")]
    if others and "PYTEST_XDIST_WORKER" in os.environ:
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason="needs workers of its own: make test-device"))
    items[:] = others + on_device
    # Taken out of the environment: pytest that a test starts runs all that it was asked for.
    if given := os.environ.pop("INFINI_TEST_SAMPLE", ""):
        share, _, text = given.partition(":")
        left = [i for i in items if i.get_closest_marker("full") and not is_sampled(i.nodeid, int(share), text)]
        config.hook.pytest_deselected(items=left)
        out = set(left)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def infini() -> str:
    """The name of the device, which is enabled, on the CPU, for the rest of the process."""
    import torch_infini.device

    torch_infini.device.enable("cpu")
    return "infini"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from several, and lose much to them on a busy machine."""
    from torch_infini.testing import threads_set_to

    with threads_set_to(1):
        yield


@pytest.fixture
def no_graphs_left() -> Iterator[None]:
    """Graphs that a test compiled, and the hooks that they hold, end with it."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What models take for the parameter: a format of torch_infini.weights, which is the best one then; or as it is."""
    from torch_infini.weights import FORMATS

    format = FORMATS.get(request.param)
    if format is None:
        return request.param
    for other in FORMATS.values():  # the preferred ones, of the head too
        if other.order < format.order:
            monkeypatch.setattr(other, "serves_on", lambda device: False)
    if not format.quantizes_on(torch.device("cpu")):
        pytest.skip(f"there are no kernels of {format.name}")
    return format.serves
