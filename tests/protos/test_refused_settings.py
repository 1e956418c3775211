"""Settings of the services that can never work are refused at the start, by name."""

from typing import Any

import pytest

from fusionkv.fusion_worker.config import WorkerConfig, configured
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service.config import Config
from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.settings import SettingsError

SERVICES = {"kvcache": Config, "worker": WorkerConfig, "gateway": GatewayConfig}


def refused(service: str, message: str, **flags: Any) -> None:
    with pytest.raises(SettingsError, match=message):
        settings.load(SERVICES[service], service, environ={}, flags=flags)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("address", ["localhost", "8080", ":8080", "unix:/tmp/health.sock", "http://localhost:8080"])
def test_probes_are_answered_at_a_host_and_a_port(service: str, address: str) -> None:
    refused(service, rf"^\[{service}\]: health_listen must be host:port, .*not '{address}'", health_listen=address)
    for allowed in ("", "[::]:7079", "127.0.0.1:0"):
        config = settings.load(SERVICES[service], service, environ={}, flags={"health_listen": allowed})
        assert config.health_listen == allowed


@pytest.mark.parametrize("date", ["today", "", "2026-13-01"])
def test_a_date_of_another_form_is_refused_by_its_name(date: str) -> None:
    refused("worker", r"^\[worker\]: template_date must be YYYY-MM-DD: ", template_date=date)


def test_an_empty_embedder_is_not_the_working_directory() -> None:
    refused("gateway", "embedder is empty: write none to search by BM25 only", embedder="")


def test_milvus_has_no_language() -> None:
    """Its texts are not stemmed, in any."""
    message = r"language \('german'\) applies to corpora in data_dir, not to milvus_url"
    refused("gateway", message, milvus_url="http://127.0.0.1:1", language="german")


@pytest.mark.parametrize("host", ["http://cache-0", "cache-0:7070", "[::1]"])
def test_the_host_of_the_data_plane_has_no_port(host: str) -> None:
    refused("kvcache", "data_host must be a host name or an address, without a port", data_host=host)
    for allowed in ("", "cache-0.caches", "10.0.0.7", "fd00::7"):
        assert settings.load(Config, "kvcache", environ={}, flags={"data_host": allowed}).data_host == allowed


@pytest.mark.parametrize(
    ("service", "name"), [("worker", "lookup_timeout"), ("worker", "fetch_timeout"), ("gateway", "request_seconds")]
)
def test_more_seconds_than_grpc_counts_are_refused(service: str, name: str) -> None:
    """A call with 1e10 seconds ended at once."""
    refused(service, "not a number up to 1e9", **{name: "1e10"})
    settings.load(SERVICES[service], service, environ={}, flags={name: "1e9"})


def test_threads_that_no_machine_has_are_refused() -> None:
    refused("worker", r"--threads: 5000 is outside 0\.\.1024", threads="5000")


def test_a_floor_needs_answers_that_are_compared() -> None:
    with pytest.raises(SettingsError, match="shadow_floor needs shadow_share: no answers are compared"):
        configured(None, {"shadow_floor": "0.9"})
