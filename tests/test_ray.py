"""Ray Data and Ray Serve around the engine and the server, on this machine: exact rows, replicas that are killed.

pytest -m ray tests/test_ray.py: five minutes on two cores, most of which Ray takes to start processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="needs Ray: pip install 'torch_infini[ray]'")
pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx
import ray
from ray import serve

from support.serving import events_of, save_model, wait_until
from torch_infini import LLM, SamplingParams
from torch_infini.integrations.ray import Predictor, deployment
from torch_infini.integrations.ray.deployment import MAX_PREFIX, prefix_of, prefix_router

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).resolve().parent.parent
ROWS, BATCH, NAME = 1000, 32, f"infini-{os.getpid()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    torch.set_num_threads(1)
    return LLM(folder, progress=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


# ---- Ray Data ----


class KilledOnce(Predictor):
    """A Predictor whose process is killed in the middle of the rows, once."""

    def __init__(self, model: str, mark: str, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._mark = Path(mark)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if ROWS // 2 in batch["id"] and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def test_rows_are_exact_and_in_order(cluster: None, folder: Path, llm: LLM, tmp_path: Path) -> None:
    rows = [
        {
            "id": i,
            "prompt": f"row {i % 37}",
            "seed": i,
            "sampling_params": {"max_tokens": 2 + i % 7, "top_k": i % 3 * 5},
        }
        for i in range(ROWS)
    ]
    rows[3]["prompt"] = None
    rows[ROWS // 2 + 1]["sampling_params"] = {"max_tokens": 0, "top_k": 0}
    rows[-1]["prompt"] = "x" * 600
    bad = {3: "prompt must be a text or token ids, got null", ROWS // 2 + 1: "max_tokens must be", ROWS - 1: "must"}
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    mark = tmp_path / "killed"
    found = (
        ray.data.from_items(rows, override_num_blocks=8)
        .map_batches(
            KilledOnce,
            fn_constructor_kwargs={"model": str(folder), "mark": str(mark), "sampling": {"temperature": 0.8}},
            compute=ray.data.ActorPoolStrategy(size=2),
            num_cpus=1,
            batch_size=BATCH,
        )
        .take_all()
    )
    assert mark.exists()
    assert [row["id"] for row in found] == list(range(ROWS))
    good = [row for row in rows if row["id"] not in bad]
    params = [SamplingParams(temperature=0.8, seed=row["seed"], **row["sampling_params"]) for row in good]
    wanted = llm.generate([row["prompt"] for row in good], params, use_tqdm=False)
    for row, output in zip((row for row in found if row["id"] not in bad), wanted, strict=True):
        completion = output.outputs[0]
        assert row["error"] == "" and row["finish_reason"] == completion.finish_reason
        assert (row["generated_text"], list(row["generated_tokens"])) == (completion.text, completion.token_ids)
    for number, rule in bad.items():
        row = found[number]
        assert (row["generated_text"], len(row["generated_tokens"]), row["finish_reason"]) == ("", 0, "error")
        assert rule in row["error"] and "\n" not in row["error"]


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor(folder, {"max_tokens": 4, "temperature": 0})


def column(*values: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):
        made[at] = value
    return made


def test_kinds_of_rows(predictor: Predictor, llm: LLM) -> None:
    """Without Ray: what a batch may have, as numpy gives it."""
    greedy = SamplingParams.greedy(max_tokens=4)
    turn = {"role": "user", "content": "hi", "name": None}
    found = predictor({"messages": column(np.array([turn]), [], "x", None), "n": np.arange(4)})
    assert list(found["generated_tokens"][0]) == llm.chat([turn], greedy, use_tqdm=False)[0].outputs[0].token_ids
    assert ["messages" in error for error in found["error"]] == [False, True, True, True]
    assert list(found["n"]) == [0, 1, 2, 3]
    forms = [{"choice": ["yes", "no"], "regex": None}, {"regex": "(("}, {"regex": "a", "choice": ["b"]}]
    batch = {"prompt": column(np.array([1, 2]), "a", "b", "c"), "seed": np.array([1.0, np.nan, 2, 0.5])}
    given = [{"structured_outputs": form} for form in forms]
    found = predictor({**batch, "sampling_params": column(*given, {})})
    assert found["generated_text"][0] in ("yes", "no") and found["error"][0] == ""
    rules = ("regex must be a form", "got regex and choice", "seed must be an integer")
    assert all(rule in error for rule, error in zip(rules, found["error"][1:], strict=True)), found["error"]
    found = predictor({"prompt": column("a", "a"), "sampling_params": column({"n": 2}, {"temperatur": 1})})
    assert "n must be 1, because a row has one text, got 2" in found["error"][0]
    assert "temperatur" in found["error"][1]
    assert predictor({"prompt": column()})["error"].shape == (0,)


def test_batches_that_are_refused(predictor: Predictor, folder: Path) -> None:
    with pytest.raises(ValueError, match="batch must have the column prompt or messages, got neither among a, b"):
        predictor({"b": column(1), "a": column(1)})
    with pytest.raises(ValueError, match="got both"):
        predictor({"prompt": column("a"), "messages": column([])})
    with pytest.raises(ValueError, match="batch must have no column error"):
        predictor({"prompt": column("a"), "error": column("")})
    for wrong in ({"max_tokens": 0}, {"max_token": 1}, {"n": 2}):
        with pytest.raises(ValueError, match=r"Predictor: sampling must have fields of SamplingParams, got an error: "):
            Predictor(folder, wrong)


# ---- Ray Serve ----


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def url(cluster: None) -> Iterator[str]:
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def replicas() -> list[int]:
    """Return the process ids of this test's replicas."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
            if f"ServeReplica:default:{NAME}".encode() in line and b"ingress" not in line:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def body_of(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number % 5}"}]
    return {"messages": messages, "max_tokens": 24, "seed": number, "stream": number % 2 == 0}


def text_of(url: str, body: dict[str, Any]) -> str:
    """Return an answer's text, whole or streamed; as a client does, a request that fails is sent again."""
    for attempt in range(20):
        try:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            if answer.status_code == 200 and not body["stream"]:
                return str(answer.json()["choices"][0]["message"]["content"])
            if answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"):
                parts = [event["choices"][0]["delta"] for event in events_of(answer.text) if event["choices"]]
                return "".join(part.get("content") or "" for part in parts)
            assert answer.status_code in (200, 500, 502, 503), answer.text
        except httpx.TransportError:
            pass
        time.sleep(0.1 * (attempt + 1))
    raise AssertionError("no answer after 20 attempts")


@pytest.mark.parametrize("prefix_aware", [False, True])
def test_a_replica_that_is_killed(prefix_aware: bool, url: str, folder: Path, llm: LLM) -> None:
    options = {"name": NAME, "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}
    more: dict[str, Any] = {"router": {"imbalanced_threshold": 2}} if prefix_aware else {}
    app = deployment(
        folder, served={"model_names": ["small"]}, options=options, prefix_aware=prefix_aware, max_num_seqs=8, **more
    )
    serve.run(app)
    wait_until(lambda: len(replicas()) == 2, 60)
    assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"] == "small"
    error = httpx.post(f"{url}/v1/chat/completions", json={**body_of(1), "temperature": 9}, timeout=60)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "temperature")
    count, clients, texts = 160, 8, dict[int, str]()

    def client(first: int) -> None:
        for number in range(first, count, clients):
            texts[number] = text_of(url, body_of(number))

    threads = [threading.Thread(target=client, args=(first,)) for first in range(clients)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(texts) >= count // 4, 60)
    killed = replicas()[0]
    os.kill(killed, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert len(texts) == count
    conversations = [body_of(number)["messages"] for number in range(count)]
    params = [SamplingParams(seed=number, max_tokens=24) for number in range(count)]
    wanted = llm.chat(conversations, params, use_tqdm=False)
    assert [texts[number] for number in range(count)] == [output.outputs[0].text for output in wanted]
    wait_until(lambda: len(set(replicas()) - {killed}) == 2, 90)  # Ray replaces it
    # A client that leaves a stream frees its place.
    long = {**body_of(0), "max_tokens": 400}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=60) as answer:
        next(answer.iter_raw())
    for _ in range(4):
        wait_until(lambda: httpx.get(f"{url}/load", timeout=60).json() == {"server_load": 0}, 30)
    serve.delete("default")
    wait_until(lambda: not replicas(), 60)


def test_where_requests_are_routed_by() -> None:
    first: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    turns = [prefix_of("/", repr_of(messages=first)), prefix_of("/", repr_of(messages=[*first, *first], model="m"))]
    assert turns[1].startswith(turns[0]) and len(turns[0]) > 10
    tools = prefix_of("/", repr_of(tools=[{"a": 1}], messages=first))
    assert tools.startswith('[{"a": 1}') and "hello" in tools
    assert prefix_of("/", repr_of(prompt=[1, 2, 3])) == "[1, 2, 3"
    assert len(prefix_of("/", repr_of(prompt="x" * 10**6))) == MAX_PREFIX
    for body in (b"", b"{", b"[1]", b"5", b"[" * 100_000, repr_of(), b"\xff"):
        assert prefix_of("/path", body) == "/path"
    assert prefix_router().endswith(":PrefixCacheAffinityRouter")


def repr_of(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_settings(folder: Path, cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="served must have fields of ServeSettings, got an error: .*model_name"):
        deployment(folder, served={"model_name": "a"})
    with pytest.raises(ValueError, match="max_queue must be an integer"):
        deployment(folder, served={"max_queue": -1})
    with pytest.raises(ValueError, match="router must be None where prefix_aware is False"):
        deployment(folder, router={"imbalanced_threshold": 2})
    deployment(folder, options={"num_replicas": 3, "ray_actor_options": {"num_cpus": 4}})
    assert "3 replicas of 4 CPUs need 12, the cluster has 2" in caplog.text
    caplog.clear()
    deployment(folder, options={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}})
    assert "replicas" not in caplog.text
