"""Contestants take turns on one machine, each in its own processes, and are compared turn by turn."""

import json
import os
import select
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from app.launching.launcher import kill_tree

ROOT = Path(__file__).parent.parent
START_LIMIT, TURN_LIMIT = 300, 300


def search_path() -> str:
    """Return PYTHONPATH for contestants: the project, and this process's own."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@dataclass
class Contestant:
    """A command whose process waits at a Gate after some steps."""

    name: str
    command: list[str]
    gpu: bool = False
    """Whether it may use the first GPU; if not, no GPU is visible."""
    turns: list[dict] = field(default_factory=list)
    peak: float = 0.0
    result: dict = field(default_factory=dict)

    def start(self, folder: Path) -> None:
        """Start the process, and wait until its first step may begin."""
        self.folder = folder
        for name in ("orders", "reports"):
            os.mkfifo(folder / name)
        environment = {"BENCH_GATE": str(folder), "PYTHONPATH": search_path(), "HF_HUB_OFFLINE": "1"}
        environment["CUDA_VISIBLE_DEVICES"] = "0" if self.gpu else ""
        # The Makefile sets OMP_NUM_THREADS to 1 for launchers. It would slow only the peers: our runs set their own.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={**inherited, **environment},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._reports = os.open(folder / "reports", os.O_RDWR)
        self._orders = os.open(folder / "orders", os.O_RDWR)
        self.first = self._report(START_LIMIT)

    def turn(self, steps: int) -> dict:
        """Train some steps; return how long they took."""
        os.write(self._orders, f"{steps}\n".encode())
        report = self._report(TURN_LIMIT)
        self.peak = max(self.peak, report["peak"])
        return report

    def finish(self) -> None:
        """Train to the end, and read the results."""
        os.write(self._orders, b"-1\n")
        try:
            status = self._process.wait(START_LIMIT)
        except subprocess.TimeoutExpired:
            raise SystemExit(self._complaint(f"has not ended after {START_LIMIT} s")) from None
        file = self.folder / "result.json"
        if status or not file.exists():
            raise SystemExit(self._complaint(f"ended with status {status}"))
        self.result = json.loads(file.read_text())

    def kill(self) -> None:
        """End all its processes."""
        if hasattr(self, "_process"):
            kill_tree(self._process.pid)
            os.close(self._reports)
            os.close(self._orders)
            self._log.close()

    def _report(self, limit: float) -> dict:
        for _ in range(int(limit)):
            if select.select([self._reports], [], [], 1)[0]:
                return json.loads(os.read(self._reports, 1 << 16).splitlines()[-1])
            if self._process.poll() is not None:
                raise SystemExit(self._complaint(f"ended with status {self._process.returncode}"))
        raise SystemExit(self._complaint(f"said nothing for {limit} s"))

    def _complaint(self, what: str) -> str:
        return f"{self.name} {what}:\n{(self.folder / 'log').read_text(errors='replace')[-4000:]}"


def take_turns(contestants: list[Contestant], rounds: int, steps: int, warm_up: int) -> None:
    """Let contestants train `steps` steps each, round after round, and then each to the end."""
    with tempfile.TemporaryDirectory() as name:
        try:
            for contestant in contestants:
                folder = Path(name, contestant.name)
                folder.mkdir()
                contestant.start(folder)
            for contestant in contestants:
                contestant.turn(warm_up)
            for number in range(rounds):
                for contestant in contestants if number % 2 else reversed(contestants):
                    contestant.turns.append(contestant.turn(steps))
            for contestant in contestants:
                contestant.finish()
        finally:
            for contestant in contestants:
                contestant.kill()


def start_up(contestants: list[Contestant], rounds: int) -> None:
    """Start contestants in turn, each up to the end of its first step."""
    for number in range(-1, rounds):  # the first round warms the file cache
        for contestant in contestants if number % 2 else reversed(contestants):
            with tempfile.TemporaryDirectory() as name:
                begin = time.perf_counter()
                try:
                    contestant.start(Path(name))
                    report = contestant.turn(1) if "peak" in contestant.first else contestant.first
                    wall = time.perf_counter() - begin
                finally:
                    contestant.kill()
            if number >= 0:
                contestant.turns.append({"wall": wall, "cpu": report["used"], "items": 1})


def ratios(ours: Contestant, peer: Contestant, clock: str = "wall") -> list[float]:
    """Return, for each round, the ratio of items a second: ours to the peer's."""
    return [o["items"] / o[clock] / (p["items"] / p[clock]) for o, p in zip(ours.turns, peer.turns, strict=True)]
