"""Pictures of the page for the documentation: `python -m tests.page_pictures FOLDER`, with the demo pair served.

They show what this machine does at this moment: the figures in them are no benchmark.
"""

import argparse
import asyncio
import re
import sys
from pathlib import Path
from typing import Any

from tests.support.browser import browser, missing
from tests.support.running_up import up
from tests.support.small_png import with_palette

ROOT = Path(__file__).parents[1]
SERVICES = ("--target", str(ROOT / "models/target"), "--draft", str(ROOT / "models/draft"), "--store", "memory")
THEMES = ("light", "dark")
SIZE = {"width": 960, "height": 900}
PROMPT = ROOT / "models/heldout/queue.py"
PROMPT_LINES = slice(23, 35)
SEEDS = {"light": "7", "dark": "8"}  # two texts: drafters that learn would know the second one if it were the first
PATIENCE_MS = 120_000


async def main(folder: Path) -> None:
    """Write six pictures: at rest, streaming and compared, in both themes."""
    async with up("--http-port", "0", *SERVICES) as running, browser() as chromium:
        await running.ready()
        base = (await running.http()).removesuffix("v1")
        await _warm_up(chromium, base)
        for theme in THEMES:
            page = await chromium.new_page(viewport=SIZE, color_scheme=theme)
            await page.goto(base)
            await _pictures_of(page, folder, theme)
            await page.close()


async def _warm_up(chromium: Any, base: str) -> None:
    """Run one request, so that the first forwards of a process are not in the pictures."""
    page = await chromium.new_page()
    await page.goto(base)
    await page.locator("#compare").click()
    await _shown(page, "#status", "Done")
    await page.close()


async def _pictures_of(page: Any, folder: Path, theme: str) -> None:
    await _shown(page, "#status", "Ready")
    await _picture(page, folder / f"idle-{theme}.png")
    await page.locator("#prompt").fill(_prompt())
    await page.locator("#drafter").select_option("model")
    await page.locator("#draft-tokens").fill("5")
    await page.locator("#max-tokens").fill("240")
    await page.locator("#seed").fill(SEEDS[theme])
    await page.locator("#compare").click()
    await _shown(page, "#speculative-pane .counts", r"^\d\d+ tokens")
    await _picture(page, folder / f"streaming-{theme}.png")
    await _shown(page, "#status", "Done")
    await page.locator("#speculative-pane .token.recovered").last.hover()
    await _picture(page, folder / f"compared-{theme}.png")


def _prompt() -> str:
    return "".join(PROMPT.read_text().splitlines(keepends=True)[PROMPT_LINES])


async def _shown(page: Any, selector: str, words: str) -> None:
    from playwright.async_api import expect

    await expect(page.locator(selector)).to_have_text(re.compile(words), timeout=PATIENCE_MS)


async def _picture(page: Any, path: Path) -> None:
    _write(path, with_palette(await page.screenshot(full_page=True, animations="disabled")))


def _write(path: Path, picture: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    print(f"{path} ({len(picture) // 1000} kB)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    if problem := missing():
        sys.exit(problem)
    asyncio.run(main(parser.parse_args().folder))
