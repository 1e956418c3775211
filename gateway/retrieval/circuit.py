"""Stops asking a server that has left several calls in a row without an answer, but for a trial now and then."""

import logging
import threading
import time

from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)
# Calls in a row, each of which was given so many seconds: one with less may only have been in a hurry.
_FAILURES, LEAST_SECONDS = 3, 1.0
# Between trials, and for one at most: who makes it waits in vain if the server is still away.
REST_SECONDS, TRIAL_SECONDS = 2.0, 5.0


class Circuit:
    """Of one server. Safe to be used by several threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failures = 0
        self._trial = 0.0  # from when on one call may try, while the circuit is open

    def admit(self) -> float | None:
        """The seconds that a call may take at most; None for no such limit.

        Raises:
            Unavailable: the circuit is open.
        """
        with self._lock:
            if self._failures < _FAILURES:
                return None
            now = time.monotonic()
            if now < self._trial:
                raise Unavailable(
                    f"{self._name} has not answered {self._failures} calls in a row; "
                    f"it is tried again in {self._trial - now:.1f} s"
                )
            self._trial = now + TRIAL_SECONDS  # of those who come meanwhile none tries too
            return TRIAL_SECONDS

    def answered(self) -> None:
        """Closes the circuit."""
        with self._lock:
            if self._failures >= _FAILURES:
                log.info("%s answers again", self._name)
            self._failures = 0

    def unanswered(self, seconds: float) -> None:
        """A call that was given so many seconds had no answer."""
        with self._lock:
            if seconds < LEAST_SECONDS:
                return
            self._failures += 1
            self._trial = time.monotonic() + REST_SECONDS
            if self._failures == _FAILURES:
                log.warning("%s has not answered %d calls in a row: others are refused", self._name, _FAILURES)
