"""Counts the lines of the code, and the files that take part in answering a question: `make figures`.

A cache service, a worker and a gateway run in this process. A corpus is stored and asked about three times; the files
whose functions are called during the third answer are counted.
"""

import argparse
import asyncio
import contextlib
import json
import runpy
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from fusionkv import AsyncClient
from fusionkv.fusion_worker import __main__ as worker
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.gateway import __main__ as gateway
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service import __main__ as kvcache
from fusionkv.kvcache_service.config import Config
from fusionkv.protos.runtime.errors import ServiceError

ROOT = Path(__file__).parents[1]
PRODUCT: tuple[str, ...] = runpy.run_path(str(ROOT / "setup.py"))["PRODUCT"]
REFERENCE = ("configuration", "methods", "structure", "kernels")
START_SECONDS = 60
PAGES = 4


class Called:
    """Records the project's files whose functions are called while `on`, in all threads that start later."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[Path] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call":
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(ROOT) and "_pb2" not in file.name and frame.f_code.co_name != "<module>":
                self.files.add(file.relative_to(ROOT))


async def question_files(model: Path) -> set[Path]:
    """The files that take part in answering a question with a warm cache.

    Raises:
        ServiceError: the services did not start, or did not answer.
    """
    called = Called()
    with tempfile.TemporaryDirectory() as folder:
        at = {name: f"unix:{folder}/{name}" for name in ("kvcache", "worker", "gateway")}
        cache = Config(listen=(at["kvcache"],), data_dir=Path(folder) / "cache", disk_bytes=1 << 30)
        own = WorkerConfig(listen=(at["worker"],), model=model, cache=at["kvcache"], pool_bytes=256 << 20)
        corpora = Path(folder) / "corpora"
        front = GatewayConfig(listen=(at["gateway"],), workers=(at["worker"],), data_dir=corpora, embedder="none")
        running = [asyncio.ensure_future(kvcache.run(cache))]
        running += [asyncio.ensure_future(served) for served in (worker._serve(own), gateway._serve(front))]
        try:
            async with AsyncClient(at["gateway"], timeout=START_SECONDS) as client:
                for number in range(PAGES):
                    await client.ingest("pages", f"{number}.txt", f"The colour of Name{number} is {number}.")
                for _ in range(3):
                    called.files.clear()
                    called.on = True
                    await client.ask("pages", "colour of Name1?", top_k=PAGES, max_tokens=4)
                    called.on = False
        finally:
            for service in running:
                service.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return {file for file in called.files if file.parts[0] in PRODUCT and "client" not in file.parts[1:2]}


def lines(*folders: str) -> int:
    """Lines of Python, without generated files."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if "_pb2" not in file.name]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def words() -> int:
    """Words of the README and the pages for users, without the generated reference and pages for contributors.

    What has no letter and no digit, such as the rule of a table, is no word.
    """
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.stem not in REFERENCE)]
    return sum(any(map(str.isalnum, word)) for page in pages for word in page.read_text(encoding="utf-8").split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/eased-3", help="model directory (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # services print their addresses
            files = sorted(asyncio.run(question_files(resolve(args.model))))
    except (ServiceError, OSError) as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1
    figures = {
        "product_lines": lines(*PRODUCT),
        "bench_lines": lines("bench"),
        "test_lines": lines("tests"),
        "words_for_users": words(),
        "files_of_a_question": len(files),
    }
    if args.json:
        print(json.dumps({**figures, "files": [str(file) for file in files]}))
        return 0
    for name, figure in figures.items():
        print(f"{name.replace('_', ' '):22} {figure:7,}")
    for folder, count in sorted(Counter(str(file.parent) for file in files).items()):
        print(f"  {folder:28} {count:3}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
