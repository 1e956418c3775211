"""Object stores (S3, Google Cloud Storage, Azure), and directories of shared file systems, as backends of the remote
tier."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from fusionkv.kvcache_service.config import OBJECT_SCHEMES
from fusionkv.kvcache_service.remote.tier import RemoteEngine
from fusionkv.kvcache_service.tiers.base import Unreachable

A = TypeVar("A")
R = TypeVar("R")

# Requests at the same time: of lookups, of copies, and of renewals and deletions, which may be 1,500 at once: nothing
# else must wait for them.
_LOOKUPS, _COPIES, _OTHERS = 32, 16, 16
# A value is read in ranges of this size, and written in parts of it: S3 refuses parts below 5 MiB.
_PART_BYTES, _PARTS = 8 << 20, 2
_BATCH = 1000
# Seconds that the start waits for the store's answer.
_CHECK_SECONDS = 5.0
_RETRIES = 1
# Refusals by the store itself; all other statuses, and connections that fail, may be over at the next try.
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d")


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The objects of a bucket, or the files of a directory. device: number of the directory's file system."""

    url: str
    store: Any
    directory: str
    device: int

    def get(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return obstore.get(self.store, _path(name)).bytes().to_bytes()
        return None

    def get_range(self, piece: tuple[str, int, int]) -> tuple[int, Any] | None:
        """Size of a value, and some of its bytes."""
        name, start, length = piece
        try:
            reply = obstore.get(self.store, _path(name), options={"range": (start, start + length)})
            return reply.meta["size"], reply.bytes()
        except FileNotFoundError:
            return None
        except BaseError as error:
            # An empty object, as a crash of a file server leaves it, has no range.
            if self._refused(error) and obstore.head(self.store, _path(name))["size"] <= start:
                return None
            raise

    def put(self, value: tuple[str, bytes]) -> None:
        name, data = value
        # A local file is written elsewhere and renamed, in one piece or in many.
        parts = {"use_multipart": False} if self.directory else {"chunk_size": _PART_BYTES, "max_concurrency": _PARTS}
        try:
            obstore.put(self.store, _path(name), data, **parts)
        except FileNotFoundError as error:
            raise OSError(f"{self.url} takes no object: {_reason(error)}") from error

    def exists(self, name: str) -> bool:
        """Whether there is such a value. None is empty."""
        with contextlib.suppress(FileNotFoundError):
            return bool(obstore.head(self.store, _path(name))["size"])
        return False

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, path)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Translates the errors of obstore."""
        self._check_mount()
        try:
            yield
        except BaseError as error:
            told = f"{self.url} can't be used: {_reason(error)}"
            raise (OSError if self._refused(error) else Unreachable)(told) from error

    def _refused(self, error: BaseError) -> bool:
        return bool(self.directory or _REFUSED.search(str(error)))

    def _check_mount(self) -> None:
        """Raises Unreachable if the directory's file system is not mounted: files would fill the disk below it."""
        if self.directory:
            try:
                mounted = os.stat(self.directory).st_dev == self.device
            except OSError as error:
                raise Unreachable(f"{self.directory} can't be used: {error}") from error
            if not mounted:
                raise Unreachable(f"{self.directory} is in another file system than at the start")


class ObjectEngine(RemoteEngine):
    """Each value is an object. Credentials, regions and endpoints are those of the environment, as for other clients.

    Nothing renews an object: a rule of the bucket deletes it some time after it was written, and a service that still
    uses an entry by then writes it again.
    """

    # A request has a price, whatever its size, and takes 20 ms and more.
    block_bytes = 16 << 20
    renew_seconds = 3600.0
    lookup_values = 8 * _LOOKUPS

    def __init__(self, url: str, *, timeout: float) -> None:
        """Opens the bucket or the directory, and lists it.

        url: s3://BUCKET, gs://BUCKET, az://CONTAINER or file:///DIRECTORY; more of a path prefixes all names.
        timeout: seconds of one request, which is tried twice.

        Raises ValueError if the URL is malformed, OSError if the store refuses, or if it lacks the bucket or the
        directory. A store that does not answer raises nothing: its bucket may exist.
        """
        self._url = url
        self._patience = 3 * timeout + 1
        self._lookups = ThreadPoolExecutor(_LOOKUPS, "kvcache-objects-lookup")
        self._copies = ThreadPoolExecutor(_COPIES, "kvcache-objects-copy")
        self._others = ThreadPoolExecutor(_OTHERS, "kvcache-objects")
        self._ended = 0  # calls
        parts = _checked(url)
        directory, device = unquote(parts.path) if parts.scheme == "file" else "", 0
        if directory:
            try:
                device = self._lookups.submit(_device, directory).result(_CHECK_SECONDS)
            except TimeoutError as error:
                raise OSError(f"{directory} does not answer") from error
        self._bucket = _Bucket(url, _opened(url, parts.scheme, timeout), directory, device)
        with contextlib.suppress(Unreachable, TimeoutError):
            self._lookups.submit(self.probe).result(_CHECK_SECONDS)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return list(self._each(self._lookups, self._bucket.get, names))

    def get_into(self, names: Sequence[str], into: Sequence[memoryview]) -> bool:
        """In ranges at the same time. Copies what has arrived: what comes too late must change no buffer."""
        ranges = [
            (name, len(view), view[at : at + _PART_BYTES], at)
            for name, view in zip(names, into, strict=True)
            for at in range(0, len(view), _PART_BYTES)
        ]
        arrived = self._each(
            self._copies, self._bucket.get_range, [(name, at, len(part)) for name, _, part, at in ranges]
        )
        for (_, size, part, _), value in zip(ranges, arrived, strict=True):
            if value is None or value[0] != size or len(value[1]) != len(part):
                return False
            part[:] = value[1]
        return True

    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        list(self._each(self._copies, self._bucket.put, values))

    def touch(self, names: Sequence[str]) -> list[bool]:
        """Says whether each exists, and renews nothing."""
        return list(self._each(self._others, self._bucket.exists, names))

    def remove(self, names: Sequence[str]) -> None:
        list(self._each(self._others, self._bucket.remove, list(map(_path, names))))

    def remove_all(self, prefix: str) -> None:
        """prefix: ends before a ":", where folders end."""
        with self._bucket.errors():
            for batch in obstore.list(self._bucket.store, _path(prefix.rstrip(":")), chunk_size=_BATCH):
                paths = [entry["path"] for entry in batch]
                try:
                    obstore.delete(self._bucket.store, paths)
                except FileNotFoundError:  # of a directory that another service deletes, too
                    list(self._each(self._others, self._bucket.remove, paths))

    def probe(self) -> None:
        """Lists the bucket: the absence of an object says nothing, since a missing bucket has none either."""
        with self._bucket.errors():
            for _ in obstore.list(self._bucket.store, _path("fusionkv:probe"), chunk_size=1):
                break

    def close(self) -> None:
        for threads in (self._lookups, self._copies, self._others):
            threads.shutdown(wait=False, cancel_futures=True)

    def _each(self, threads: ThreadPoolExecutor, call: Callable[[A], R], given: Sequence[A]) -> Iterator[R]:
        """Results in order, of calls at the same time."""

        def one(argument: A) -> R:
            try:
                with self._bucket.errors():
                    return call(argument)
            finally:
                self._ended += 1

        calls = [threads.submit(one, argument) for argument in given]
        try:
            for running in calls:
                yield self._result(running)
        finally:
            for running in calls:
                running.cancel()

    def _result(self, running: Future[R]) -> R:
        """Waits as long as any calls end: requests have a timeout, but a file system without its server has none."""
        while True:
            ended = self._ended
            if not wait([running], self._patience).done and self._ended == ended:
                raise Unreachable(f"{self._url} does not answer within {self._patience:g} s")
            if running.done():
                return running.result()


def _checked(url: str) -> SplitResult:
    parts = urlsplit(url)
    named = parts.path.startswith("/") and not parts.netloc if parts.scheme == "file" else bool(parts.netloc)
    if parts.scheme not in OBJECT_SCHEMES or not named or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "expected s3://BUCKET, gs://BUCKET, az://CONTAINER or file:///DIRECTORY, optionally with more of "
            "a path; credentials are those of the environment"
        )
    return parts


def _opened(url: str, scheme: str, timeout: float) -> Any:
    """The store of obstore. Raises ValueError if it lacks a setting."""
    options: dict[str, Any] = {
        # An endpoint without TLS is one that the environment names.
        "client_options": {"timeout": timedelta(seconds=timeout), "allow_http": True},
        "retry_config": {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=2 * timeout)},
    }
    if scheme == "file":
        options = {"automatic_cleanup": True}
    elif scheme == "s3":
        # Entries have a checksum: to hash the bytes once more takes two thirds of the CPU time of a put.
        options["config"] = {"unsigned_payload": True}
    try:
        return from_url(url, **options)
    except BaseError as error:
        raise ValueError(_reason(error)) from error


def _device(directory: str) -> int:
    """Number of a directory's file system. Raises OSError if it is none."""
    with os.scandir(directory):
        return os.stat(directory).st_dev


def _path(name: str) -> str:
    """Path of a value: a folder for each part of its name. Braces, which group keys in Redis, mean nothing here."""
    return "/".join(part.strip("{}") or "-" for part in name.split(":"))


def _reason(error: Exception) -> str:
    """What a store answered, or obstore's first line. Without the signature of a URL in it."""
    text = str(error)
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code and message:
        first, _, _ = message[1].partition("\n")
        return f"{first} ({code[1]})"
    return re.sub(r"\b(sig|X-Amz-Signature)=[^&\s]*", r"\1=...", text.partition("\n")[0])
