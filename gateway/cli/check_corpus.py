"""`fusionkv check MODEL --corpus NAME`: runs the check on questions about a corpus of the gateway.

A question quotes the beginnings of two sentences from passages that are retrieved together, and asks what else the
passages say about both. No expected answer is needed. All other flags are those of `fusionkv check MODEL`.
"""

import argparse
import asyncio
import random
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from fusionkv.gateway.cli import connect, shown
from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.cli.console import progress, retry_while_busy
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Passage
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.settings import positive

_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s*\n?")
# Words of a sentence that a question quotes: enough to identify it, too few to contain the answer.
_WORDS = 6
_CHARACTERS = 200  # maximum length of a sentence
# Attempts per question: documents may be alike, or too small for two passages to be retrieved.
_TRIES = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fusionkv check MODEL --corpus NAME",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--corpus", required=True, metavar="NAME", help="corpus to ask questions about")
    parser.add_argument("--n", type=positive, default=24, help="maximum number of questions (default: %(default)s)")
    connect.add_flags(parser)
    args, rest = parser.parse_known_args(argv)
    if any(flag.partition("=")[0] == "--data" for flag in rest):
        parser.error("--data and --corpus can't be combined")
    try:
        records = asyncio.run(_fetch(args))
    except (ServiceError, UsageError, OSError) as error:
        print(f"fusionkv check: {shown.line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    from fusionkv.fusion_worker.evaluate import check  # loads torch, which takes seconds

    return check.main([*rest, "--n", str(args.n)], records)


async def _fetch(args: argparse.Namespace) -> list[dict[str, Any]]:
    async with connect.client(args) as client:
        return await questions(client, args.corpus, args.n, args.timeout)


async def questions(client: AsyncClient, corpus: str, count: int, seconds: float) -> list[dict[str, Any]]:
    """At most `count` questions about a corpus with the passages retrieved for them, as in the check's data sets.

    `seconds` limits each call, including retries while the gateway is busy. Raises UsageError if no two passages were
    ever retrieved together.
    """
    chance = random.Random(corpus)
    documents = await retry_while_busy(lambda: client.list(corpus), seconds)
    records: dict[str, dict[str, Any]] = {}
    with progress(False) as show:
        for _ in range(_TRIES * count):
            if len(records) == count or not documents:
                break
            # The document's name retrieves it or a similar document; a sentence of that retrieves its neighbours.
            nearby = await retry_while_busy(partial(client.retrieve, corpus, chance.choice(documents).name), seconds)
            if not nearby:
                continue
            # In the order in which the gateway puts passages into a prompt.
            sentence = _sentence(chance.choice(nearby), chance)
            together = await retry_while_busy(partial(client.retrieve, corpus, sentence, order="ends"), seconds)
            if len(together) > 1:
                record = _question(together, chance)
                records[record["question"]] = record
                show("questions", len(records), count)
    if not records:
        raise UsageError(f"no two passages of corpus {corpus!r} are retrieved together, so there is nothing to fuse")
    return [*records.values()]


def _question(passages: Sequence[Passage], chance: random.Random) -> dict[str, Any]:
    first, second = (_sentence(passage, chance) for passage in chance.sample(passages, 2))
    quoted = " and to ".join(f'"{" ".join(sentence.split()[:_WORDS])}"' for sentence in (first, second))
    return {
        "question": f"What do the passages say that belongs to {quoted}?",
        "answers": [f"{first} {second}"],
        "ctxs": [{"text": passage.text} for passage in passages],
    }


def _sentence(passage: Passage, chance: random.Random) -> str:
    """One of the passage's sentences; short ones only if there are no others."""
    sentences = [sentence.strip()[:_CHARACTERS] for sentence in _SENTENCE.split(passage.text) if sentence.strip()]
    long = [sentence for sentence in sentences if len(sentence.split()) > _WORDS]
    return chance.choice(long or sentences or [passage.text[:_CHARACTERS]])
