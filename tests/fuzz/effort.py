"""How much a fuzz test does: a few examples in `make test`, always the same; as long as it may in `make fuzz`."""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.examples import examples

# Of each test; 0 takes as many examples as the run wants (tests/examples.py).
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
# Inputs of a round, and at least so many examples: time is looked at after each.
_ROUND, _EXAMPLES = 200, 10

done: Counter[str] = Counter()


def fuzz(target: Callable[[Any], None], inputs: SearchStrategy[Any], few: int = 60, each: int = 1) -> None:
    """Calls `target` with inputs; what it raises fails the test, with the smallest input that hypothesis can find.

    each: how many it makes of one.
    """
    began, number = time.monotonic(), SEED
    while True:

        @seed(number)
        @settings(
            max_examples=max(_EXAMPLES, _ROUND // each) if SECONDS else examples(few),
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        @given(inputs)
        def once(given_input: Any) -> None:
            done[target.__name__] += each
            target(given_input)

        once()
        number += 1
        if time.monotonic() - began >= SECONDS:
            return
