"""Root file systems of the lab's machines: Debian, built once, cached by a hash of what goes into them."""

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.settings import LabError, Settings
from lab.shell import run

SUITE = "bookworm"
BASE = (
    "ca-certificates,dbus,iproute2,iputils-ping,libpam-systemd,openssh-server,procps,python3,python3-apt,"
    "sudo,systemd,systemd-sysv,udev"
)
HOST = f"{BASE},kmod,lxc,lxcfs,pciutils,uidmap,zstd"
"""What Proxmox VE brings as well: LXC and what its guests need."""

MASKED = (
    "sys-kernel-debug.mount getty@tty1.service console-getty.service apt-daily.timer apt-daily-upgrade.timer "
    "e2scrub_all.timer fstrim.timer"
)
"""Units that fail in a container or would take the machine's two cores at a bad moment."""

KEPT = 3
"""Archives of a kind that stay in the cache beside a new one."""

CA_FOLDER = Path("/usr/local/share/ca-certificates")


@dataclass(frozen=True)
class Mirror:
    """The Debian archives this machine uses; the lab's machines use the same."""

    main: str
    security: str

    def lines(self) -> list[str]:
        """Return the sources in one-line form for SUITE."""
        return [
            f"deb {self.main} {SUITE} main",
            f"deb {self.main} {SUITE}-updates main",
            f"deb {self.security} {SUITE}-security main",
        ]


def parse_mirror(texts: list[str]) -> Mirror:
    """Find the Debian mirror in apt source files of either form.

    Args:
        texts: contents of sources.list and of each file in sources.list.d.

    Raises:
        LabError: none of them names a Debian archive.
    """
    pairs: list[tuple[str, str]] = []
    for text in texts:
        for block in re.split(r"\n\s*\n", text):
            lines = [line for line in block.splitlines() if not line.lstrip().startswith("#")]
            fields = {key: value for line in lines for key, value in re.findall(r"^([\w-]+):\s*(.*)", line)}
            if "deb" in fields.get("Types", "").split():
                pairs += [(uri, fields.get("Suites", "")) for uri in fields.get("URIs", "").split()]
            for line in lines:
                found = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)", line)
                if found:
                    pairs.append((found[1], found[2]))
    named = [(uri.rstrip("/"), suites) for uri, suites in pairs if re.search(r"/debian(-security)?/?$", uri)]
    main = next((uri for uri, _ in named if uri.endswith("/debian")), None)
    if main is None:
        raise LabError(
            "apt sources: no Debian archive found in /etc/apt (an address that ends in /debian). "
            "Name one in /etc/apt/sources.list, as on any Debian 12."
        )
    security = next((uri for uri, _ in named if uri.endswith("/debian-security")), f"{main}-security")
    return Mirror(main, security)


def machine_mirror(etc_apt: Path = Path("/etc/apt")) -> Mirror:
    """Return the mirror that this machine's own apt uses."""
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    return parse_mirror([file.read_text() for file in files if file.is_file()])


def authorities() -> list[Path]:
    """Return the extra certificate authorities this machine trusts (a company's proxy, say)."""
    return sorted(CA_FOLDER.glob("*.crt"))


def recipe(kind: str, mirror: Mirror) -> list[str]:
    """Return the arguments of mmdebstrap that decide what is in the archive of this kind."""
    masked = f"{MASKED} lxc-net.service lxc-monitord.service" if kind == "host" else MASKED
    return [
        "--variant=minbase",
        "--mode=root",
        f"--include={HOST if kind == 'host' else BASE}",
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("man", "locale", "doc")),
        '--customize-hook=chroot "$1" update-ca-certificates',
        f'--customize-hook=chroot "$1" systemctl mask {masked}',
        '--customize-hook=chroot "$1" systemctl enable systemd-networkd',
        '--customize-hook=rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/hostname; : >"$1"/etc/machine-id',
        SUITE,
        *mirror.lines(),
    ]


def digest(words: list[str]) -> str:
    """Return the cache key of a recipe together with the certificates that go into the archive."""
    state = hashlib.sha256("\0".join(words).encode())
    for file in authorities():
        state.update(file.read_bytes())
    return state.hexdigest()[:16]


def archive(settings: Settings, kind: str) -> Path:
    """Return a .tar.zst of a Debian root file system, built on first use.

    Args:
        settings: the lab.
        kind: "host" (with LXC, as a Proxmox host has) or "guest".

    Raises:
        LabError: mmdebstrap failed.
    """
    *options, suite, main, updates, security = recipe(kind, machine_mirror())
    folder = settings.cache / "rootfs"
    target = folder / f"debian-12-{kind}_{digest([*options, suite, main, updates, security])}_amd64.tar.zst"
    if target.exists():
        target.touch()
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for left in folder.glob("build-*"):
                shutil.rmtree(left)
            for stale in sorted(folder.glob(f"debian-12-{kind}_*"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
                stale.unlink()
            with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
                build(target, Path(work), options, [main, updates, security])
    return target


def build(target: Path, work: Path, options: list[str], sources: list[str]) -> None:
    """Write an archive that appears complete or not at all.

    Args:
        target: the archive.
        work: an empty folder on the same file system.
        options: options of mmdebstrap.
        sources: lines of sources.list.
    """
    certificates = work / "overlay" / CA_FOLDER.relative_to("/")
    certificates.mkdir(parents=True)
    for file in authorities():
        shutil.copy(file, certificates / file.name)
    built, partial = work / "rootfs.tar", work / target.name
    copy = f"--customize-hook=copy-in {work}/overlay/usr /"
    run(["mmdebstrap", "--quiet", copy, *options, SUITE, built, *sources], env={**os.environ, "TMPDIR": str(work)})
    run(["zstd", "--quiet", "-3", "-T0", built, "-o", partial])
    partial.rename(target)
