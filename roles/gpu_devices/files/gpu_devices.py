#!/usr/bin/python3
"""Make GPU device nodes and the device rules of LXC containers, with the numbers the kernel uses now.

Majors of nvidia-uvm and nvidia-caps change with a driver or a boot, so nothing here is written down in advance: the
configuration names drivers or sysfs files, and the numbers are read when a host boots, before its containers start.

Configuration (JSON):
    nodes.json: {"wait_s": 30, "nodes": [{"path", "mode", and "major"+"minor", "driver"+"minor" or "sysfs"}]}
    guests/NAME.json: {"devices": ["/dev/nvidia0", ...], "include": "/var/lib/lxc/NAME/devices.conf"}
"""

import argparse
import fcntl
import json
import os
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CONFIG = Path("/etc/gpu-devices")
LOCK = Path("/run/gpu-devices.lock")
POLL_S = 0.5


class DeviceError(Exception):
    """A node or rule that cannot be made; the text says which and why."""


@dataclass(frozen=True)
class Numbers:
    """Major and minor number of a character device."""

    major: int
    minor: int


def majors(proc_devices: str) -> dict[str, int]:
    """Return the majors of character drivers by name, from the text of /proc/devices."""
    characters = proc_devices.partition("Block devices:")[0]
    rows = (line.split(maxsplit=1) for line in characters.splitlines()[1:] if line.strip())
    return {name: int(number) for number, name in rows}


def resolve(node: dict[str, object], drivers: dict[str, int], root: Path = Path("/")) -> Numbers:
    """Return the numbers a node must have.

    Args:
        node: one entry of nodes.json.
        drivers: majors by driver name.
        root: where sysfs is looked up; / except in tests.

    Raises:
        DeviceError: the driver is not loaded, or the sysfs pattern does not name exactly one device.
    """
    path = node["path"]
    if "sysfs" in node:
        found = sorted(root.glob(str(node["sysfs"]).lstrip("/")))
        if len(found) != 1:
            raise DeviceError(f"{path}: {node['sysfs']} names {len(found)} devices, not one")
        major, minor = found[0].read_text().strip().split(":")
        return Numbers(int(major), int(minor))
    if "driver" in node:
        driver = str(node["driver"])
        if driver not in drivers:
            raise DeviceError(f"{path}: driver {driver} has no major in /proc/devices; is its module loaded?")
        return Numbers(drivers[driver], int(str(node["minor"])))
    return Numbers(int(str(node["major"])), int(str(node["minor"])))


def actual(path: Path) -> tuple[Numbers, int] | None:
    """Return numbers and mode of a character device, None where there is none at `path`."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    return Numbers(os.major(status.st_rdev), os.minor(status.st_rdev)), stat.S_IMODE(status.st_mode)


def make(path: Path, numbers: Numbers, mode: int) -> None:
    """Put a character device at `path`, in one step, in the place of whatever file was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    os.mknod(new, stat.S_IFCHR | mode, os.makedev(numbers.major, numbers.minor))
    new.chmod(mode)
    new.rename(path)


def rules(devices: list[str]) -> str:
    """Return the LXC lines that show these devices of the host in a container, and nothing else.

    Raises:
        DeviceError: one of them is not a character device now.
    """
    lines = []
    for device in devices:
        found = actual(Path(device))
        if found is None:
            raise DeviceError(f"{device}: not a character device on this host")
        numbers = found[0]
        lines.append(f"lxc.cgroup2.devices.allow = c {numbers.major}:{numbers.minor} rwm")
        lines.append(f"lxc.mount.entry = {device} {device.lstrip('/')} none bind,create=file 0 0")
    return "".join(f"{line}\n" for line in lines)


class Plan:
    """What differs from the configuration, and the steps that mend it."""

    def __init__(self, config: Path, guest: str | None = None) -> None:
        """Read the configuration below `config`; of the guests only `guest`, where it is given."""
        nodes = config / "nodes.json"
        loaded = json.loads(nodes.read_text()) if nodes.exists() else {}
        self.nodes: list[dict[str, object]] = loaded.get("nodes", [])
        self.wait_s: float = loaded.get("wait_s", 0)
        self.guests: dict[str, tuple[list[str], Path]] = {}
        self.changes: list[str] = []
        self.errors: list[str] = []
        for file in sorted((config / "guests").glob(f"{guest or '*'}.json")):
            try:
                one = json.loads(file.read_text())
                self.guests[file.stem] = [str(device) for device in one["devices"]], Path(one["include"])
            except (ValueError, KeyError, TypeError, OSError) as error:
                self.errors.append(f"{file.stem}: {file} cannot be read ({error!r}). Apply lxc_container again")

    def resolved(self) -> list[tuple[dict[str, object], Numbers]]:
        """Return each node with its numbers, waiting up to wait_s for drivers that are still coming up."""
        end = time.monotonic() + self.wait_s
        while True:
            drivers = majors(Path("/proc/devices").read_text())
            done, errors = [], []
            for node in self.nodes:
                try:
                    done.append((node, resolve(node, drivers)))
                except DeviceError as error:
                    errors.append(str(error))
            if not errors or time.monotonic() > end:
                self.errors += errors
                return done
            time.sleep(POLL_S)

    def run(self, dry: bool) -> None:
        """Make nodes, then the rules of each guest; with `dry` only note what would change."""
        for node, numbers in self.resolved():
            path, mode = Path(str(node["path"])), int(str(node["mode"]), 8)
            if actual(path) != (numbers, mode):
                self.changes.append(f"{path}: character device {numbers.major}:{numbers.minor}, mode {mode:04o}")
                if not dry:
                    try:
                        make(path, numbers, mode)
                    except OSError as error:
                        self.errors.append(f"{path}: {error.strerror}")
        for name, (devices, include) in self.guests.items():
            try:
                wanted: str | None = rules(devices)
            except DeviceError as error:
                self.errors.append(f"{name}: {error}")
                wanted = None
            try:
                self._write(name, include, wanted, dry)
            except OSError as error:
                self.errors.append(
                    f"{name}: {include}: {error.strerror}. Where the container is gone for good, remove it with its "
                    "role (lxc_container_state: absent)"
                )

    def _write(self, name: str, include: Path, wanted: str | None, dry: bool) -> None:
        """Write a guest's rules; without rules the file goes, so that the container cannot start half-equipped."""
        present = include.read_text() if include.exists() else None
        if present == wanted:
            return
        self.changes.append(f"{name}: {include}")
        if dry:
            return
        if wanted is None:
            include.unlink()
            return
        new = include.with_name(f".{include.name}.new")
        new.write_text(wanted)
        new.rename(include)


def main() -> None:
    """Apply the configuration, or with --check say what differs; the answer is JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only say what would change")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--guest", help="leave the rules of all other guests alone")
    args = parser.parse_args()
    with open(os.devnull if args.check else LOCK, "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)
        plan = Plan(args.config, args.guest)
        plan.run(dry=args.check)
    json.dump({"changes": plan.changes, "errors": plan.errors}, sys.stdout, indent=1)
    print()
    if plan.errors:
        sys.exit("gpu-devices: " + "; ".join(plan.errors))


if __name__ == "__main__":
    main()
