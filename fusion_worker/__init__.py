"""The fusion worker: holds one model, turns chunk references into an answer. Imports of the package load no torch."""

import os
import sys

# libgomp reads it when torch loads it. By default the threads of an operation that is over keep their cores busy for
# milliseconds, which `side_by_side` needs then: attention of 377 rows over 2,285 keys took 1.5 times as long on two
# cores, all of full attention 1.1 times. 5,000 turns are 0.1 ms, longer than from one operation to the next: with
# 2,000 a token took 1.3 times as long to decode.
if "torch" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
