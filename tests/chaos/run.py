"""Randomised faults over real processes: `make chaos FAULTS=1000 SEED=1`.

Three cache services over a Redis or a Mooncake Store, two workers and a gateway run, each in a network namespace of
its own where the machine allows it. One to three faults strike while questions are asked and entries are put and
fetched; then they are over, and all that must hold is checked (oracle.py). The same seed gives the same faults in the
same order, whatever the traffic beside them draws. What happened is in build/chaos.json, also after Ctrl-C; whatever
must not happen is there with the logs of all services.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Behind everything else: the folder `kernels` must not be found under that name.
sys.path.append(str(ROOT))

from rich.console import Console  # noqa: E402

from tests.chaos import disk_faults, link_faults, more_faults, network, secret_faults, version_faults  # noqa: E402
from tests.chaos.faults import FAULTS, Fault, Scene, targets  # noqa: E402
from tests.chaos.oracle import Oracle  # noqa: E402
from tests.chaos.versions import Version  # noqa: E402
from tests.chaos.world import World  # noqa: E402

_LISTED = (disk_faults, link_faults, more_faults, secret_faults, version_faults)  # they add theirs to FAULTS
_AT_ONCE = (1, 1, 1, 2, 2, 3)
_FEWER_PAGES = 0.6
_CHECK_ALL_EVERY = 10


class Run:
    """Faults one after the other, and what was counted."""

    def __init__(self, args: argparse.Namespace, first: list[str], console: Console, other: Version | None) -> None:
        """`first`: faults to begin with, one after the other."""
        self._dice = random.Random(args.seed)
        # What happens at once draws in any order.
        self._traffic_dice = random.Random(f"{args.seed} traffic")
        self._args, self._first, self._console, self._other = args, first, console, other
        self._wanted, self._report = args.faults, args.json.resolve()
        self.struck: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.failures: list[dict[str, object]] = []
        self.missing: dict[str, str] = {}
        self.slowest = 0.0
        self._began = time.monotonic()

    async def run(self, net: network.Network | None) -> None:
        args = self._args
        while self.struck.total() < self._wanted:
            with tempfile.TemporaryDirectory(prefix="chaos", ignore_cleanup_errors=True) as folder:
                made = World(Path(folder), args.model.resolve(), net, self._other, args.secured, args.remote)
                async with made as world:
                    oracle = Oracle(world, self._traffic_dice)
                    try:
                        await oracle.answers.prepare()
                        self._say(f"{len(oracle.answers.questions)} questions, {len(FAULTS)} kinds of fault")
                        await self._strike_on(world, oracle)
                    finally:
                        self.seen += oracle.seen
                        self.slowest = max(self.slowest, oracle.answers.slowest)
                        self.save()

    async def _strike_on(self, world: World, oracle: Oracle) -> None:
        """Until there were enough, or something went wrong: then all processes are started anew."""
        self.missing = {f.name: why for f in FAULTS if (why := f.possible(world))}
        possible = [f for f in FAULTS if f.name not in self.missing]
        episode = 0
        while self.struck.total() < self._wanted:
            chosen = self._choose(possible)
            names = " + ".join(f"{f.name} {number}" for f, number in chosen)
            began = time.monotonic()
            last = self.struck.total() + len(chosen) >= self._wanted
            thorough = last or episode % _CHECK_ALL_EVERY == _CHECK_ALL_EVERY - 1
            try:
                async with asyncio.timeout(self._args.episode_seconds):
                    await self._episode(world, oracle, chosen, thorough)
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                self._failed(world, names, error)
                return
            finally:
                self.struck.update(f.name for f, _ in chosen)
            episode += 1
            self._say(f"{self.struck.total():5} {names}: right after {time.monotonic() - began:.1f} s")
            if episode % _CHECK_ALL_EVERY == 0:
                self.save(oracle)

    def _choose(self, possible: list[Fault]) -> list[tuple[Fault, int]]:
        """One fault or a few, at different services."""
        while self._first:
            name = self._first.pop(0)
            for fault in possible:
                if fault.name == name:
                    return [(fault, self._dice.randrange(targets(fault.who)))]
        chosen: list[tuple[Fault, int]] = []
        for _ in range(self._dice.choice(_AT_ONCE)):
            fault = self._dice.choices(possible, [f.weight for f in possible])[0]
            number = self._dice.randrange(targets(fault.who))
            if (fault.who, number) not in [(f.who, n) for f, n in chosen]:
                chosen.append((fault, number))
        return chosen

    async def _episode(self, world: World, oracle: Oracle, chosen: list[tuple[Fault, int]], thorough: bool) -> None:
        scenes = [Scene(world, oracle, random.Random(self._dice.getrandbits(64)), number) for _, number in chosen]
        # Also in what a fault asks while it ends: a gateway that struck first comes back last.
        oracle.answers_fail = any(fault.answers_fail for fault, _ in chosen)
        if self._dice.random() < _FEWER_PAGES:
            await oracle.empty_pools()
        async with contextlib.AsyncExitStack() as stack:
            for (fault, _), scene in zip(chosen, scenes, strict=True):
                await stack.enter_async_context(fault.context(scene))
            await oracle.traffic()
        await oracle.recovered()
        gone = set().union(*(scene.gone for scene in scenes))
        # What a Mooncake Store has is in the memory of its clients, and goes with each of them.
        lossless = world.kind == "redis" and all(fault.who != "remote" for fault, _ in chosen)
        oracle.entries.settled(gone, lossless)
        await oracle.entries.everything_is_there(gone, 1.0 if thorough else 0.15)
        if thorough:
            await oracle.nothing_is_left_behind()

    def _failed(self, world: World, names: str, error: BaseException) -> None:
        logs = {process.name: process.log for process in world.processes}
        about = f"{type(error).__name__}: {error}"
        busy = f"{os.getloadavg()[0]:.1f} processes wanted to run"
        self.failures.append(
            {"after": self.struck.total(), "faults": names, "error": about, "load": busy, "logs": logs}
        )
        self._say(f"WRONG {names}: {about}")

    def save(self, oracle: Oracle | None = None) -> None:
        self._report.parent.mkdir(parents=True, exist_ok=True)
        seen = self.seen + oracle.seen if oracle else self.seen
        made = {
            "seed": self._args.seed,
            "other version": self._other.commit if self._other else None,
            "secured": self._args.secured,
            "remote": self._args.remote,
            "faults": self.struck.total(),
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            "failures": self.failures,
            "struck": dict(self.struck.most_common()),
            "not possible here": self.missing,
            "seen": dict(sorted(seen.items())),
            "slowest answer while the cache had a fault, seconds": round(
                max(self.slowest, oracle.answers.slowest if oracle else 0), 2
            ),
        }
        self._report.write_text(json.dumps(made, indent=1) + "\n")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--first", default="", help="names of faults that strike first, one by one, with commas")
    parser.add_argument("--episode-seconds", type=float, default=900, help="for faults and all checks (%(default)s)")
    parser.add_argument("--model", type=Path, default=ROOT / "models/eased-3", help="a reference model")
    parser.add_argument("--json", type=Path, default=ROOT / "build/chaos.json", help="the report")
    parser.add_argument("--other", default="", help="commit of the other version (before the protocol last changed)")
    parser.add_argument("--remote", choices=("redis", "mooncake"), default="redis", help="tier that services share")
    parser.add_argument("--secured", action="store_true", help="TLS that asks for certificates, and encrypted disks")
    args = parser.parse_args()
    reason = network.enter()
    console = Console(stderr=True)
    net = other = None
    try:
        net = network.Network()
    except RuntimeError as error:
        console.print(f"without links that can be cut: {reason or error}")
    versions = tempfile.TemporaryDirectory(prefix="chaos", ignore_cleanup_errors=True)
    try:
        other = Version.made(ROOT, Path(versions.name), args.other)
    except RuntimeError as error:
        console.print(str(error))
    first = [name.strip() for name in args.first.split(",") if name]
    if unknown := set(first) - {fault.name for fault in FAULTS}:
        parser.error(f"no faults: {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in FAULTS)}")
    run = Run(args, first, console, other)
    # As the first process of its namespace, this one is not ended by a signal that it does not handle; and in the
    # background of a shell Python does not handle this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with versions, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run.run(net))
    run.save()
    console.print(f"{run.struck.total()} faults of seed {args.seed}, {len(run.failures)} wrong; {args.json}")
    console.print(json.dumps(dict(sorted(run.seen.items())), indent=1), markup=False, highlight=False)
    return 1 if run.failures or run.struck.total() < args.faults else 0


if __name__ == "__main__":
    sys.exit(main())
