"""`psstore demo --followers 8`: one worker trains, and so many models follow its weights, each in a process of its own,
by what has changed. The command's side is first, then the trainer's, which starts the followers, and then a follower's:

python -m psstore.cli.demo.followers SETTINGS-AS-JSON [NUMBER DESCRIPTOR]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack

import msgspec
import torch
from rich.console import Console
from rich.panel import Panel
from torch import nn

import psstore
import psstore.torch
from psstore.cli.demo import training
from psstore.cli.demo.data import Digits, load
from psstore.cli.demo.display import LiveLines, done
from psstore.cli.demo.messages import FollowerProgress, emit, parse
from psstore.cli.demo.reporter import REPORT_S
from psstore.cli.demo.worker import seeded_model
from psstore.launch.environment import find_gpus
from psstore.launch.job import Job
from psstore.launch.output import Line
from psstore.text import counted
from psstore.types import Consistency

STEPS = 400
"""Until accuracy hardly grows."""

BATCH_IMAGES = 32

LEARNING_RATE = 1e-3
"""AdamW's at first; it falls to zero, and with it how many weights a step changes in bfloat16."""

DTYPE = torch.bfloat16
"""The followers' models are in it: what a step changes of that is less than all."""

PATIENCE_S = 60.0
"""For the next version, on a machine that does much else."""


class FollowerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as the trainer and each follower get it."""

    followers: int
    steps: int
    seed: int


class FollowersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as it is shown and as `--json` prints it."""

    shards: int
    followers: int
    steps: int
    seed: int
    verified: int
    """Followers whose last version has the hashes of the store's."""
    versions: int
    """That a follower had, in the mean."""
    share_of_bytes: float
    """What came to all followers, of what whole versions would have been."""
    accuracy: float
    """The last version's, on images that nobody trained on."""
    seconds: float
    """From the start of the first process to the end of the last one."""


def train_followed(console: Console, *, shards: int, followers: int, seed: int, steps: int = STEPS) -> FollowersReport:
    """Ends the command if the training or a follower fails."""
    settings = FollowerSettings(followers=followers, steps=steps, seed=seed)
    job = Job(
        command=_command(settings),
        num_shards=shards,
        consistency=Consistency.of_mode("sync", num_workers=1),
        environ=os.environ,
        gpus=find_gpus(os.environ),
    )
    began = time.perf_counter()
    display = FollowersDisplay(console, num_shards=shards, settings=settings)
    training.train(job, display)
    last = display.last.values()
    return FollowersReport(
        shards=shards,
        followers=followers,
        steps=steps,
        seed=seed,
        verified=sum(one.is_verified for one in last),
        versions=round(sum(one.versions for one in last) / followers),
        share_of_bytes=round(sum(one.num_bytes for one in last) / sum(one.whole_bytes for one in last), 3),
        accuracy=round(min(one.accuracy for one in last), 4),
        seconds=round(time.perf_counter() - began, 2),
    )


class FollowersDisplay(LiveLines):
    """Shows a line for each follower in a terminal, and elsewhere those of the first."""

    def __init__(self, console: Console, *, num_shards: int, settings: FollowerSettings) -> None:
        super().__init__(
            console,
            title=(
                f"[bold]psstore demo --followers[/] · {counted(num_shards, 'shard')} · 1 worker ·"
                f" followed in bfloat16 by {counted(settings.followers, 'model')}"
            ),
            of="follower",
            num_processes=settings.followers,
        )
        self.last: dict[int, FollowerProgress] = {}
        """What each told last."""
        self._steps = settings.steps
        self._tenths = 0
        """How many of all steps were told, outside a terminal."""

    def deliver(self, line: Line) -> None:
        event = None if line.is_error else parse(line.text)
        if isinstance(event, FollowerProgress):
            self._show(event)
        else:
            self._pass_on(line)

    def _show(self, event: FollowerProgress) -> None:
        self.last[event.number] = event
        told = (
            f"version {event.version:>4}/{self._steps}  {event.accuracy:.1%} right"
            f"  {event.num_bytes / event.whole_bytes:.0%} of {event.whole_bytes / 1e6:,.1f} MB came"
        )
        self._progress.update(
            self._tasks[event.number],
            total=self._steps,
            completed=event.version,
            status=told + ("  [bold green]verified[/]" if event.is_verified else ""),
        )
        if not self._console.is_terminal and event.number == 0 and 10 * event.version // self._steps > self._tenths:
            self._tenths = 10 * event.version // self._steps
            self._print(told)


def followers_summary(report: FollowersReport) -> Panel:
    return done(
        [
            ("followers", f"[bold green]{report.verified} of {report.followers}[/] have the store's bits at the end"),
            ("versions", f"{report.versions} each, of {report.steps} steps"),
            ("bytes", f"{report.share_of_bytes:.0%} of what whole versions would have been"),
            ("accuracy", f"{report.accuracy:.2%} of images not trained on"),
            ("time", f"{report.seconds:.1f} s"),
        ]
    )


def _command(settings: FollowerSettings, *number: int) -> list[str]:
    """The trainer's, or that of a follower."""
    told = [msgspec.json.encode(settings).decode(), *map(str, number)]
    return [sys.executable, "-u", "-m", "psstore.cli.demo.followers", *told]


# ---- the trainer ----


def train(settings: FollowerSettings) -> int:
    """Returns how many followers have failed. They end with it, whatever becomes of it."""
    digits = load(None)
    model = seeded_model(digits, settings.seed)
    with ExitStack() as ends, psstore.connect() as store:
        plain = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        optimizer = psstore.torch.DistributedOptimizer(plain, store, model.named_parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
        followers = _start_followers(settings)
        for one in followers:
            ends.callback(one.wait)
            ends.callback(one.kill)
        drawn = torch.Generator().manual_seed(settings.seed)
        for _ in range(settings.steps):
            chosen = torch.randint(len(digits.train_labels), (BATCH_IMAGES,), generator=drawn)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
        return sum(one.wait() != 0 for one in followers)


def _start_followers(settings: FollowerSettings) -> list[subprocess.Popen[bytes]]:
    """Returns once each has its first version, or has ended."""
    begun, theirs = os.pipe()
    followers = [
        subprocess.Popen(_command(settings, number, theirs), pass_fds=[theirs]) for number in range(settings.followers)
    ]
    os.close(theirs)
    os.read(begun, 1)  # ends when nobody has the other end any more
    os.close(begun)
    return followers


# ---- a follower ----


def follow(settings: FollowerSettings, number: int, begins: int) -> None:
    """Until it has the last version, and has compared that with the store's. `begins`: a descriptor that it closes when
    it has the first one."""
    digits = load(None)
    model = seeded_model(digits, settings.seed).to(DTYPE)
    version_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    versions = num_bytes = 0
    reported = -REPORT_S
    with psstore.torch.Follower(model, wait_s=PATIENCE_S) as follower:
        is_last = False
        while not is_last:
            version = follower.update(timeout_s=PATIENCE_S)
            if not versions:
                os.close(begins)
            versions, num_bytes = versions + 1, num_bytes + version.num_bytes
            is_last = version.number >= settings.steps
            if is_last:
                follower.verify(timeout_s=PATIENCE_S)
            if is_last or time.perf_counter() - reported >= REPORT_S:
                reported = time.perf_counter()
                emit(
                    FollowerProgress(
                        number=number,
                        version=version.number,
                        versions=versions,
                        num_bytes=num_bytes,
                        whole_bytes=versions * version_bytes,
                        accuracy=_accuracy(model, digits),
                        is_verified=is_last,
                    )
                )


@torch.no_grad()
def _accuracy(model: nn.Module, digits: Digits) -> float:
    found: torch.Tensor = model(digits.test_images.to(DTYPE)).argmax(1)
    return (found == digits.test_labels).float().mean().item()


def main() -> None:
    torch.set_num_threads(1)
    settings = msgspec.json.decode(sys.argv[1], type=FollowerSettings)
    if len(sys.argv) > 2:
        follow(settings, *map(int, sys.argv[2:]))
    elif failed := train(settings):
        sys.exit(f"{counted(failed, 'follower')} failed")


if __name__ == "__main__":
    main()
