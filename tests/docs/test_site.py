"""The documentation as pages, in a real browser: those that `make site` has built."""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import PROGRAM, Page, Scheme, open_page

DESK, PHONE = 1280, 390
"""Pixels: how wide the window of a small laptop is, and that of a phone."""

IMAGES_ARE_THERE = 'document.readyState === "complete" && [...document.images].every(image => image.complete)'

BROKEN_IMAGES = "[...document.images].filter(image => image.naturalWidth === 0).map(image => image.currentSrc)"

TOO_WIDE = """
    [...document.querySelectorAll("article *")]
        .filter(one => one.getBoundingClientRect().right > %d && !one.closest("pre, .md-typeset__scrollwrap"))
        .slice(0, 3).map(one => one.outerHTML.slice(0, 200))
"""

TURN_DARK = """document.querySelector("[data-md-component=palette] label:not([hidden])").click()"""

FORGETFUL = "Storage.prototype.setItem = () => {}"
"""Else a page would look as the one before it."""

BRIGHTNESS = """
    getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).reduce((sum, one) => sum + +one, 0)
"""

HAS_COLOURS = {"light": f"{BRIGHTNESS} > 3 * 128", "dark": f"{BRIGHTNESS} <= 3 * 128"}

SEARCH_INDEX = "search/search_index.json"
"""What every page reads and makes its own index of, which takes longer than all else that it does."""

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of what it is asked."""

    def __init__(self, *args: Any, indexes: Iterator[Path], **options: Any) -> None:
        self._indexes = indexes
        """What is sent of the search index, each time that one is asked for."""
        super().__init__(*args, **options)

    def log_message(self, *_: object) -> None:
        pass

    def translate_path(self, path: str) -> str:
        return str(next(self._indexes)) if path == f"/{SEARCH_INDEX}" else super().translate_path(path)


@pytest.fixture
def site(repository: Path) -> Path:
    folder = repository / "build" / "site"
    if not (folder / "index.html").exists():
        assert not os.environ.get("PSSTORE_CI"), "`.ci/run` builds the site before it runs tests"
        pytest.skip("there is no site: make site")
    return folder


@pytest.fixture
def address(site: Path, tmp_path: Path) -> Iterator[str]:
    """Where the site is: its first page with the whole search index, the others with one of a single section."""
    whole, short = site / SEARCH_INDEX, tmp_path / "search_index.json"
    index = json.loads(whole.read_text())
    short.write_text(json.dumps({**index, "docs": index["docs"][:1]}))
    indexes = itertools.chain([whole], itertools.repeat(short))
    handler = functools.partial(Quiet, directory=str(site), indexes=indexes)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def faults(page: Page, url: str) -> list[str]:
    """What is wrong with it as it comes on a desk, and as it is once it was turned dark by hand, on a phone."""
    page.complaints.clear()
    page.show(scheme="light", width=DESK)
    page.go(url)
    found = faults_now(page, url, "light", DESK)
    page.show(scheme="light", width=PHONE)
    page.evaluate(TURN_DARK)
    found += faults_now(page, url, "dark", PHONE)
    return found + page.complaints


def faults_now(page: Page, url: str, scheme: Scheme, width: int) -> list[str]:
    found = []
    if not page.await_true(is_shown(url, scheme)):
        found.append(f"it does not get done, or is not {scheme}")
    if page.evaluate("document.documentElement.scrollWidth") > width:
        found.append(f"it is wider than {width} pixels: {page.evaluate(TOO_WIDE % width)}")
    return found + [f"an image is not there: {one}" for one in page.evaluate(BROKEN_IMAGES)]


def is_shown(url: str, scheme: Scheme) -> str:
    """JavaScript: whether the page is there with its images, in those colours."""
    return f"location.href === {url!r} && {IMAGES_ARE_THERE} && {HAS_COLOURS[scheme]}"


def test_all_pages_can_be_read_by_day_and_night_on_phones_and_desks(site: Path, address: str) -> None:
    """Nothing is missing, nothing has to be scrolled sideways, and the browser complains of nothing."""
    names = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    assert len(names) > 30
    with open_page("about:blank") as page:
        page.ask("Page.addScriptToEvaluateOnNewDocument", source=FORGETFUL)
        urls = {name: address if name == "." else f"{address}{name}/" for name in names}
        assert not {name: wrong for name, url in urls.items() if (wrong := faults(page, url))}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_has_the_colours_that_the_reader_prefers(address: str, scheme: Scheme) -> None:
    with open_page(address, scheme=scheme) as page:
        assert page.await_true(is_shown(address, scheme))
