"""`make lab-down` leaves nothing of a lab, whole, half-built or half-removed.

The last file here: it ends the lab of the others.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.machine import CGROUPS
from lab.network import FORWARDING
from lab.settings import Settings
from tests.site.conftest import ROOT, Lab, lab_up


def traces(settings: Settings) -> list[str]:
    """Return everything on this machine that bears the mark of a lab."""
    links = sorted(path.name for path in Path("/sys/class/net").iterdir())
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout.splitlines()
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [
        *(name for name in links if name == settings.bridge or name.startswith(settings.identity)),
        *(rule for rule in rules if settings.bridge in rule.split()),
        *(str(path) for path in CGROUPS.rglob(f"lxc.*{settings.bridge}-*")),
        *(line for line in mounts if f"{settings.state}/" in line),
        *(str(path) for path in [settings.state] if path.exists()),
    ]


def start(settings: Settings, *words: str) -> subprocess.Popen[str]:
    """Start a command of the lab, whose output can be read line by line."""
    env = {**os.environ, "LAB_SUBNET": str(settings.subnet), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "lab", *words], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command with all its children; it must still be at work."""
    assert process.poll() is None, "ended before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def remove(settings: Settings) -> None:
    """Remove a lab.

    Raises:
        AssertionError: the command failed.
    """
    output, _ = (process := start(settings, "down")).communicate()
    assert process.returncode == 0, output


@pytest.fixture
def second(settings: Settings) -> Iterator[Settings]:
    """Return the settings of a lab beside the one of the other tests."""
    subnet = settings.subnet + (100 if settings.subnet <= 154 else -100)
    beside = dataclasses.replace(settings, subnet=subnet, state=settings.state.parent / str(subnet))
    remove(beside)
    yield beside
    remove(beside)


@pytest.mark.parametrize("seconds", [0.1, 1, 3])
def test_a_build_that_was_killed_half_way_leaves_nothing_after_removal(second: Settings, seconds: float) -> None:
    """Times after the first trace of the host: while it is unpacked, and while it starts."""
    build = start(second, "up", "--bare")
    assert build.stdout
    next(line for line in build.stdout if line == "==> kpro6\n")
    time.sleep(seconds)
    kill(build)
    assert traces(second)
    remove(second)
    assert traces(second) == []
    remove(second)


def test_a_build_that_was_killed_half_way_is_completed_by_the_next(second: Settings) -> None:
    build = start(second, "up", "--bare")
    assert build.stdout
    next(line for line in build.stdout if line == "==> kpro6\n")
    time.sleep(1)
    kill(build)
    for _ in range(2):
        whole = lab_up(second, "--bare")
        assert whole.code == 0, whole.output
    assert Lab(second).host("systemctl is-system-running --wait") == "running\n"


def test_a_whole_lab_is_gone_even_when_its_removal_was_killed(lab: Lab) -> None:
    lab.get("/health")
    removal = start(lab.settings, "down")
    time.sleep(1)
    kill(removal)
    remove(lab.settings)
    assert traces(lab.settings) == []
    if not any(path.name.startswith("gpulab") for path in Path("/sys/class/net").iterdir()):
        assert not (lab.settings.state.parent / "shared").exists()
        assert FORWARDING.read_text().strip() in {"0", "1"}
