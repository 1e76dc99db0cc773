"""The lab, made once for all tests here by the command an operator types."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.machine import ssh_options
from lab.settings import Settings
from lab.up import CONTAINER, HOST, INVENTORY

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-all`."""
    parser.addoption("--slow", action="store_true", help="also what takes long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless they were asked for."""
    if not config.getoption("--slow"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@dataclass(frozen=True)
class Run:
    """What a play printed and how it ended."""

    code: int
    output: str
    seconds: float

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        """Counts of the closing lines by host: ok, changed, unreachable, failed, skipped."""
        lines = re.findall(r"^(\S+)\s+: (ok=.*)$", self.output, re.M)
        return {host: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)} for host, text in lines}

    @property
    def changed(self) -> int:
        """Number of changes on all hosts."""
        return sum(counts["changed"] for counts in self.recap.values())


class Lab:
    """A running lab."""

    def __init__(self, settings: Settings) -> None:
        """Name it."""
        self.settings = settings
        self.url = f"http://{settings.address(CONTAINER[1])}:30000"
        self.env = {**os.environ, "LAB_SUBNET": str(settings.subnet), "LAB_STATE": str(settings.state.parent)}

    def argv(self, *words: str, inventory: Path = INVENTORY, limit: str = CONTAINER[0]) -> list[str]:
        """Return the command line of a run."""
        return [str(PLAYBOOK), "site.yml", "-i", str(inventory), "-l", limit, *words]

    def play(self, *words: str, inventory: Path = INVENTORY, limit: str = CONTAINER[0], **variables: Any) -> Run:
        """Run site.yml, with extra variables as JSON, and return what came of it."""
        extra = ["-e", json.dumps(variables)] if variables else []
        start = time.monotonic()
        done = subprocess.run(
            self.argv(*words, *extra, inventory=inventory, limit=limit),
            cwd=ROOT, env=self.env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Run(done.returncode, done.stdout + done.stderr, time.monotonic() - start)

    def ssh(self, last: int, command: str) -> str:
        """Run a command on a machine of the lab and return what it printed.

        Raises:
            AssertionError: it failed.
        """
        target = ["ssh", *ssh_options(self.settings), f"root@{self.settings.address(last)}", command]
        done = subprocess.run(target, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def host(self, command: str) -> str:
        """Run a command on kpro6."""
        return self.ssh(HOST[1], command)

    def container(self, command: str) -> str:
        """Run a command in ct200."""
        return self.ssh(CONTAINER[1], command)

    def get(self, path: str) -> str:
        """Ask the service with GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:  # noqa: S310
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any]) -> str:
        """Ask the service with POST."""
        request = urllib.request.Request(  # noqa: S310
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            return str(answer.read().decode())

    def serving_since(self) -> str:
        """Return what stays the same as long as the service is not touched: its process and the container's start."""
        return self.container(
            "systemctl show -P MainPID -P ActiveEnterTimestampMonotonic sglang@tiny; stat -c %Y /proc/1"
        )


@pytest.fixture(scope="session")
def settings() -> Settings:
    """Return the lab's settings, from the environment."""
    return Settings.from_environment()


def lab_up(settings: Settings, *words: str) -> Run:
    """Build the lab with the command an operator types, and return what it printed."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lab", "up", *words], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "LAB_SUBNET": str(settings.subnet)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return Run(done.returncode, done.stdout + done.stderr, time.monotonic() - start)


@pytest.fixture(scope="session")
def bare_run(settings: Settings) -> Run:
    """Make only the host, and return what a dry run on it printed."""
    made = lab_up(settings, "--bare")
    assert made.code == 0, made.output[-4000:]
    return Lab(settings).play("--check", "--diff")


@pytest.fixture(scope="session")
def first_run(settings: Settings, bare_run: Run) -> Run:
    """Build the rest, and return what it printed."""
    assert bare_run.recap
    return lab_up(settings)


@pytest.fixture(scope="session")
def lab(first_run: Run, settings: Settings) -> Lab:
    """Return the running lab."""
    assert first_run.code == 0, first_run.output[-6000:]
    return Lab(settings)


@pytest.fixture
def untouched(lab: Lab) -> Iterator[None]:
    """Prove that a test left the service as it was."""
    before = lab.serving_since()
    yield
    assert lab.serving_since() == before
    lab.get("/health")
