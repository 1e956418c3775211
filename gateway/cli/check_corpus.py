"""`fusionkv check MODEL --corpus NAME`: questions about a gateway's corpus, for the check to ask.

A question joins the beginnings of two sentences out of passages that are retrieved together, and asks what the
passages say of both. The check needs no expected answer. All other flags are those of `fusionkv check MODEL`.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusionkv.gateway.cli import connect, flags
from fusionkv.gateway.cli.console import patiently, progress_bar
from fusionkv.gateway.cli.files import UsageError
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Passage
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.settings import positive

_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s*\n?")
# Words of a sentence that a question begins with: enough to know it by, too few to hold what it says.
_WORDS = 6
_CHARACTERS = 200  # of a sentence, where nothing ends one for long
# Questions tried for one that is found: documents may be alike, or too small to find two passages of.
_TRIES = 4


def main() -> int:
    """Returns the exit code of the check."""
    parser = argparse.ArgumentParser(
        prog="fusionkv check MODEL --corpus NAME",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--corpus", required=True, metavar="NAME", help="corpus of the gateway to ask about")
    parser.add_argument("--n", type=positive, default=24, help="questions, at most (default: %(default)s)")
    flags.add_flags(parser)
    args, rest = parser.parse_known_args()
    if any(flag.partition("=")[0] == "--data" for flag in rest):
        parser.error("--data and --corpus exclude each other")
    try:
        asked = asyncio.run(_fetch(args))
    except (ServiceError, UsageError, OSError) as error:
        print(f"fusionkv check: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    # The passages are nobody else's to read, and gone when the check is done.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "corpus.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        module = "fusionkv.bench.quality.check"
        argv = [sys.executable, "-P", "-m", module, *rest, "--n", str(args.n), "--data", str(file)]
        try:
            return subprocess.run(argv).returncode
        except KeyboardInterrupt:
            return 130


async def _fetch(args: argparse.Namespace) -> list[dict[str, Any]]:
    async with connect.client(args) as client:
        return await questions(client, args.corpus, args.n, args.timeout)


async def questions(client: AsyncClient, corpus: str, count: int, seconds: float) -> list[dict[str, Any]]:
    """At most `count` questions with the passages that the gateway retrieves for them, as datasets have them.

    seconds: for a call, also while the gateway is busy.

    Raises:
        UsageError: no two passages are ever retrieved together.
        ServiceError: whatever List and Retrieve fail with.
    """
    chance = random.Random(corpus)
    documents = await patiently(lambda: client.list(corpus), seconds)
    found: dict[str, dict[str, Any]] = {}
    with progress_bar(False) as progress:
        bar = progress.add_task("questions", total=count)
        for _ in range(_TRIES * count):
            if len(found) == count or not documents:
                break
            # By its name a document is found, or one like it; its neighbours by what a passage says.
            name = chance.choice(documents).name
            near = await patiently(lambda name=name: client.retrieve(corpus, name), seconds)  # type: ignore[misc]
            if not near:
                continue
            said = _sentence(chance.choice(near), chance)
            together = await patiently(
                lambda said=said: client.retrieve(corpus, said, order="document"),  # type: ignore[misc]
                seconds,
            )
            if len(together) > 1:
                record = _question(together, chance)
                found[record["question"]] = record
                progress.update(bar, completed=len(found))
    if not found:
        raise UsageError(f"no two passages of corpus {corpus!r} are retrieved together, so nothing is to be fused")
    return [*found.values()]


def _question(passages: Sequence[Passage], chance: random.Random) -> dict[str, Any]:
    first, second = (_sentence(passage, chance) for passage in chance.sample(passages, 2))
    begun = " and to ".join(f'"{" ".join(said.split()[:_WORDS])}"' for said in (first, second))
    return {
        "question": f"What do the passages say that belongs to {begun}?",
        "answers": [f"{first} {second}"],
        "ctxs": [{"text": passage.text} for passage in passages],
    }


def _sentence(passage: Passage, chance: random.Random) -> str:
    """One of the passage's sentences; what is too short to be one counts only where there is nothing else."""
    sentences = [said.strip()[:_CHARACTERS] for said in _SENTENCE.split(passage.text) if said.strip()]
    long = [said for said in sentences if len(said.split()) > _WORDS]
    return chance.choice(long or sentences or [passage.text[:_CHARACTERS]])


if __name__ == "__main__":
    sys.exit(main())
