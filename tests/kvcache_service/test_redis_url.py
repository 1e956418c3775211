"""No part of a password is said where a Redis' URL is malformed, nor when a service starts with it."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from redis import Redis

from fusionkv.kvcache_service.__main__ import make_sharing
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.remote.redis_engine import RedisEngine, connect

# In each the parser takes some of the password for something else, a port for example.
MALFORMED = [
    "redis://:sesame/open@redis:6379", "redis://:sesame?open@redis:6379", "redis://:sesame#open@redis:6379",
    "redis://:31337/sesame@redis:6379", "redis://user:31337?sesame@redis:6379", "redis://:31337#sesame@redis:6379",
    "redis://:[sesame@redis:6379", "sesame", "https://:sesame@redis:6379", "redis://:sesame?open=31337@redis:6379",
]  # fmt: skip
FINE = [
    "redis://redis:6379", "redis://:open@sesame@redis:6379/1", "rediss://user:sesame@redis?db=2", "unix:///run/a@b",
    "redis://redis?password=open@sesame", "redis://",
]  # fmt: skip


@pytest.mark.parametrize("url", MALFORMED)
def test_an_error_quotes_nothing_of_the_url(url: str) -> None:
    with pytest.raises(ValueError, match="not a Redis URL") as raised:
        connect(Redis, url)
    error: BaseException | None = raised.value
    while error is not None:
        assert not any(part in str(error) for part in ("sesame", "open", "31337"))
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("query", ["ssl_ca_cert=ca.crt", "ssl_cert_reqs=always", "protocol=9"])
def test_an_option_that_there_is_not_is_refused_before_any_call(query: str) -> None:
    """A misspelt one of TLS, or one of TLS without it."""
    for scheme in ("redis", "rediss"):
        with pytest.raises(ValueError, match="not a Redis URL"):
            RedisEngine(f"{scheme}://redis:6379?{query}", ttl=60, timeout=1)


@pytest.mark.parametrize("url", FINE)
def test_others_are_taken_as_they_are(url: str) -> None:
    made, expected = connect(Redis, url, socket_timeout=3), Redis.from_url(url, socket_timeout=3)
    options, there = (client.connection_pool.connection_kwargs for client in (made, expected))
    for name in ("host", "port", "db", "path", "username", "password", "socket_timeout"):
        assert options.get(name) == there.get(name)
    made.close()
    expected.close()


def test_what_a_start_says_names_the_setting(tmp_path: Path) -> None:
    file, store = tmp_path / "password", Mock()
    file.write_bytes(b"\xffsesame")
    with pytest.raises(OSError, match=f"remote_password can't be used: {file} is not text"):
        make_sharing(Config(remote_url="redis://redis:6379", remote_password=file), store)
    with pytest.raises(OSError, match="remote_url can't be used: not a Redis URL") as raised:
        make_sharing(Config(remote_url=MALFORMED[0]), store)
    assert "sesame" not in str(raised.value)
    ca = tmp_path / "ca"
    with pytest.raises(OSError, match=f"can't read the CA certificates {ca}: No such file"):
        make_sharing(Config(remote_url=f"rediss://redis:6379?ssl_ca_certs={ca}"), store)
