"""The asynchronous client: concurrent questions, and a streamed answer (`python examples/python_async.py`)."""

import argparse
import asyncio

from fusionkv import DEFAULT_ADDRESS, AsyncClient, ServiceError, Sources, Summary, Token

PAGES = {
    "ballakmi-01.txt": "Report Ballakmi. The city of Tanvan is Janberg. The code of Bervek is 535.",
    "ballakmi-02.txt": "Report Ballakmi. On Friday the lake sleeps. The age of Dorlin is 41.",
}
QUESTIONS = (
    "Report Ballakmi: city of Tanvan?",
    "Report Ballakmi: code of Bervek?",
    "Report Ballakmi: age of Dorlin?",
)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", default=DEFAULT_ADDRESS, help="address of the gateway (default: %(default)s)")
    flags = parser.parse_args()
    async with AsyncClient(flags.gateway, timeout=60) as client:
        await asyncio.gather(*(client.ingest("example-async", name, text) for name, text in PAGES.items()))

        # The worker decodes the answers in one batch.
        asked = (client.ask("example-async", question, max_tokens=16) for question in QUESTIONS)
        for question, answer in zip(QUESTIONS, await asyncio.gather(*asked), strict=True):
            print(f"{question} {answer.text.strip()}")

        # Leaving the loop early cancels the call, and the worker stops computing the answer.
        async for event in client.stream("example-async", QUESTIONS[0], max_tokens=16):
            match event:
                case Sources(passages):
                    print("from:", ", ".join(p.document for p in passages))
                case Token(text=text):
                    print(text, end="", flush=True)
                case Summary(tokens_lossless=lossless, context_tokens=context):
                    print(f"\n{lossless} of {context} context tokens were exact hits in the cache")
        await client.delete("example-async")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ServiceError as error:
        raise SystemExit(f"{error.status.name}: {error}") from error
