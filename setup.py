"""Generates the gRPC stubs from protos/ whenever the package is built or installed; they are never committed."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def generate_stubs() -> None:
    """Writes `protos/<name>/v1/<name>_pb2*.py`, importable as `fusionkv.protos.<name>.v1`."""
    from grpc_tools import protoc

    files = sorted((ROOT / "protos").glob("*/v1/*.proto"))
    # The virtual path makes the generated modules import each other below `fusionkv.protos`.
    args = ["protoc", f"-Ifusionkv/protos={ROOT / 'protos'}"]
    outputs = [f"--{kind}_out={ROOT / '.protos'}" for kind in ("python", "pyi", "grpc_python")]
    (ROOT / ".protos").mkdir(exist_ok=True)
    names = [f"fusionkv/protos/{f.relative_to(ROOT / 'protos')}" for f in files]
    if protoc.main([*args, *outputs, *names]) != 0:
        raise SystemExit("protoc failed: see the messages above")
    for made in (ROOT / ".protos" / "fusionkv" / "protos").rglob("*_pb2*"):
        made.replace(ROOT / "protos" / made.relative_to(ROOT / ".protos" / "fusionkv" / "protos"))
    for left in sorted((ROOT / ".protos").rglob("*"), reverse=True):
        left.rmdir()
    (ROOT / ".protos").rmdir()


class BuildPy(build_py):
    """build_py, after the stubs."""

    def run(self) -> None:
        generate_stubs()
        super().run()


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildPy})
