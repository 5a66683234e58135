"""A Chromium of this machine, driven by Playwright; tests that need it are skipped where one of them is missing."""

import importlib.util
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

COMMANDS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """Return what is missing in words; empty where nothing is."""
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed; run: make page-check"
    if chromium() is None:
        return f"none of {', '.join(COMMANDS)} is on PATH; run: make page-check"
    return ""


def chromium() -> str | None:
    """Return the path of a Chromium."""
    return next(filter(None, map(shutil.which, COMMANDS)), None)


needs_browser = pytest.mark.skipif(bool(missing()), reason=missing())


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """Run a browser without a window. Any: Playwright may not be installed where types are checked."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # its sandbox needs rights that containers lack; the pages are ours
        running = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield running
        finally:
            await running.close()
