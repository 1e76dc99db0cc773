"""What this machine lacks for the lab, in one screen."""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.rootfs import machine_mirror
from lab.settings import ROOT, LabError, Settings
from lab.shell import run

PACKAGES = {
    "git": "git",
    "iptables": "iptables",
    "ip": "iproute2",
    "lxc-start": "lxc",
    "make": "make",
    "mmdebstrap": "mmdebstrap",
    "shellcheck": "shellcheck",
    "ssh": "openssh-client",
    "newuidmap": "uidmap",
    "zstd": "zstd",
}
"""Programs the lab and its tests run, and the Debian package that brings each."""

NEEDED_MEMORY_GIB = 6
NEEDED_DISK_GIB = 15


@dataclass(frozen=True)
class Finding:
    """One line of the report; what is made later by `make lab` itself need not be there yet."""

    name: str
    fine: bool
    text: str
    made_later: bool = False

    @property
    def needed(self) -> bool:
        """Whether something has to be done about it."""
        return not (self.fine or self.made_later)


def missing_packages() -> list[str]:
    """Return the Debian packages that have to be installed."""
    lacking = {package for program, package in PACKAGES.items() if shutil.which(program) is None}
    if importlib.util.find_spec("ensurepip") is None:
        lacking.add("python3-venv")
    return sorted(lacking)


def install_packages() -> None:
    """Install the Debian packages that this machine lacks."""
    lacking = missing_packages()
    if lacking:
        apt = ["apt-get", "--quiet", "--yes", "-o", "DPkg::Lock::Timeout=300"]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run([*apt, "update"], env=env)
        run([*apt, "install", "--no-install-recommends", *lacking], env=env)


def memory_gib() -> float:
    """Return the memory of this machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def free_disk_gib(folder: Path) -> float:
    """Return the free disk space in GiB where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 2**30


def release_number(release: str) -> tuple[int, int]:
    """Return the first two numbers of a kernel release such as 6.1.0-37-amd64."""
    major, minor = re.findall(r"\d+", release)[:2]
    return int(major), int(minor)


def _mirror() -> str:
    return machine_mirror().main


def examine(settings: Settings) -> list[Finding]:
    """Return one finding for each thing the lab needs."""
    findings = []

    def check(name: str, fine: bool, good: str, bad: str) -> None:
        findings.append(Finding(name, fine, good if fine else bad))

    def ask(name: str, question: Callable[[], str]) -> None:
        try:
            findings.append(Finding(name, True, question()))
        except (LabError, OSError) as error:
            findings.append(Finding(name, False, str(error)))

    check("root", os.geteuid() == 0, "yes", "run as root: containers, bridge and device nodes need it")
    version = sys.version_info
    check("python", version >= (3, 11), f"{version[0]}.{version[1]}", "3.11 or newer is needed (Debian 12 has it)")
    lacking = missing_packages()
    check("packages", not lacking, "all there", f"`make lab` installs them, or: apt-get install {' '.join(lacking)}")
    ask("debian mirror", _mirror)
    check("memory", memory_gib() >= NEEDED_MEMORY_GIB, f"{memory_gib():.0f} GiB", f"{NEEDED_MEMORY_GIB} GiB are needed")
    for folder in (settings.state, settings.cache):
        free = free_disk_gib(folder)
        check(
            f"disk {folder}", free >= NEEDED_DISK_GIB, f"{free:.0f} GiB free", f"{NEEDED_DISK_GIB} GiB free are needed"
        )
    check("cgroup2", "cgroup2" in Path("/proc/filesystems").read_text(), "yes", "a kernel with cgroup2 is needed")
    release = os.uname().release
    check("kernel", release_number(release) >= (6, 1), release, f"{release}: 6.1 or newer is needed (idmapped mounts)")
    made = (ROOT / ".venv/locked").exists()
    findings.append(Finding("environment", made, "made from the lock" if made else "`make lab` makes it", True))
    return findings


def report(findings: list[Finding]) -> str:
    """Return the findings as a table that fits one screen."""
    width = max(len(finding.name) for finding in findings)
    words = {True: "LACKS", False: "later"}
    lines = [f"{'ok' if one.fine else words[one.needed]:<6} {one.name:<{width}}  {one.text}" for one in findings]
    lacking = sum(one.needed for one in findings)
    lines.append("Everything is there." if not lacking else f"{lacking} thing(s) are missing.")
    return "\n".join(lines)
