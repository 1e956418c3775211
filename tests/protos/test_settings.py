"""Where a configuration value comes from, and what is refused."""

import argparse
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.settings import SettingsError, setting


@dataclasses.dataclass(frozen=True)
class Config:
    listen: tuple[str, ...] = setting(("localhost:7100",), "Addresses, with a 100% share.")
    memory: int = setting(1 << 30, "Size of the tier.", bytes=True, low=1)
    ratio: float = setting(0.15, "Share.", low=0, high=1)
    sync: bool = setting(True, "Whether to sync.")
    data: Path = setting(Path("data"), "Folder.")
    remote: str | None = setting(None, "Address, when there is one.")

    def __post_init__(self) -> None:
        if self.remote == self.listen[0]:
            raise ValueError("remote is this service itself")


def load(file: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> Config:
    return settings.load(Config, "kvcache", file=file, environ=environ or {}, flags=flags)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        (tmp_path / "fusionkv.toml").write_text(text)
        return tmp_path / "fusionkv.toml"

    return write


def test_flag_over_environment_over_file_over_default(toml: Any) -> None:
    file = toml("[kvcache]\nratio = 0.2\nmemory = '2MiB'\nsync = false\n[worker]\nanything = 1\n")
    environ = {"FUSIONKV_KVCACHE_RATIO": "0.3", "FUSIONKV_KVCACHE_MEMORY": "3MiB", "FUSIONKV_WORKER_RATIO": "x"}
    config = load(file, environ, ratio="0.4", memory=None)
    assert (config.ratio, config.memory, config.sync, config.data) == (0.4, 3 << 20, False, Path("data"))
    assert load() == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[kvcache]\nmemroy = 1", r"unknown key 'memroy'.*known: data, listen, memory"),
        ("[kvcach]\nmemory = 1", r"unknown table \[kvcach\]"),
        ("kvcache = 5", r"\[kvcache\] is not a table"),
        ("[kvcache", "can't read"),
        ("[kvcache]\nratio = 1.01", r"ratio: 1.01 is outside 0..1"),
        ("[kvcache]\nratio = nan", "ratio: not a finite number"),
        ("[kvcache]\nratio = true", "ratio: not a number: True"),
        ("[kvcache]\nremote = false", "remote: not text: False"),
        ("[kvcache]\nremote = ['localhost:7070']", r"remote: not text: \['localhost:7070'\]"),
        ("[kvcache]\nlisten = [7070]", "listen: not text: 7070"),
        ("[kvcache]\nmemory = 0", "outside 1"),
        ("[kvcache]\nmemory = true", "memory: not an integer"),
        ("[kvcache]\nmemory = 1.5", "memory: not an integer"),
        ("[kvcache]\nmemory = '12 parsecs'", "memory: not a size"),
        ("[kvcache]\nsync = 'perhaps'", "sync: not a boolean"),
        ("[kvcache]\nremote = 'localhost:7100'", "remote is this service itself"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(toml: Any, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(toml(text))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("none.toml", "binary"):
        with pytest.raises(SettingsError, match="can't read the configuration"):
            load(tmp_path / name)


def test_a_file_is_utf_8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "f.toml").write_text("[kvcache]\nratio = 0.2  # \u00e9\n", encoding=encoding)
        assert load(tmp_path / "f.toml").ratio == 0.2


def test_the_environment() -> None:
    unknown = r"unknown environment variable FUSIONKV_KVCACHE_MEMROY; known: .*_MEMORY"
    with pytest.raises(SettingsError, match=unknown):
        load(environ={"FUSIONKV_KVCACHE_MEMROY": "1"})
    with pytest.raises(SettingsError, match="FUSIONKV_KVCACHE_RATIO: could not convert"):
        load(environ={"FUSIONKV_KVCACHE_RATIO": "much"})
    assert load(environ={"FUSIONKV_KVCACHE_LISTEN": "a:1, unix:/x ,"}).listen == ("a:1", "unix:/x")
    # As of a variable that is not set: a service would listen nowhere, or make the working directory its own.
    for name, message in (("LISTEN", "LISTEN: name at least one address"), ("DATA", "DATA: the path is empty")):
        with pytest.raises(SettingsError, match=message):
            load(environ={f"FUSIONKV_KVCACHE_{name}": ""})


def test_help_and_flags_come_from_the_dataclass() -> None:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, Config)
    text = " ".join(parser.format_help().split())
    for shown in (
        "--memory SIZE Size of the tier. (default: 1GiB)", "--sync, --no-sync",
        "Addresses, with a 100% share. (default: localhost:7100)", "Address, when there is one. (default: empty)",
    ):  # fmt: skip
        assert shown in text
    flags = vars(parser.parse_args(["--no-sync", "--memory", "5kb", "--listen", "x:0,y:0"]))
    assert load(**flags) == Config(sync=False, memory=5000, listen=("x:0", "y:0"))
    assert load(**vars(parser.parse_args([]))) == Config()


UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
UNITS |= {"kB": 10**3, "GB": 10**9, "TB": 10**12}


@given(unit=st.sampled_from([*UNITS]), number=st.integers(0, 10**15), space=st.sampled_from(["", " ", "  "]))
def test_a_whole_size_is_exact(unit: str, number: int, space: str) -> None:
    assert settings.parse_bytes(f"{space}{number}{space}{unit}") == number * UNITS[unit]


@given(st.integers(0, 1 << 50) | st.integers(0, 1 << 12).map(lambda n: n << 30))
def test_a_size_reads_back(size: int) -> None:
    assert settings.parse_bytes(settings.format_bytes(size)) == size


@given(st.text(alphabet="0123456789.eE-+ KMGTiBb\n", max_size=400) | st.text(max_size=20))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert settings.parse_bytes(text) >= 0
