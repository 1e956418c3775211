"""Commands of the command line where a package is not installed."""

import os
from pathlib import Path

import pytest

from fusionkv.gateway.cli.launch import missing_package
from tests.commands import fusionkv

_HIDES = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{0}":
            raise ModuleNotFoundError("No module named '{0}'", name=name)

sys.meta_path.insert(0, Hidden())
"""


def _without(folder: Path, package: str) -> dict[str, str]:
    """The environment of a Python that does not find the package."""
    (folder / "sitecustomize.py").write_text(_HIDES.format(package))
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.parametrize(
    ("command", "arguments", "package"),
    [
        ("serve kvcache", ["--listen", "127.0.0.1:0"], "lmdb"),
        ("size", ["some-model"], "torch"),
        ("list", [], "grpc"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path: Path, command: str, arguments: list[str], package: str) -> None:
    done = fusionkv(*command.split(), *arguments, status=1, env=_without(tmp_path, package), cwd=tmp_path)
    line = f'fusionkv {command} needs {package}, which is not installed: pip install "fusionkv[all]"\n'
    assert done.stderr == line


def test_services_started_together_say_what_is_missing(tmp_path: Path) -> None:
    env = _without(tmp_path, "lmdb")
    done = fusionkv("serve", "--model", str(tmp_path), "--data-dir", str(tmp_path), status=1, env=env, cwd=tmp_path)
    assert 'serve kvcache needs lmdb, which is not installed: pip install "fusionkv[all]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["fusionkv.gone", "asyncio.gone", "numpy.gone", None])
def test_other_failed_imports_are_raised(name: str | None) -> None:
    error = ModuleNotFoundError("gone", name=name)
    with pytest.raises(ModuleNotFoundError) as raised:
        missing_package("size", error)
    assert raised.value is error
