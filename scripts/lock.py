"""Writes requirements.lock: what the images install, with a hash of each file that fits them; needs the program uv.

`python scripts/lock.py` asks the indexes that uv is told of (UV_DEFAULT_INDEX, UV_INDEX), by default PyPI, and for
torch for CPUs the index that is named as an argument, by default PyTorch's. Each list names all that it installs,
since pip refuses requirements whose hashes only a constraint has.
"""

import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"
# The Pythons of Debian's and the official images, and of Ubuntu; the glibc of the oldest of them.
PYTHONS = ("3.11.2", "3.12")
PLATFORMS = ("x86_64-manylinux_2_36", "aarch64-manylinux_2_36")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE, EXTRAS = PROJECT["dependencies"], PROJECT["optional-dependencies"]
# What vLLM's image lacks; and gRPC and protobuf, which it may have older than our stubs were generated for, and which
# run stubs of older versions too. What they require, it has.
CONNECTOR = ["grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "xxhash"]
WORKER = [*PACKAGE, *EXTRAS["worker"], *EXTRAS["prometheus"]]
# The lists that the Dockerfile installs.
LISTS = {
    "build": ["setuptools", "wheel", "grpcio-tools"],
    "kvcache": [
        *PACKAGE,
        *(line for e in ("cache", "kv-events", "object-store", "prometheus") for line in EXTRAS[e]),
    ],
    "mooncake": EXTRAS["mooncake"],
    "gateway": [*PACKAGE, *(line for e in ("gateway", "http", "milvus", "prometheus") for line in EXTRAS[e])],
    "worker": WORKER,
    "gpu": [*WORKER, *EXTRAS["gpu"]],
    # What a head of a cluster needs to be given jobs over HTTP.
    "ray": ["ray[default]"],
    "connector": CONNECTOR,
}


def files(name: str, python: str, platform: str, torch_index: str) -> list[tuple[str, str]]:
    """Requirements of a list on a platform, as `name==version`, and the hashes of their files."""
    options = ["--no-deps"] if name == "connector" else []
    if name == "worker":
        options += ["--index", torch_index, "--index-strategy", "unsafe-best-match"]
    command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--only-binary", ":all:", *options]
    command += ["--constraint", "constraints.txt", "--python-version", python, "--python-platform", platform, "-"]
    lines = "\n".join(LISTS[name])
    done = subprocess.run(command, cwd=ROOT, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    found = []
    for package in tomllib.loads(done.stdout)["packages"]:
        found += [(f"{package['name']}=={package['version']}", w["hashes"]["sha256"]) for w in package["wheels"]]
    return found


def main() -> None:
    torch_index = sys.argv[1] if len(sys.argv) > 1 else TORCH_FOR_CPUS
    hashes, lists = defaultdict(set), defaultdict(set)
    for name in LISTS:
        for python in PYTHONS:
            for platform in PLATFORMS:
                for requirement, digest in files(name, python, platform, torch_index):
                    hashes[requirement].add(digest)
                    lists[requirement].add(name)
    sections = defaultdict(list)
    for requirement in sorted(hashes):
        lines = [requirement, *(f"    --hash=sha256:{digest}" for digest in sorted(hashes[requirement]))]
        sections[" ".join(sorted(lists[requirement]))].append(" \\\n".join(lines))
    head = "# What the images install, by the lists of the Dockerfile that hold it. Written by scripts/lock.py."
    blocks = [head, *("\n".join([f"# {names}", *sections[names]]) for names in sorted(sections))]
    (ROOT / "requirements.lock").write_text("\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
