"""GET /metrics and /load of torch_infini.serve: Prometheus' own parser reads them, and their counts are exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from support.serving import MODEL, ask, save_model, service_of, serving, slow_down, wait_until
from torch_infini import AsyncLLM
from torch_infini.engine import CompletionOutput, RequestMetrics, RequestOutput
from torch_infini.engine.outputs import Metrics
from torch_infini.serve import Service
from torch_infini.serve.metrics import NOTHING_SEEN, ServerMetrics

pytestmark = pytest.mark.usefixtures("one_thread")
BODY = {"prompt": [5] * 40, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    torch.set_num_threads(1)
    with_blocks = AsyncLLM(save_model(tmp_path), block_size=16, chunk_size=16)
    yield service_of(with_blocks)
    with_blocks.close()


def values(text: str) -> dict[str, float]:
    """Samples by name; those of several labels as name{reason}. All are of the served model."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".") and family.name.startswith("infini:"), family
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            reason = sample.labels.get("finished_reason")
            if not sample.name.endswith("_bucket"):
                found[sample.name.removeprefix("infini:") + (f"{{{reason}}}" if reason else "")] = sample.value
    return found


def test_counts(service: Service) -> None:
    """Two equal prompts, the second of two samples: its first blocks come from the cache."""
    before = values(ask(service, "GET", "/metrics").text)
    assert before["num_requests_running"] == before["kv_cache_usage_perc"] == before["generation_tokens_total"] == 0
    for n in (1, 2):
        assert ask(service, "POST", "/v1/completions", json={**BODY, "n": n}).status_code == 200
    answer = ask(service, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    now = values(answer.text)
    assert now["generation_tokens_total"] == 18 and now["request_success_total{length}"] == 3
    assert now["request_success_total{stop}"] == now["request_success_total{abort}"] == 0
    assert now["prefix_cache_queries_total"] == now["prompt_tokens_total"] + now["prefix_cache_hits_total"]
    assert now["prefix_cache_hits_total"] >= 32
    assert now["request_prompt_tokens_count"] == 2 and now["request_prompt_tokens_sum"] == 80
    assert now["request_generation_tokens_count"] == 2 and now["request_generation_tokens_sum"] == 18
    assert now["time_to_first_token_seconds_count"] == now["e2e_request_latency_seconds_count"] == 2
    assert now["inter_token_latency_seconds_count"] == 10  # 5 of each prompt: its samples advance together
    assert 0 < now["time_to_first_token_seconds_sum"] < now["e2e_request_latency_seconds_sum"]
    assert now["num_requests_running"] == now["num_requests_waiting"] == 0
    assert ask(service, "GET", "/load").json() == {"server_load": 0}


def test_load_and_cancelled(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stream runs it is counted; of a client that left nothing stays."""
    slow_down(service.llm, monkeypatch)
    with serving(service) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 400, "stream": True}) as answer:
            lines = answer.iter_lines()  # whose end would close the stream
            next(lines)
            assert httpx.get(f"{url}/load").json() == {"server_load": 1}
            now = values(httpx.get(f"{url}/metrics").text)
            assert now["num_requests_running"] == 1 and now["kv_cache_usage_perc"] > 0
        wait_until(lambda: httpx.get(f"{url}/load").json() == {"server_load": 0})
        wait_until(lambda: values(httpx.get(f"{url}/metrics").text)["request_success_total{abort}"] == 1)
        now = values(httpx.get(f"{url}/metrics").text)
    assert now["time_to_first_token_seconds_count"] == 1 and now["e2e_request_latency_seconds_count"] == 0


def test_times_between_tokens() -> None:
    """Several tokens in one output share the time since the one before."""
    metrics = ServerMetrics(lambda: Metrics(blocks=4, free_blocks=3), MODEL)

    def output(*lengths: int, finish: str | None = None) -> RequestOutput:
        completions = [CompletionOutput(i, "", [7] * length, finish) for i, length in enumerate(lengths)]
        return RequestOutput("1", None, [1, 2], completions, metrics=RequestMetrics(0.5, 2.0))

    seen = NOTHING_SEEN
    for lengths, finish in (((1, 1), None), ((2, 2), None), ((5, 5), None), ((6, 6), "length")):
        seen = metrics.observe(output(*lengths, finish=finish), seen)
    now = values(metrics.text().decode())
    assert now["inter_token_latency_seconds_count"] == 5 and now["request_generation_tokens_sum"] == 12
    assert now["time_to_first_token_seconds_sum"] == 0.5 and now["e2e_request_latency_seconds_sum"] == 2.0
    assert now["kv_cache_usage_perc"] == 0.25


def test_the_key_is_asked_for(service: Service) -> None:
    guarded = service_of(service.llm, api_key="secret")
    for path in ("/metrics", "/load"):
        assert ask(guarded, "GET", path).status_code == 401
        assert ask(guarded, "GET", path, headers={"Authorization": "Bearer secret"}).status_code == 200
