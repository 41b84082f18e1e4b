"""The documentation as pages, in a real browser: those that `make site` has built."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import PROGRAM, Page, Scheme, open_page

SHOWN: tuple[tuple[Scheme, int], ...] = (("light", 1280), ("dark", 390))
"""In a small laptop's window, and a phone's."""

IMAGES_ARE_THERE = 'document.readyState === "complete" && [...document.images].every(image => image.complete)'

BROKEN_IMAGES = "[...document.images].filter(image => image.naturalWidth === 0).map(image => image.currentSrc)"

TOO_WIDE = """
    [...document.querySelectorAll("article *")]
        .filter(one => one.getBoundingClientRect().right > %d && !one.closest("pre, .md-typeset__scrollwrap"))
        .slice(0, 3).map(one => one.outerHTML.slice(0, 200))
"""

FORGETFUL = "Storage.prototype.setItem = () => {}"
"""Else a page would look as the one before it."""

BRIGHTNESS = """
    getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).reduce((sum, one) => sum + +one, 0)
"""

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of what it is asked."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(repository: Path) -> Path:
    folder = repository / "build" / "site"
    if not (folder / "index.html").exists():
        assert not os.environ.get("PSSTORE_CI"), "`.ci/run` builds the site before it runs tests"
        pytest.skip("there is no site: make site")
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def faults(page: Page, url: str, scheme: Scheme, width: int) -> list[str]:
    """What is wrong with it as it is shown then."""
    page.complaints.clear()
    page.show(scheme=scheme, width=width)
    page.go(url)
    if not page.await_true(f"location.href === {url!r} && {IMAGES_ARE_THERE}"):
        return ["it does not get done"]
    found = [f"an image is not there: {one}" for one in page.evaluate(BROKEN_IMAGES)]
    if page.evaluate("document.documentElement.scrollWidth") > width:
        found.append(f"it is wider than {width} pixels: {page.evaluate(TOO_WIDE % width)}")
    if (page.evaluate(BRIGHTNESS) > 3 * 128) != (scheme == "light"):
        found.append(f"it is not {scheme}")
    return found + page.complaints


def test_all_pages_can_be_read_by_day_and_night_on_phones_and_desks(site: Path, address: str) -> None:
    """Nothing is missing, nothing has to be scrolled sideways, and the browser complains of nothing."""
    names = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    assert len(names) > 30
    with open_page("about:blank") as page:
        page.ask("Page.addScriptToEvaluateOnNewDocument", source=FORGETFUL)
        found = {
            (name, scheme): wrong
            for name in names
            for scheme, width in SHOWN
            if (wrong := faults(page, address if name == "." else f"{address}{name}/", scheme, width))
        }
    assert not found
