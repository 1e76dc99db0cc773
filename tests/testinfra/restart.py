"""Restart a machine and wait until it is whole again."""

import contextlib
import time

from testinfra.host import Host

RETURN_TIMEOUT_S = 180.0


def boot(host: Host) -> str | None:
    """Return when the machine's first process started, in clock ticks; None while it cannot be reached."""
    try:
        return str(host.check_output("cat /proc/1/stat").split()[21])
    except (AssertionError, RuntimeError):
        return None


def wait_until_running(host: Host, since: str | None) -> None:
    """Wait until a machine has booted again and systemd has nothing left to start."""
    end = time.monotonic() + RETURN_TIMEOUT_S
    while boot(host) in (None, since):
        assert time.monotonic() < end, f"did not come back within {RETURN_TIMEOUT_S:.0f} s"
        time.sleep(1)
    while (state := host.run("systemctl is-system-running --wait").stdout.strip()) == "":
        assert time.monotonic() < end, "no answer from systemd"
        time.sleep(1)
    assert state == "running", host.run("systemctl --failed --no-legend").stdout


def reboot(host: Host) -> None:
    """Restart a machine and wait until it is back."""
    since = boot(host)
    with contextlib.suppress(RuntimeError):
        host.run("systemctl reboot")
    wait_until_running(host, since)
