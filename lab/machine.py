"""Machines of the lab: LXC containers with systemd, SSH and an address on the lab's bridge."""

import ipaddress
import os
import shutil
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from lab import rootfs
from lab.settings import LabError, Settings
from lab.shell import on_pure_cgroup2, run, succeeds

START_TIMEOUT_S = 60.0
SUBORDINATE_IDS = (Path("/etc/subuid"), Path("/etc/subgid"))
TEMPLATE = "debian-12.tar.zst"
MAPPING = "root:100000:65536"


@dataclass(frozen=True)
class Machine:
    """One container of the lab.

    Attributes:
        name: host name and container name.
        last: last number of its address.
        kind: "host" carries containers of its own (a Proxmox stand-in), "guest" is a plain system container.
        unprivileged: map its root to a user without rights, as Proxmox does by default; guests only.
        mounts: folders of this machine shown in it: (source, target, read-only).
    """

    name: str
    last: int
    kind: str = "guest"
    unprivileged: bool = False
    mounts: tuple[tuple[Path, str, bool], ...] = field(default=())

    def config(self, settings: Settings) -> str:
        """Return the LXC configuration."""
        share = Path("/usr/share/lxc/config")
        lines = []
        if self.unprivileged:
            lines += [f"lxc.include = {share}/userns.conf"]
        lines += [f"lxc.include = {share}/common.conf"]
        if self.kind == "host":
            lines += [
                f"lxc.include = {share}/nesting.conf",
                "lxc.cgroup2.devices.allow = a",
                "lxc.mount.auto =",
                "lxc.mount.auto = proc:rw sys:mixed cgroup:rw:force",
            ]
        lines += [
            f"lxc.uts.name = {self.name}",
            "lxc.apparmor.profile = unconfined",
            f"lxc.rootfs.path = dir:{self.rootfs(settings)}",
            "lxc.net.0.type = veth",
            f"lxc.net.0.link = {settings.bridge}",
            f"lxc.net.0.veth.pair = {settings.identity}v{self.last}",
            "lxc.net.0.flags = up",
        ]
        if self.kind == "guest":
            lines += [
                f"lxc.net.0.ipv4.address = {settings.address(self.last)}/24",
                f"lxc.net.0.ipv4.gateway = {settings.gateway}",
            ]
        if self.unprivileged:
            lines += [
                "lxc.idmap = u 0 100000 65536",
                "lxc.idmap = g 0 100000 65536",
            ]
        for source, target, read_only in self.mounts:
            options = "bind,create=dir" + (",ro" if read_only else "")
            lines += [f"lxc.mount.entry = {source} {target.lstrip('/')} none {options} 0 0"]
        return "\n".join(lines) + "\n"

    def folder(self, settings: Settings) -> Path:
        """Return the container's own folder."""
        return settings.lxcpath / self.name

    def rootfs(self, settings: Settings) -> Path:
        """Return the folder of its root file system."""
        return self.folder(settings) / "rootfs"

    def running(self, settings: Settings) -> bool:
        """Tell whether it runs."""
        if not (self.folder(settings) / "config").exists():
            return False
        return run(["lxc-info", "-P", settings.lxcpath, "-n", self.name, "-sH"]).strip() == "RUNNING"

    def up(self, settings: Settings) -> None:
        """Create it where it is missing, start it where it is down, and wait until SSH answers."""
        if not (self.folder(settings) / "complete").exists():
            self.down(settings)
            self._create(settings)
        config = self.folder(settings) / "config"
        if not config.exists() or config.read_text() != self.config(settings):
            self.stop(settings)
            config.write_text(self.config(settings))
        for source, _, _ in self.mounts:
            source.mkdir(parents=True, exist_ok=True)
        if self.unprivileged:
            allow_mapping(settings)
        if not self.running(settings):
            log = self.folder(settings) / "lxc.log"
            run(on_pure_cgroup2(["lxc-start", "-P", settings.lxcpath, "-n", self.name, "-o", log, "-l", "WARN"]))
        self.wait(settings)

    def wait(self, settings: Settings) -> None:
        """Wait until SSH answers.

        Raises:
            LabError: it did not within START_TIMEOUT_S.
        """
        end = time.monotonic() + START_TIMEOUT_S
        probe = ["ssh", *ssh_options(settings), f"root@{settings.address(self.last)}", "true"]
        while not succeeds(probe):
            if time.monotonic() > end:
                raise LabError(
                    f"{self.name}: no SSH on {settings.address(self.last)} within {START_TIMEOUT_S:.0f} s. "
                    f"Look at {self.folder(settings) / 'lxc.log'}; "
                    f"`lxc-attach -P {settings.lxcpath} -n {self.name}` opens a shell in it."
                )
            time.sleep(0.2)

    def stop(self, settings: Settings) -> None:
        """Stop it as a shutdown would, at once where it does not follow within ten seconds."""
        if self.running(settings):
            run(on_pure_cgroup2(["lxc-stop", "-P", settings.lxcpath, "-n", self.name, "-t", "10"]))

    def down(self, settings: Settings) -> None:
        """Remove it with everything in it; nothing happens where nothing is left."""
        folder = self.folder(settings)
        if not folder.exists():
            return
        if self.running(settings):
            run(on_pure_cgroup2(["lxc-stop", "-P", settings.lxcpath, "-n", self.name, "-k"]))
        shutil.rmtree(folder)

    def _create(self, settings: Settings) -> None:
        root = self.rootfs(settings)
        root.mkdir(parents=True)
        for folder in (settings.state, settings.lxcpath, self.folder(settings)):
            folder.chmod(0o711)
        run(["tar", "--extract", "--numeric-owner", "-f", rootfs.archive(settings, self.kind), "-C", root])
        (root / "etc/hostname").write_text(f"{self.name}\n")
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{settings.address(self.last)} {self.name}\n")
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        keys = root / "root/.ssh"
        keys.mkdir(mode=0o700, exist_ok=True)
        (keys / "authorized_keys").write_text(ensure_key(settings))
        (keys / "authorized_keys").chmod(0o600)
        run(["ssh-keygen", "-A", "-f", root])
        trust(settings, settings.address(self.last), (root / "etc/ssh/ssh_host_ed25519_key.pub").read_text())
        if self.kind == "host":
            self._prepare_host(settings, root)
        if self.unprivileged:
            give_to_mapped_root(root)
        (self.folder(settings) / "complete").touch()

    def _prepare_host(self, settings: Settings, root: Path) -> None:
        """Give the host what a Proxmox installation has: vmbr0, ids for unprivileged guests, a template."""
        templates = root / "var/lib/vz/template/cache"
        templates.mkdir(parents=True)
        shutil.copy(rootfs.archive(settings, "guest"), templates / TEMPLATE)
        (root / "etc/default/lxc-net").write_text('USE_LXC_BRIDGE="false"\n')
        units = root / "etc/systemd/network"
        units.mkdir(parents=True, exist_ok=True)
        (units / "vmbr0.netdev").write_text("[NetDev]\nName=vmbr0\nKind=bridge\n")
        (units / "eth0.network").write_text("[Match]\nName=eth0\n\n[Network]\nBridge=vmbr0\n")
        (units / "vmbr0.network").write_text(
            "[Match]\nName=vmbr0\n\n[Network]\n"
            f"Address={settings.address(self.last)}/24\nGateway={settings.gateway}\nConfigureWithoutCarrier=yes\n"
        )
        # A device that can be opened, with a dynamic major and no hardware: the macvtap of an empty bridge.
        (units / "gpusim.netdev").write_text("[NetDev]\nName=gpusim\nKind=bridge\n")
        (units / "gpusim.network").write_text(
            "[Match]\nName=gpusim\n\n[Network]\nMACVTAP=gpusim0\nLinkLocalAddressing=no\nConfigureWithoutCarrier=yes\n"
        )
        (units / "gpusim0.netdev").write_text("[NetDev]\nName=gpusim0\nKind=macvtap\n")
        (units / "gpusim0.network").write_text("[Match]\nName=gpusim0\n\n[Network]\nLinkLocalAddressing=no\n")
        for file in SUBORDINATE_IDS:
            (root / file.relative_to("/")).write_text(f"{MAPPING}\n")


def allow_mapping(settings: Settings) -> None:
    """Let this machine's root map ids for unprivileged machines; `forbid_mapping` takes it back."""
    for file in SUBORDINATE_IDS:
        text = file.read_text() if file.exists() else ""
        if MAPPING not in text.splitlines():
            (settings.state / file.name).touch()
            file.write_text(f"{text}{MAPPING}\n")


def forbid_mapping(settings: Settings) -> None:
    """Take away the lines that `allow_mapping` of this lab wrote."""
    for file in SUBORDINATE_IDS:
        mark = settings.state / file.name
        if mark.exists():
            lines = [line for line in file.read_text().splitlines() if line != MAPPING]
            file.write_text("".join(f"{line}\n" for line in lines))
            mark.unlink()


def give_to_mapped_root(root: Path) -> None:
    """Shift the owners of a root file system by the mapping of unprivileged machines.

    LXC's own idmapped mount would do without, but is lost when a machine restarts itself (LXC 5.0.2).
    """
    first = int(MAPPING.split(":")[1])
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        os.lchown(path, status.st_uid + first, status.st_gid + first)
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(status.st_mode))  # a change of owner takes away set-user-ID


def ensure_key(settings: Settings) -> str:
    """Return the lab's public key, made on first use."""
    settings.key.parent.mkdir(parents=True, exist_ok=True)
    settings.key.parent.chmod(0o700)
    if not settings.key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", settings.bridge, "-f", settings.key])
    return settings.key.with_suffix(".pub").read_text()


def trust(settings: Settings, address: str, public_key: str) -> None:
    """Write a machine's host key into the lab's known hosts, in the place of an older one."""
    ipaddress.ip_address(address)
    lines = settings.known_hosts.read_text().splitlines() if settings.known_hosts.exists() else []
    kept = [line for line in lines if line.split()[0] != address]
    kind, key = public_key.split()[:2]
    settings.known_hosts.write_text("\n".join([*kept, f"{address} {kind} {key}"]) + "\n")


def ssh_options(settings: Settings) -> list[str]:
    """Return the options with which ssh reaches the lab's machines."""
    return [
        "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", f"UserKnownHostsFile={settings.known_hosts}",
        "-i", str(settings.key),
    ]  # fmt: skip


def clear_cgroups(names: list[str]) -> None:
    """Remove control groups that a killed container left behind."""
    mark = {f"lxc.{part}.{name}" for name in names for part in ("payload", "monitor")}
    hierarchies = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()]
    for hierarchy in hierarchies:
        for top in hierarchy.glob("lxc.*"):
            if top.is_dir() and any(top.name == name or top.name.startswith(f"{name}-") for name in mark):
                for folder in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
                    folder.rmdir()
        pivot = hierarchy / "lxc.pivot"
        if pivot.is_dir() and not list(hierarchy.glob("lxc.monitor.*")):
            pivot.rmdir()
