"""What only a remote tier of objects has: large blocks, a bucket that may be missing, stores that answer wrongly."""

import contextlib
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fusionkv.kvcache_service.__main__ import make_sharing
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.remote.tier import RemoteTier
from fusionkv.kvcache_service.tiers.base import Unreachable
from tests.kvcache_service.tools import NAMESPACE, record
from tests.system.object_process import ENVIRONMENT, Directory, ObjectServer
from tests.waiting import wait_until

pytestmark = pytest.mark.system
object_engine: Any = pytest.importorskip("fusionkv.kvcache_service.remote.object_engine", exc_type=ImportError)
CUT = b"and no more"
HEAD = 'ETag: "x"\r\nLast-Modified: Sat, 28 Nov 2026 11:34:09 GMT\r\n'


@pytest.fixture(scope="module", params=[ObjectServer, Directory])
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    started = request.param(tmp_path_factory.mktemp("remote"))
    yield started
    started.kill9()


@contextlib.contextmanager
def connected(url: str, timeout: float = 20) -> Iterator[Any]:
    with contextlib.closing(object_engine.ObjectEngine(url, timeout=timeout)) as engine:
        yield engine


def test_blocks_come_back_in_parts_and_ranges(remote: Any) -> None:
    """The last block has a whole part, and a byte more."""
    with connected(remote.url) as engine:
        tier, block = RemoteTier(engine), engine.block_bytes
        data = os.urandom(block + object_engine._PART_BYTES + 1)
        made = record("S", data)
        tier.write(made, 0, [data[:block], data[block:]])
        tier.commit(made)
        assert tier.touch([made]) == [True]
        into = bytearray(len(data))
        tier.read(made, 0, memoryview(into))
        assert into == data
        names = tier._blocks(made)
        rest = len(data) - block
        for sizes in ((block, rest - 1), (block - 1, rest), (block, rest + object_engine._PART_BYTES)):
            assert not engine.get_into(names, [memoryview(bytearray(size)) for size in sizes])
        tier.delete_all(NAMESPACE)
        assert engine.touch(names) == [False, False]


def test_what_a_crash_emptied_is_missing(remote: Any) -> None:
    with connected(remote.url) as engine:
        tier, data = RemoteTier(engine), os.urandom(1000)
        made = record("S", data)
        tier.commit(made)
        for left in (999, 1, 0):
            tier.write(made, 0, [data[:left]])
            with pytest.raises(FileNotFoundError):
                tier.read(made, 0, memoryview(bytearray(1000)))
        assert tier.touch([made]) == [False]


MALFORMED = [
    "s3://", "s3:///prefix", "s3://key:sesame@bucket", "s3://bucket?secret=sesame", "gs://bucket#sesame", "az://account",
    "file://host/directory", "file:directory", "https://bucket",
]  # fmt: skip


@pytest.mark.parametrize("url", MALFORMED)
def test_a_malformed_url_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected s3://BUCKET|Account must be specified") as raised:
        object_engine.ObjectEngine(url, timeout=1)
    assert "sesame" not in str(raised.value)


@pytest.mark.parametrize("remote", [ObjectServer], indirect=True)
def test_a_service_does_not_start_without_its_bucket(remote: Any, tmp_path: Path) -> None:
    for url, why in (
        ("s3://missing", r"s3://missing can't be used: The specified bucket does not exist \(NoSuchBucket\)"),
        (f"file://{tmp_path}/missing", f"No such file or directory: '{tmp_path}/missing'"),
        ("s3://", "remote_url can't be used: expected s3://BUCKET"),
    ):
        with pytest.raises(OSError, match=why):
            make_sharing(Config(remote_url=url), Mock())


Answer = Callable[[str], bytes | None]


@contextlib.contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> Iterator[list[str]]:
    """An S3 that answers so; nothing for None, until the end. Gives the methods that it was asked."""
    asked, ended = list[str](), threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline().decode():
                size = 0
                while header := self.rfile.readline().decode().lower().strip():
                    size = int(header.partition(":")[2]) if header.startswith("content-length:") else size
                self.rfile.read(size)
                asked.append(line.split()[0])
                told = answer(line)
                if told is None:
                    ended.wait(60)
                    return
                self.wfile.write(told)
                if told.endswith(CUT):
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

        def handle_error(self, request: socket.socket, address: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for name, value in {
            **ENVIRONMENT,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}",
        }.items():
            monkeypatch.setenv(name, value)
        try:
            yield asked
        finally:
            ended.set()
            server.shutdown()


def reply(status: str, body: bytes = b"", headers: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{HEAD}{headers}Content-Length: {size}\r\n\r\n".encode() + body


EMPTY = reply("200 OK", b"<ListBucketResult></ListBucketResult>")


def test_one_that_refuses_is_told_apart_from_one_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is final, at the start, too; anything else is tried twice, and is a store that is away."""
    denied = "403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>Access is denied</Message></Error>"
    replies = {"list": ("200 OK", b"<ListBucketResult></ListBucketResult>"), "else": denied}

    def answer(line: str) -> bytes:
        status, body = replies["list" if "list-type" in line else "else"]
        return reply(status, b"" if line.startswith("HEAD") else body)

    with faulty(monkeypatch, answer) as asked, connected("s3://bucket", timeout=5) as engine:
        calls = [lambda: engine.put([("a", b"1")]), lambda: engine.get(["a"]), lambda: engine.touch(["a"])]
        for call in calls:
            asked.clear()
            with pytest.raises(OSError, match="can't be used") as error:
                call()
            assert not isinstance(error.value, Unreachable)
            assert len(asked) == 1
        for status in ("503 Slow Down", "500 Internal Server Error", "429 Too Many Requests"):
            replies["else"] = status, b""
            for call in calls:
                asked.clear()
                with pytest.raises(Unreachable):
                    call()
                assert len(asked) <= 2
        replies["list"] = denied
        with pytest.raises(OSError, match=r"Access is denied \(AccessDenied\)"):
            object_engine.ObjectEngine("s3://bucket", timeout=5)
        replies["list"] = "503 Slow Down", b""
        with connected("s3://bucket", timeout=5) as other, pytest.raises(Unreachable):
            other.probe()


@pytest.mark.parametrize("how", ["cut", "whole", "short", "other range", "other size", "silent"])
def test_wrong_answers_are_never_bytes(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A store that cuts replies, that knows no ranges, or sends others than were asked for."""
    size, good = 1000, bytes(1000)
    wrong = {
        "cut": reply("206 Partial Content", bytes(200) + CUT, f"Content-Range: bytes 0-999/{size}\r\n", size),
        "whole": reply("200 OK", good + b"1"),
        "short": reply("206 Partial Content", good[:500], f"Content-Range: bytes 0-499/{size}\r\n"),
        "other range": reply("206 Partial Content", good, f"Content-Range: bytes 500-1499/{2 * size}\r\n"),
        "other size": reply("206 Partial Content", good, f"Content-Range: bytes 0-999/{2 * size}\r\n"),
        "silent": None,
    }[how]
    with (
        faulty(monkeypatch, lambda line: EMPTY if "list-type" in line else wrong) as asked,
        connected("s3://bucket", timeout=0.5) as engine,
    ):
        began, filled = time.monotonic(), False
        with contextlib.suppress(Unreachable):
            filled = engine.get_into(["a"], [memoryview(bytearray(size))])
        assert not filled
        assert time.monotonic() - began < 10
        assert asked.count("GET") >= 2


def test_one_that_never_answers_keeps_the_start_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_engine, "_CHECK_SECONDS", 0.2)
    with faulty(monkeypatch, lambda line: None):
        began = time.monotonic()
        with connected("s3://bucket", timeout=30):
            assert time.monotonic() - began < 10


def test_a_directory_is_used_while_its_file_system_is_mounted(tmp_path: Path) -> None:
    """Without it, nothing is written where it was mounted."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs another file system")
    place, mounted, beneath = tmp_path / "place", tmp_path / "mounted", other / f"fusionkv-test-{os.getpid()}"
    mounted.mkdir()
    beneath.mkdir()
    place.symlink_to(mounted)
    try:
        with connected(f"file://{place}") as engine:
            engine.put([("a", b"1")])
            for target in (beneath, tmp_path / "nothing"):
                place.unlink()
                place.symlink_to(target)
                calls: list[Callable[[], Any]] = [
                    lambda: engine.put([("b", b"1")]), lambda: engine.get(["a"]), engine.probe,
                    lambda: engine.touch(["a"]), lambda: engine.remove(["a"]), lambda: engine.remove_all("a"),
                ]  # fmt: skip
                for call in calls:
                    with pytest.raises(Unreachable):
                        call()
            assert not list(beneath.iterdir())
            place.unlink()
            place.symlink_to(mounted)
            assert engine.get(["a", "b"]) == [b"1", None]
    finally:
        beneath.rmdir()


def test_a_directory_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose server is gone does, for as long as it is; what comes late changes no buffer."""
    released = threading.Event()
    with connected(f"file://{tmp_path}", timeout=0.05) as engine:
        engine.put([("a", b"1")])
        get_range, late = object_engine._Bucket.get_range, list[Any]()

        def hang(bucket: Any, wanted: Any) -> Any:
            released.wait(60)
            late.append(get_range(bucket, wanted))
            return late[0]

        monkeypatch.setattr(object_engine._Bucket, "get_range", hang)
        buffer = bytearray(1)
        with pytest.raises(Unreachable, match="does not answer"):
            engine.get_into(["a"], [memoryview(buffer)])
        released.set()
        wait_until(lambda: bool(late))
        assert buffer == bytes(1)


def test_a_full_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import GenericError

    def full(*_: Any, **__: Any) -> None:
        raise GenericError("Generic LocalFileSystem error: No space left on device (os error 28)")

    with connected(f"file://{tmp_path}") as engine:
        monkeypatch.setattr(obstore, "put", full)
        with pytest.raises(OSError, match="No space left on device") as error:
            engine.put([("a", b"1")])
    assert not isinstance(error.value, Unreachable)


def test_a_signature_is_not_logged() -> None:
    told = object_engine._reason(
        Exception("PUT https://a.blob.core.windows.net/c/x?sv=1&sig=sesame&x=1 failed\nDebug")
    )
    assert "sesame" not in told
    assert told.endswith("&x=1 failed")
