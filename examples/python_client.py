"""The Python client: stores documents, asks about them, reads the figures (`python examples/python_client.py`)."""

import argparse

from fusionkv import DEFAULT_ADDRESS, Client, NotFound, ServiceError, Sources, Summary, Token

PAGES = {
    "ballakmi-01.txt": "Report Ballakmi. The garden is blue. Tanvan lives in Janberg.",
    "ballakmi-02.txt": "Report Ballakmi. On Friday the lake sleeps. Balsakko stays with Tanvan.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", default=DEFAULT_ADDRESS, help="address of the gateway (default: %(default)s)")
    flags = parser.parse_args()
    with Client(flags.gateway, timeout=60) as client:
        for name, text in PAGES.items():
            print(client.ingest("example", name, text))

        # As events, while tokens arrive.
        for event in client.stream("example", "Report Ballakmi: city of Balsakko?", max_tokens=16):
            match event:
                case Sources(passages):
                    print("from:", ", ".join(p.document for p in passages))
                case Token(text=text):
                    print(text, end="", flush=True)
                case Summary(seconds=seconds):
                    print(f"\nfirst token after {1e3 * seconds.ttft:.1f} ms")

        # The whole answer at once. The chunks are in the cache now; 30% of their tokens are recomputed.
        answer = client.ask(
            "example", "Report Ballakmi: city of Tanvan?", recipe="prophetkv", ratio=0.3, max_tokens=16
        )
        reused, context = answer.summary.tokens_reused, answer.summary.context_tokens
        print(f"{answer.text} ({reused} of {context} context tokens reused)")

        try:
            client.ask("no-such-corpus", "Anyone there?")
        except NotFound as error:
            print("as expected:", error)
        print(client.delete("example"))


if __name__ == "__main__":
    try:
        main()
    except ServiceError as error:
        raise SystemExit(f"{error.status.name}: {error}") from error
