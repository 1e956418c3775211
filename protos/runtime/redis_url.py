"""Creates a Redis client from a URL; errors do not quote the URL, which may hold a password."""

from typing import Any
from urllib.parse import urlsplit


def connect(kind: Any, url: str, **options: Any) -> Any:
    """Returns `kind.from_url(url)`, where `kind` is a client class of redis-py.

    Raises:
        ValueError: the URL is malformed. The message does not quote it, because any part may belong to the password:
            for `redis://:ab/cd@host`, the parser reports the port "ab".
    """
    try:
        parts = urlsplit(url)
        # An "@" after the first "/", "?" or "#" means that the password contains one of these characters.
        cut = parts.path + parts.fragment + ("" if "=" in parts.query else parts.query)
        if parts.scheme == "unix" or "@" not in cut:
            return kind.from_url(url, **options)
    except ValueError:
        pass
    raise ValueError(
        "not a Redis URL (redis://host:port, rediss://host:port, unix:///path): put the password in a file, "
        "or write its characters / ? # @ % as %2F %3F %23 %40 %25"
    )
