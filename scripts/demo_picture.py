"""Takes the README's screenshots of build/demo.html, light and dark; `make demo` writes it. Needs Chromium."""

import asyncio
import shutil
from pathlib import Path

from browser import browsing

ROOT = Path(__file__).parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome")


async def main() -> None:
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        raise SystemExit(f"no browser found: install one of {', '.join(NAMES)}")
    async with browsing(chromium) as page:
        for name, dark in (("answer", False), ("answer-dark", True)):
            await page.size(1100, 690, dark=dark)
            await page.open((ROOT / "build/demo.html").as_uri())
            await page.picture(ROOT / f"docs/img/{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
