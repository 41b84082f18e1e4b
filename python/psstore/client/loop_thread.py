"""A thread with an event loop, where sockets are served while the program computes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from psstore.errors import StoreClosed
from psstore.net.loops import LoopName, new_event_loop

T = TypeVar("T")


class LoopThread:
    """Runs until `stop`. Daemonic: a program that ends without closing its store ends all the same."""

    def __init__(self, loop_name: LoopName) -> None:
        self.loop = new_event_loop(loop_name)
        self._lock = threading.RLock()
        """Orders `submit` and `stop`. Reentrant: a garbage collection inside `submit` may end another store here."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="psstore", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `work` on the loop, from any thread. Cancelling the future cancels the work.

        Raises StoreClosed if the thread has ended, or stayed behind in the process that this one was forked from.
        """
        if self._thread.is_alive():
            with self._lock:
                if not self._stopping:
                    return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise StoreClosed("this store is closed; connect again")

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Ends the thread and closes the loop; work under way is cancelled. Does nothing the second time."""
        if self._thread.is_alive():
            with self._lock:
                if not self._stopping:
                    self._stopping = True
                    self.loop.call_soon_threadsafe(self.loop.stop)
            if not self.is_current():
                self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
