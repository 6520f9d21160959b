"""The site that `make docs` builds, opened as a reader may: from a folder, without a server or a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import chromium, find_chromium

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/docs/site"


@pytest.mark.anyio
async def test_search_finds_a_setting_without_a_server(tmp_path: Path) -> None:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no chromium on this machine: make test-browser installs Debian's")
    if not (SITE / "index.html").exists():
        pytest.skip("no site: make docs builds it")
    async with (
        chromium(executable, tmp_path) as browser,
        browser.page(f"file://{SITE}/docs/engine.html") as page,
    ):
        await page.evaluate(
            "document.querySelector('#__search').click();"
            "const query = document.querySelector('.md-search__input'); query.value = 'spin_us';"
            "query.dispatchEvent(new Event('keyup'))"
        )
        found = "[...document.querySelectorAll('.md-search-result__link')]"
        await page.until(f"{found}.some((link) => link.href.includes('docs/reference.html?h=spin_us'))")
        assert page.complaints == []
