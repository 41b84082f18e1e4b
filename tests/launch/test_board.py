"""The board at / of --metrics, in a real browser, beside a store that trains."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import psstore
from psstore.errors import StoreUnreachable
from psstore.launch import board
from tests.launch.test_metrics import get
from tests.support.browser import PROGRAM, Scheme, open_page
from tests.support.server_process import StoreProcess

F32 = np.float32

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

in_a_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium")


@contextmanager
def training(*flags: str, table: str = "items") -> Iterator[StoreProcess]:
    """A store that shows its metrics, and two workers who train it, of whom rank 1 takes longer."""
    over = threading.Event()

    def work(process: StoreProcess, rank: int) -> None:
        with suppress(StoreUnreachable), psstore.connect(process.url, rank=rank) as store:
            store.create("w", np.zeros(300_000, F32), rule="sgd")
            store.create_table(table, dim=4, rule="sgd", group=1)
            while not over.is_set():
                time.sleep(0.02 + 0.05 * rank)
                store.push("w", np.ones(300_000, F32))
                store.push_rows(table, np.arange(9), np.ones((9, 4), F32))
                store.commit({"lr": 1e-3})
                store.pull("w")

    with StoreProcess("--shards", "2", "--workers", "2", "--metrics", "0", *flags) as process:
        workers = [threading.Thread(target=work, args=(process, rank)) for rank in range(2)]
        for worker in workers:
            worker.start()
        try:
            yield process
        finally:
            over.set()
            for worker in workers:
                worker.join()


def test_the_page_is_all_there_is_to_load() -> None:
    with StoreProcess("--metrics", "0") as process:
        assert get(f"{process.ready['metrics']}/") == (200, board.PAGE.decode())
        assert get(f"{process.ready['metrics']}/other") == (
            404,
            "there are /, /metrics, /workers, /livez and /readyz\n",
        )
    asked_for = re.findall(r"""https?://[^"'\s]+|(?:src|href)=|@import|url\(""", board.PAGE.decode())
    assert sorted(asked_for) == ["href=", "http://www.w3.org/2000/svg"]  # /metrics, and a name
    assert re.fullmatch(
        r"default-src 'none'; connect-src 'self'(; (style|script)-src 'sha256-\S{44}'){2}", board.policy()
    )


@in_a_browser
@pytest.mark.parametrize(
    ("scheme", "width", "background"),
    [("light", 1216, "rgb(246, 247, 249)"), ("dark", 390, "rgb(15, 19, 24)")],
)
def test_who_looks_sees_what_the_store_does(scheme: Scheme, width: int, background: str) -> None:
    text = "document.body.innerText"
    with (
        training("--mode", "ssp", "--staleness", "3", table='<b>"items"') as process,
        open_page(f"{process.ready['metrics']}/", scheme=scheme, width=width) as page,
    ):
        assert page.await_true(f"{text}.includes('1 is waited for')"), page.evaluate(text)
        assert page.await_true(f"/Steps a second\\s+[1-9]/.test({text})"), page.evaluate(text)  # from two looks
        shown = page.evaluate(text)
        assert "2 workers train" in shown
        assert "rank 1 is waited for: it computes, or loads data" in shown
        assert '<b>"items"' in shown, "names are shown as they are"
        assert page.await_true(f"/2 to 3\\s+[1-9]/.test({text})"), "how far ahead commits were"
        assert page.evaluate("document.querySelectorAll('path.in').length") == 3
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (
            "it can be read without scrolling sideways"
        )
        process.end()
        assert page.await_true(f"{text}.includes('nobody answers here any more')")
        # Refused, or reset under way.
        assert all("ERR_CONNECTION_RE" in one for one in page.complaints), page.complaints
