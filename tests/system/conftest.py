"""Three cache services over one Redis, for the tests of a module."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.system.redis_process import RedisServer
from tests.system.shared_services import Services


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    yield made
    made.kill9()


@pytest.fixture(scope="module")
def services(launch_module: Any, tmp_path_factory: pytest.TempPathFactory, server: RedisServer) -> Services:
    made = Services(launch_module, tmp_path_factory.mktemp("services"), server)
    for _ in range(3):
        made.start()
    return made


@pytest.fixture
async def cluster(services: Services) -> AsyncIterator[Services]:
    """Three services that share a Redis, and are empty, as it is."""
    await services.emptied()
    yield services
    await services.close()
