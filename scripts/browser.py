"""Drives a headless Chromium over its DevTools protocol: pages, JavaScript, clicks and screenshots."""

import asyncio
import base64
import contextlib
import re
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
_SECONDS = 60.0


class Page:
    """A browser page. `open` and `click` return when the page that they lead to is loaded."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._sent = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            got = message.json()
            if got.get("method") == "Page.loadEventFired":
                self._loaded.set()
            elif (answer := self._answers.pop(got.get("id", -1), None)) is not None and not answer.done():
                answer.set_result(got)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the protocol and returns its result. Raises RuntimeError if the command fails."""
        self._sent += 1
        answer = self._answers[self._sent] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._sent, "method": method, "params": params})
        got: dict[str, Any] = await asyncio.wait_for(answer, _SECONDS)
        if "error" in got:
            raise RuntimeError(f"{method}: {got['error']['message']}")
        result: dict[str, Any] = got["result"]
        return result

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the window's size in CSS pixels; below 600 wide it is a phone."""
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **window)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        self._loaded.clear()
        done = await self.call("Page.navigate", url=url)
        if done.get("errorText"):
            raise RuntimeError(f"{url}: {done['errorText']}")
        await asyncio.wait_for(self._loaded.wait(), _SECONDS)

    async def value(self, expression: str) -> Any:
        """Evaluates a JavaScript expression and awaits promises. Raises RuntimeError if it throws."""
        done = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails'].get('exception', {}).get('description')}")
        return done["result"].get("value")

    async def until(self, expression: str, seconds: float = _SECONDS - 1) -> None:
        ask = f"const ask = () => ({expression}) ? done() : setTimeout(ask, 100); ask()"
        await asyncio.wait_for(self.value(f"new Promise((done) => {{ {ask} }})"), seconds)

    async def click(self, selector: str) -> None:
        """Clicks the element that a selector finds, and waits for the page that this leads to."""
        at = await self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        self._loaded.clear()
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)
        await asyncio.wait_for(self._loaded.wait(), _SECONDS)

    async def picture(self, file: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browsing(chromium: str) -> AsyncIterator[Page]:
    """Runs the browser with a temporary profile."""
    with tempfile.TemporaryDirectory(prefix="fusionkv-browser-", ignore_cleanup_errors=True) as profile:
        command = (chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank")
        process = await asyncio.create_subprocess_exec(*command, stderr=PIPE, stdout=DEVNULL)
        try:
            port = await asyncio.wait_for(_port(process), _SECONDS)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    (target,) = [t for t in await response.json() if t["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.call("Page.enable")
                    yield page
        finally:
            process.kill()
            await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    output = b""
    async for line in process.stderr:
        output += line
        if found := re.search(rb"DevTools listening on ws://[^:]+:(\d+)/", line):
            return found[1].decode()
    raise RuntimeError(f"the browser ended: {output.decode(errors='replace')[-2000:]}")
