"""One decoder under atheris: `python -P tests/fuzz/guided.py frame -runs=100000`, and other flags of libFuzzer."""

import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
# Behind everything else: the folder `kernels` must not be found under that name.
sys.path.append(str(ROOT))

# No more than what decodes: to instrument all that it imports takes ten times as long.
_DECODERS = [
    *(
        f"fusionkv.kvcache_service.{module}"
        for module in ("answers", "checks", "keys", "index.record", "remote.tier")
    ),
    *("fusionkv.protos.runtime.frames", "fusionkv.fusion_worker.library.gguf_file", "tests.fuzz.decoders"),
]
with atheris.instrument_imports(include=_DECODERS, enable_loader_override=False):
    from tests.fuzz.decoders import GUIDED


def main() -> None:
    name, *flags = sys.argv[1:]
    target, first = GUIDED[name]
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(first):
            Path(folder, str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], *flags, folder], target)
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
