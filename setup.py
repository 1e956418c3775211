"""Lists the packages, and generates the gRPC stubs from protos/ whenever they are built or installed."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
_TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
# Top-level folders, imported as `fusionkv.<folder>`: those of the wheel, and those of a clone alone.
PRODUCT = tuple(folder for folder in _TOOLS["setuptools"]["package-dir"].values() if "/" not in folder)
CLONE = tuple(_TOOLS["fusionkv"]["clone"])
# What is imported as `fusionkv` itself.
API = Path(_TOOLS["setuptools"]["package-dir"]["fusionkv"])


def packages(folders: Iterable[str] = PRODUCT) -> list[str]:
    """Every folder of Python, protos or pages in these top-level folders, by its name below `fusionkv`."""
    files = [f for top in folders for kind in ("py", "proto", "html") for f in (ROOT / top).rglob(f"*.{kind}")]
    found = {folder for f in files for folder in f.relative_to(ROOT).parents if folder.parts}
    return ["fusionkv", *sorted(".".join(("fusionkv", *f.parts)) for f in found - {API, API.parent})]


def generate_stubs(target: Path = ROOT / "protos") -> None:
    """Writes `<name>/v1/<name>_pb2*.py` beside the protos, importable as `fusionkv.protos.<name>.v1`."""
    from grpc_tools import protoc

    files = sorted(target.glob("*/v1/*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    names = [str(file.relative_to(target)) for file in files]
    if protoc.main(["protoc", f"-I{target}", *outputs, *names]) != 0:
        raise SystemExit("protoc failed: see the messages above")
    # protoc names modules by the path of a .proto file, and the stubs live below `fusionkv.protos`: other stubs
    # import them from there, and so does pickle.
    named = re.compile(r"^(from |_builder\.BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')(?=\w+\.v1\b)", re.M)
    for stub in target.glob("*/v1/*_pb2*.py*"):
        stub.write_text(named.sub(r"\1fusionkv.protos.", stub.read_text(encoding="utf-8")), "utf-8")


class BuildPy(build_py):
    """build_py, after the stubs."""

    def run(self) -> None:
        generate_stubs()
        super().run()


class EditableWheel(editable_wheel):
    """editable_wheel, which maps the folders of a clone too."""

    def finalize_options(self) -> None:
        self.distribution.packages = packages((*PRODUCT, *CLONE))
        self.distribution.package_dir |= {f"fusionkv.{folder}": folder for folder in CLONE}
        super().finalize_options()


if __name__ == "__main__":
    setup(packages=packages(), cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
