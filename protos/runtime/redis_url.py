"""A client of the Redis at a URL, or an error that quotes nothing of the URL."""

from typing import Any
from urllib.parse import urlsplit


def connect(kind: Any, url: str, **options: Any) -> Any:
    """`kind.from_url(url)`, where `kind` is one of redis-py's clients.

    Raises:
        ValueError: the URL is malformed. Any part of one may be a part of its password: of `redis://:ab/cd@host` the
            parser says that the port is "ab".
    """
    try:
        parts = urlsplit(url)
        # The password of such a URL ends at an "@", which is no part of what stands before its first "/", "?" or "#".
        cut = parts.path + parts.fragment + ("" if "=" in parts.query else parts.query)
        if parts.scheme == "unix" or "@" not in cut:
            return kind.from_url(url, **options)
    except ValueError:
        pass
    raise ValueError(
        "it is no URL of a Redis (redis://host:port, rediss://host:port, unix:///path): give a password in a file, "
        "or write its characters / ? # @ % as %2F %3F %23 %40 %25"
    )
