"""What adapters share: an engine's options, and blobs whose calls raise nothing: a fault of the service is a miss."""

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from fusionkv.kvcache_service.blobs import Blobs, BlobThread
from fusionkv.protos.observe.logs import RateLimitedLog
from fusionkv.protos.runtime.errors import DeadlineExceeded, ServiceError, Unavailable
from fusionkv.protos.runtime.tls import ClientTLS

T = TypeVar("T")
# A service that did not answer in time is not asked again for so long: otherwise, each request would wait for it.
_AWAY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user of an engine sets.

    Attributes:
        cache: address of the cache service, `host:port` or `unix:/path`.
        tenant: only adapters of the same tenant find its blobs.
        weights: names the weights, where the model's name does not: a revision, for example.
        seconds: maximum seconds of a call; after that, it is a miss.
        tls_ca, tls_cert, tls_key: PEM files, as in the services' settings.
    """

    cache: str
    tenant: str = ""
    weights: str = ""
    seconds: float = 5.0
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> "EngineOptions":
        """Raises ValueError for an unknown key, a value of another type, or no address.

        where: what the options are called in errors.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        for key, value in given.items():
            if key not in kinds:
                raise ValueError(f"{where}.{key} is not one of {', '.join(kinds)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if not (number if kinds[key] is float else isinstance(value, str)):
                wanted = "a number above 0" if kinds[key] is float else "a string"
                raise ValueError(f"{where}.{key} is {value!r}, and has to be {wanted}")
        if not given.get("cache"):
            raise ValueError(f"{where}.cache is missing: the address of the cache service")
        return cls(**given)


class EngineBlobs:
    """The blobs of an engine, from any thread. No call raises an error of the service."""

    def __init__(self, options: EngineOptions, layout: Mapping[str, Any], log: logging.Logger) -> None:
        """layout: the engine and everything else that determines what the bytes mean, and that keys leave out."""
        tag = json.dumps({**layout, "weights": options.weights}, sort_keys=True)
        tls = ClientTLS.of(options.tls_ca, options.tls_cert, options.tls_key)
        self._thread = BlobThread(options.cache, layout=tag, tenant=options.tenant, timeout=options.seconds, tls=tls)
        self._address = options.cache
        self._away_until = 0.0
        self._log, self._faults = log, RateLimitedLog(log)

    @property
    def away(self) -> bool:
        """Whether the service did not answer a moment ago."""
        return time.monotonic() < self._away_until

    def run(self, call: Callable[[Blobs], Awaitable[T]], otherwise: T) -> T:
        """The result of a call; `otherwise` after an error or `close`, and at once while the service is away."""
        with suppress(Unavailable):
            return self._thread.run(lambda blobs: self._tried(blobs, call, otherwise))
        return otherwise

    def start(self, call: Callable[[Blobs], Awaitable[T]], otherwise: T, then: Callable[[T], None]) -> None:
        """As `run`, without waiting; `then` gets the result, on the thread of the blobs, or here after `close`."""

        async def work(blobs: Blobs) -> None:
            result = otherwise
            try:
                result = await self._tried(blobs, call, otherwise)
            except Exception:
                self._log.exception("a call of the engine failed")
            finally:
                then(result)

        try:
            self._thread.submit(work)
        except Unavailable:
            then(otherwise)

    def close(self) -> None:
        """Ends calls in progress as after an error, and closes the connections."""
        self._thread.close()

    async def _tried(self, blobs: Blobs, call: Callable[[Blobs], Awaitable[T]], otherwise: T) -> T:
        if self.away:
            return otherwise
        try:
            return await call(blobs)
        except ServiceError as error:
            if isinstance(error, (Unavailable, DeadlineExceeded)):
                self._away_until = time.monotonic() + _AWAY_SECONDS
            self._faults.warning(f"the cache service at {self._address} is passed over", error)
            return otherwise
