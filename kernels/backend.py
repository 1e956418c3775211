"""Which implementation runs on a GPU; decided, and said, once."""

import logging
from functools import cache

log = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Whether the Triton kernels can be used; without them a GPU computes by the dense reference."""
    try:
        from fusionkv.kernels.gpu import attention_scores_triton, sparse_attention_triton  # noqa: F401
    except (ImportError, AttributeError) as error:
        log.warning("attention runs dense and slow: no Triton of version 3.6 or later (%s)", error)
        return False
    return True
