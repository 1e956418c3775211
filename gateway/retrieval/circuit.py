"""Circuit breaker: stops calling a server after several timeouts in a row, except for occasional trial calls."""

import logging
import threading
import time

from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)
# Timeouts in a row that open the circuit. Calls with a shorter timeout than MIN_SECONDS do not count.
_FAILURES, MIN_SECONDS = 3, 1.0
# Pause between trials, and timeout of a trial, which its caller spends in vain if the server is still down.
REST_SECONDS, TRIAL_SECONDS = 2.0, 5.0


class Circuit:
    """Circuit breaker of one server. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failures = 0
        self._trial = 0.0  # time of the next trial call while the circuit is open

    def admit(self) -> float | None:
        """Admits a call; returns its maximum duration in seconds, or None for no limit.

        Raises:
            Unavailable: the circuit is open.
        """
        with self._lock:
            if self._failures < _FAILURES:
                return None
            now = time.monotonic()
            if now < self._trial:
                raise Unavailable(
                    f"{self._name} did not answer the last {self._failures} calls; "
                    f"the next attempt is in {self._trial - now:.1f} s"
                )
            self._trial = now + TRIAL_SECONDS  # no other call may try until then
            return TRIAL_SECONDS

    def answered(self) -> None:
        """Records an answer, which closes the circuit."""
        with self._lock:
            if self._failures >= _FAILURES:
                log.info("%s is answering again", self._name)
            self._failures = 0

    def unanswered(self, seconds: float) -> None:
        """Records that a call with a timeout of `seconds` got no answer."""
        with self._lock:
            if seconds < MIN_SECONDS:
                return
            self._failures += 1
            self._trial = time.monotonic() + REST_SECONDS
            if self._failures == _FAILURES:
                log.warning("%s did not answer %d calls in a row: refusing further calls", self._name, _FAILURES)
