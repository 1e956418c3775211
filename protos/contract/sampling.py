"""The check of a request's sampling values."""

from fusionkv.protos.fusion.v1.fusion_pb2 import Sampling
from fusionkv.protos.runtime.errors import InvalidArgument

_MAX_TEMPERATURE = 100
_MAX_STOPS, _MAX_STOP = 16, 256


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidArgument if temperature, top_p or a stop string is out of range; other values all have a meaning.

    The number of stop strings is checked before any of them.
    """
    temperature, top_p, stop = sampling.temperature, sampling.top_p, sampling.stop
    if not 0 <= temperature <= _MAX_TEMPERATURE:
        raise InvalidArgument(f"temperature is {temperature:g}: it must be from 0 (greedy) to {_MAX_TEMPERATURE}")
    if not 0 <= top_p <= 1:
        raise InvalidArgument(f"top_p is {top_p:g}: it must be from 0 to 1")
    if len(stop) > _MAX_STOPS or any(not 1 <= len(each) <= _MAX_STOP for each in stop):
        raise InvalidArgument(f"a request takes at most {_MAX_STOPS} stop strings of 1 to {_MAX_STOP} characters")
