"""Triton kernels, and the tables and tile shapes that they use."""

import logging
from functools import cache

log = logging.getLogger(__name__)
# Channels of a head. With 576, padded to 1,024, a program of 16 rows spills 384 bytes of each thread's registers.
MOST_CHANNELS = 256


@cache
def has_triton() -> bool:
    """Whether the Triton kernels can be used; without them a GPU runs the dense reference. Cached."""
    try:
        from fusionkv.kernels.gpu import sparse_attention_triton  # noqa: F401
    except (ImportError, AttributeError) as error:
        log.warning("Triton 3.6 or later is not available; attention on the GPU is dense and slow: %s", error)
        return False
    return True
