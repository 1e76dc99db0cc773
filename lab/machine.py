"""Machines of the lab: LXC containers with systemd, SSH and an address on the lab's bridge."""

import contextlib
import ipaddress
import os
import re
import shutil
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from lab import network, rootfs
from lab.settings import LabError, Settings
from lab.shell import on_pure_cgroup2, run, succeeds

START_TIMEOUT_S = 60.0
CGROUP_TIMEOUT_S = 5.0
CGROUPS = Path("/sys/fs/cgroup")
SUBORDINATE_IDS = (Path("/etc/subuid"), Path("/etc/subgid"))
TEMPLATE = "debian-12.tar.zst"
MAPPING = "root:100000:65536"


@dataclass(frozen=True)
class Machine:
    """One container of the lab.

    Attributes:
        name: its host name.
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

    def id(self, settings: Settings) -> str:
        """Return the container's name, which no other lab on this machine has."""
        return f"{settings.bridge}-{self.name}"

    def folder(self, settings: Settings) -> Path:
        """Return the container's own folder."""
        return settings.lxcpath / self.id(settings)

    def rootfs(self, settings: Settings) -> Path:
        """Return the folder of its root file system."""
        return self.folder(settings) / "rootfs"

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
        if state(settings, self.id(settings)) == "FROZEN":
            run(on_pure_cgroup2(["lxc-unfreeze", "-P", settings.lxcpath, "-n", self.id(settings)]))
        if state(settings, self.id(settings)) != "RUNNING":
            kill(settings, self.id(settings))
            log = self.folder(settings) / "lxc.log"
            names = ["-P", str(settings.lxcpath), "-n", self.id(settings)]
            run(on_pure_cgroup2(["lxc-start", *names, "-o", str(log), "-l", "WARN"]))
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
                    f"`lxc-attach -P {settings.lxcpath} -n {self.id(settings)}` opens a shell in it."
                )
            time.sleep(0.2)

    def stop(self, settings: Settings) -> None:
        """Stop it as a shutdown would, at once where it does not follow within ten seconds."""
        if state(settings, self.id(settings)) == "RUNNING":
            run(on_pure_cgroup2(["lxc-stop", "-P", settings.lxcpath, "-n", self.id(settings), "-t", "10"]))
        kill(settings, self.id(settings))

    def down(self, settings: Settings) -> None:
        """Remove it with everything in it; nothing happens where nothing is left."""
        remove(settings, self.id(settings))

    def _create(self, settings: Settings) -> None:
        root = self.rootfs(settings)
        root.mkdir(parents=True)
        for folder in (settings.state, settings.lxcpath, self.folder(settings)):
            folder.chmod(0o711)
        run(["tar", "--extract", "--numeric-owner", "-f", rootfs.archive(settings, self.kind), "-C", root])
        (root / "etc/hostname").write_text(f"{self.name}\n")
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{settings.address(self.last)} {self.name}\n")
        (root / "etc/resolv.conf").write_text(resolver())
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


def state(settings: Settings, container: str) -> str:
    """Return RUNNING, STOPPED, FROZEN or a state between them; STOPPED where there is no such container."""
    if not (settings.lxcpath / container / "config").exists():
        return "STOPPED"
    return run(["lxc-info", "-P", settings.lxcpath, "-n", container, "-sH"]).strip()


def kill(settings: Settings, container: str) -> None:
    """Stop a container at once, whatever its state."""
    if state(settings, container) != "STOPPED":
        run(on_pure_cgroup2(["lxc-stop", "-P", settings.lxcpath, "-n", container, "-k"]))


def remove(settings: Settings, container: str) -> None:
    """Remove a container with everything in it; nothing happens where nothing is left."""
    folder = settings.lxcpath / container
    if folder.exists():
        kill(settings, container)
        shutil.rmtree(folder)


def resolver(etc: Path = Path("/etc/resolv.conf"), systemd: Path = Path("/run/systemd/resolve/resolv.conf")) -> str:
    """Return the name servers of this machine as its containers can use them, not one that only it can reach."""
    text = etc.read_text()
    servers = re.findall(r"^nameserver\s+(\S+)", text, re.M)
    loopback = bool(servers) and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in servers)
    return systemd.read_text() if loopback and systemd.exists() else text


def allow_mapping(settings: Settings) -> None:
    """Let this machine's root map ids for unprivileged machines; `forbid_mapping` takes it back."""
    for file in SUBORDINATE_IDS:
        text = file.read_text() if file.exists() else ""
        if MAPPING not in text.splitlines():
            (settings.shared / file.name).touch()
            file.write_text(f"{text}{MAPPING}\n")


def forbid_mapping(settings: Settings) -> None:
    """Take away the lines that a lab wrote, with the last lab of this machine."""
    for file in SUBORDINATE_IDS if not network.others(settings) else ():
        mark = settings.shared / file.name
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


def clear_cgroups(settings: Settings) -> None:
    """Remove the control groups that killed containers of this lab left behind.

    Raises:
        LabError: processes are still in one of them after CGROUP_TIMEOUT_S.
    """
    for hierarchy in (CGROUPS, *(folder for folder in CGROUPS.iterdir() if folder.is_dir())):
        for part in ("payload", "monitor"):
            for top in hierarchy.glob(f"lxc.{part}.{settings.bridge}-*"):
                remove_cgroup(top)
        pivot = hierarchy / "lxc.pivot"
        if pivot.is_dir() and not list(hierarchy.glob("lxc.monitor.*")):
            with contextlib.suppress(OSError):
                pivot.rmdir()


def remove_cgroup(top: Path) -> None:
    """Remove a control group with those below it, when its last processes have ended.

    Raises:
        LabError: some have not after CGROUP_TIMEOUT_S.
    """
    end = time.monotonic() + CGROUP_TIMEOUT_S
    for folder in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
        while folder.exists():
            try:
                folder.rmdir()
            except OSError as error:
                if time.monotonic() > end:
                    raise LabError(
                        f"{folder}: {error.strerror}. Processes of a removed machine are still in it; end them "
                        f"(cat {folder}/cgroup.procs) and run again."
                    ) from error
                time.sleep(0.2)
