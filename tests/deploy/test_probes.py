"""Kubernetes' probes of services with TLS: they find a process that hangs, which still accepts connections."""

import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.rendering import Render
from tests.services import Launch, start_cache, start_gateway

pytestmark = [pytest.mark.slow, pytest.mark.system]


@pytest.mark.parametrize("name", ["kvcache", "gateway"])
def test_a_service_that_hangs_behind_tls_is_found_within_a_minute(
    render: Render, launch: Launch, authority: Any, tmp_path: Path, name: str
) -> None:
    found = render({"certManager": {"enabled": True}})
    (container,) = found.pod(name)["containers"]
    probes = {kind: container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    (port,) = {probe["grpc"]["port"] for probe in probes.values()}
    assert found.config(name).health_listen == f"[::]:{port}"
    assert port in {each["containerPort"] for each in container["ports"]}
    assert port not in found.traffic(name)[0], "a node's own probes pass network policies, and nobody else needs them"

    cert, key = authority("ca").issue(name)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--health-listen", "127.0.0.1:0")
    if name == "kvcache":
        service = start_cache(launch, tmp_path, *flags, services=3)  # with its data plane
    else:
        service = start_gateway(launch, tmp_path, None, *flags, services=2)
    with grpc.insecure_channel(service.addresses[f"fusionkv-{name}-health"][0]) as channel:

        def check(probe: Any) -> int:
            request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe.get("timeoutSeconds", 1)).status

        assert check(probes["livenessProbe"]) == health_pb2.HealthCheckResponse.SERVING
        ready = "SERVING" if name == "kvcache" else "NOT_SERVING"  # without a worker
        assert check(probes["readinessProbe"]) == health_pb2.HealthCheckResponse.ServingStatus.Value(ready)
        service.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(grpc.RpcError) as raised:
                check(probes["readinessProbe"])
        finally:
            service.process.send_signal(signal.SIGCONT)
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    for kind in ("readinessProbe", "livenessProbe"):
        probe = probes[kind]
        assert probe["periodSeconds"] * probe.get("failureThreshold", 3) + probe["timeoutSeconds"] <= 60
    assert service.stop() == 0
