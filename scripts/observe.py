"""`make observe`: runs the services with Arize Phoenix and Prometheus under traffic, and takes screenshots."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
from browser import Page, browsing

from fusionkv.gateway.client.client import AsyncClient

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "build/observe"
CORPUS = ROOT / "examples/corpus"
SERVICES = ("kvcache", "worker", "gateway")
RECIPES = ("default", "prophetkv", "full_reuse")
# How long a service may take to start, and Phoenix to store a trace.
UP_SECONDS = 300


def port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number: int = listening.getsockname()[1]
        return number


@contextlib.asynccontextmanager
async def running(name: str, command: Sequence[str | Path], folder: Path, **env: str) -> AsyncIterator[None]:
    """Runs a process until the end of the block; its output goes to folder/name.log."""
    with (folder / f"{name}.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *map(str, command), stdout=log, stderr=log, env={**os.environ, **env}, cwd=folder
        )
    try:
        yield
    finally:
        # Ctrl-C ends the process as well.
        ended = process.returncode is not None and not isinstance(sys.exception(), asyncio.CancelledError)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        if ended:
            said = await asyncio.to_thread(Path(log.name).read_text)
            raise SystemExit(f"{name} ended:\n{said[-3000:]}")


async def answering(url: str) -> None:
    """Waits until the URL answers with status 200."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(UP_SECONDS):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)


def settings(ports: dict[str, int], http: int, model: Path) -> str:
    """The services' configuration, with scrape endpoints and the gateway's HTTP endpoint."""
    tables = [f'[{name}]\nmetrics_listen = "127.0.0.1:{ports[name]}"\n' for name in SERVICES]
    tables[1] += f'model = "{model}"\nshadow_share = 0.2\n'
    return "\n".join(tables) + f'http_listen = ["127.0.0.1:{http}"]\n'


def scraping(ports: dict[str, int]) -> str:
    """The configuration of Prometheus, with the chart's alerts."""
    targets = [f"127.0.0.1:{ports[name]}" for name in SERVICES]
    return json.dumps(
        {
            "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
            "rule_files": [str(ROOT / "k8s/fusionkv/files/rules.yaml")],
            "scrape_configs": [{"job_name": "fusionkv", "static_configs": [{"targets": targets}]}],
        }
    )


async def traffic(address: str, seconds: float) -> str:
    """Asks questions about the example corpus, two at a time; returns the trace id to show."""
    questions = json.loads((CORPUS / "questions.json").read_text())
    best, trace_id = -1.0, ""
    async with AsyncClient(address, timeout=120) as client:
        for shelf in sorted(CORPUS.glob("shelf-*")):
            for file in sorted(shelf.glob("*.md")):
                await client.ingest("shelves", f"{shelf.name}/{file.name}", file)
        began = time.time()
        for i in range(1 << 30):
            asked = [questions[(2 * i + n) % len(questions)]["question"] for n in range(2)]
            recipe = RECIPES[i % len(RECIPES)]
            answers = await asyncio.gather(*(client.ask("shelves", q, recipe=recipe, max_tokens=24) for q in asked))
            for summary in (a.summary for a in answers):
                # Show the trace with the most kinds of hits, misses and fetches.
                kinds = {hit.kind for hit in summary.hits}
                rich = len(kinds) + bool(summary.chunks_missed) + bool(summary.bytes_fetched)
                if summary.tokens_recomputed and rich > best:
                    best, trace_id = rich, summary.trace_id
            if time.time() > began + seconds:
                return trace_id
    raise AssertionError


async def pictures(out: Path, chromium: str, phoenix: str, trace_id: str) -> None:
    """Takes a screenshot of a trace."""
    async with browsing(chromium) as page:
        # High enough for the whole tree of spans.
        await page.size(1440, 1400)
        # Retry until Phoenix has stored the whole trace.
        async with asyncio.timeout(UP_SECONDS):
            while True:
                await page.open(f"{phoenix}/redirects/traces/{trace_id}")
                with contextlib.suppress(TimeoutError):
                    await page.until("document.body.innerText.includes('fusionkv.prefill')", 60)
                    break
        for selector, begins in (("button, a, [role=button], span", "chat "), ("[role=tab]", "Attributes")):
            found = f"[...document.querySelectorAll('{selector}')].find((e) => e.textContent.startsWith('{begins}'))"
            await page.until(found)
            await page.value(f"{found}.click()")
            await settled(page)
        await page.picture(out / "trace.png")


async def alerts(prometheus: str) -> str:
    """Summarises the alerts' states. Raises SystemExit when Prometheus could not evaluate one."""
    async with aiohttp.ClientSession() as session, session.get(f"{prometheus}/api/v1/rules") as response:
        rules = [rule for group in (await response.json())["data"]["groups"] for rule in group["rules"]]
    if broken := [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] != "ok"]:
        raise SystemExit("\n".join(broken))
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    return f"{len(rules)} alerts, of which are firing: {', '.join(firing) or 'none'}"


async def settled(page: Page) -> None:
    """Waits until the page has not changed for a second, at most ten seconds."""
    await page.value(
        "new Promise((done) => { let last = setTimeout(done, 1000); setTimeout(done, 10000);"
        "new MutationObserver(() => { clearTimeout(last); last = setTimeout(done, 1000) })"
        ".observe(document, {subtree: true, childList: true, attributes: true, characterData: true}) })"
    )


def tool(name: str, *places: Path) -> str:
    for place in places:
        if place.exists():
            return str(place)
    if (found := shutil.which(name)) is None:
        raise SystemExit(f"{name} is not installed: run scripts/setup.sh observe")
    return found


async def observe(flags: argparse.Namespace) -> None:
    phoenix = tool("phoenix", TOOLS / "bin/phoenix")
    prometheus = tool("prometheus", TOOLS / "prometheus/usr/bin/prometheus")
    chromium = tool("chromium")
    ports = {name: port() for name in (*SERVICES, "gateway-grpc", "http", "phoenix", "phoenix-grpc", "prometheus")}
    at = {name: f"http://127.0.0.1:{number}" for name, number in ports.items()}
    with tempfile.TemporaryDirectory(prefix="fusionkv-observe-") as made:
        folder = Path(made)
        (folder / "fusionkv.toml").write_text(settings(ports, ports["http"], flags.model.absolute()))
        (folder / "prometheus.yml").write_text(scraping(ports))
        phoenix_settings = {
            "PHOENIX_WORKING_DIR": made,
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(ports["phoenix"]),
            "PHOENIX_GRPC_PORT": str(ports["phoenix-grpc"]),
            "PHOENIX_TELEMETRY_ENABLED": "false",
            "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        }
        own = ("--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{ports['prometheus']}")
        own += (f"--storage.tsdb.path={folder / 'prometheus'}",)
        gateway = f"127.0.0.1:{ports['gateway-grpc']}"
        ours = (Path(sys.executable).parent / "fusionkv", "serve", "--config", "fusionkv.toml", "--listen", gateway)
        exported = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": at["phoenix-grpc"],
            # Phoenix accepts only traces.
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_RESOURCE_ATTRIBUTES": "openinference.project.name=fusionkv",
        }
        async with running("phoenix", (phoenix, "serve"), folder, **phoenix_settings):
            print("starting Phoenix ...", flush=True)
            await answering(f"{at['phoenix']}/readyz")
            async with (
                running("fusionkv", ours, folder, **exported),
                running("prometheus", (prometheus, *own), folder),
            ):
                print("starting the services ...", flush=True)
                await answering(f"{at['http']}/health")
                await answering(f"{at['prometheus']}/-/ready")
                print(f"traffic for {flags.seconds:g} s ...", flush=True)
                trace_id = await traffic(gateway, flags.seconds)
                flags.out.mkdir(parents=True, exist_ok=True)
                print(await alerts(at["prometheus"]), flush=True)
                await pictures(flags.out, chromium, at["phoenix"], trace_id)
                shown = f"Phoenix {at['phoenix']}, Prometheus {at['prometheus']}"
                print(f"the picture is in {flags.out}; {shown}", flush=True)
                if flags.stay:
                    print("stop with Ctrl-C", flush=True)
                    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/img", help="folder for the screenshots (default: docs/img)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="duration of the traffic (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=ROOT / "models/eased-3", help="a model directory")
    parser.add_argument("--stay", action="store_true", help="keep everything running afterwards")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(observe(parser.parse_args()))


if __name__ == "__main__":
    main()
