#!/usr/bin/python3
"""Ansible module: one LXC container, by the same definition on Proxmox VE (pct) and on plain LXC."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: lxc_guest
short_description: One LXC container on Proxmox VE or plain LXC
description:
  - Creates, configures, starts, restarts, stops and removes a container. All problems of a definition are found before
    anything is changed and reported together, each with variable, value and remedy.
  - An existing container is only touched where it differs. The return value C(restart_required) says that a running
    container still has the old configuration. Where it does not start with the new one, the former is put back and
    started.
  - A container of another maker that happens to have the name or number is never touched, in no state.
options:
  backend: {type: str, required: true, choices: [lxc, pct], description: What manages containers on the host.}
  state:
    type: str
    default: present
    choices: [checked, present, started, restarted, stopped, absent]
    description: V(checked) only looks for problems, V(present) creates and configures, the others work on what exists.
  vmid: {type: int, required: true, description: Number of the container on its host.}
  name: {type: str, required: true, description: Host name of the container.}
  template: {type: str, description: Tarball of the root file system (lxc) or volume id of the template (pct).}
  storage: {type: str, default: local, description: Storage of the root file system (pct only).}
  rootfs_size_gib: {type: int, default: 32, description: Size of the root file system in GiB (pct only).}
  cores: {type: int, default: 0, description: CPU cores, 0 for all.}
  memory_mib: {type: int, default: 0, description: Memory limit in MiB, 0 for none.}
  swap_mib: {type: int, default: 0, description: Swap limit in MiB beside the memory limit.}
  privileged: {type: bool, default: false, description: Whether root in it is root on the host.}
  nesting: {type: bool, default: false, description: Whether containers can run inside it.}
  bridge: {type: str, description: Bridge of the host that carries its network interface.}
  address: {type: str, description: Its address in CIDR form.}
  gateway: {type: str, description: Its default gateway.}
  nameservers: {type: list, elements: str, default: [], description: Its name servers; the host's where empty.}
  ssh_public_keys: {type: list, elements: str, default: [], description: Keys that may log in as root, set at creation.}
  devices: {type: list, elements: path, default: [], description: Device nodes of the host that it may use.}
  mounts:
    type: list
    elements: dict
    default: []
    description: Folders of the host shown in it.
    options:
      source: {type: path, required: true, description: Folder on the host.}
      target: {type: path, required: true, description: Folder in the container.}
      read_only: {type: bool, default: false, description: Whether it can only be read.}
  planned_devices:
    type: list
    elements: path
    default: []
    description: Device nodes that an earlier step of the same play makes; they may be missing while checking.
  autostart: {type: bool, default: true, description: Whether it starts with the host.}
  lxcpath: {type: path, default: /var/lib/lxc, description: Folder of containers (lxc only).}
author: [maintainers]
"""

EXAMPLES = r"""
- name: A container with one GPU
  lxc_guest:
    backend: pct
    state: started
    vmid: 200
    name: ct200
    template: local:vztmpl/debian-12-standard_12.7-1_amd64.tar.zst
    bridge: vmbr0
    address: 192.0.2.200/24
    gateway: 192.0.2.1
    ssh_public_keys: ["{{ lookup('ansible.builtin.file', '~/.ssh/id_ed25519.pub') }}"]
    devices: [/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm]
"""

RETURN = r"""
restart_required: {type: bool, returned: always, description: A running container still has the old configuration.}
exists: {type: bool, returned: always, description: Whether the container exists now.}
settled: {type: bool, returned: when present, description: Whether it runs with this very configuration.}
host_keys: {type: list, elements: str, returned: when it runs, description: Public SSH host keys of the container.}
"""

SHARE = Path("/usr/share/lxc/config")
GUESTS = Path("/etc/gpu-devices/guests")
PVE_CONFIG = Path("/etc/pve/lxc")
ID_MAP_START = 100000
ID_MAP_SIZE = 65536
MARK = "# Managed by the Ansible role lxc_container."
STOP_TIMEOUT_S = 60
PENDING = "[pve:pending]"
NVIDIA_MAJOR = 195
FORMER = Path("/var/lib/lxc-guest")
LOCK_TIMEOUT_S = 300.0
MAKE_HOST_KEYS = """
test -s /etc/ssh/ssh_host_ed25519_key && exit
ssh-keygen -A || exit
systemctl reset-failed ssh.service
systemctl --no-block restart ssh.service
exit 0
"""
"""Without keys sshd ends, and after five attempts in half a second systemd no longer starts it: keys made later than
that need a start of their own. Where systemd is not up yet, it starts sshd with the keys by itself."""


class GuestError(Exception):
    """A container that cannot be made as defined; the text says why."""


@dataclass(frozen=True)
class Mount:
    """A folder of the host shown in the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Guest:
    """The definition of a container; the fields are described in DOCUMENTATION."""

    vmid: int
    name: str
    template: str = ""
    storage: str = "local"
    rootfs_size_gib: int = 32
    cores: int = 0
    memory_mib: int = 0
    swap_mib: int = 0
    privileged: bool = False
    nesting: bool = False
    bridge: str = ""
    address: str = ""
    gateway: str = ""
    nameservers: tuple[str, ...] = ()
    ssh_public_keys: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = field(default=())
    autostart: bool = True
    planned_devices: tuple[str, ...] = ()

    @property
    def ip(self) -> str:
        """Its address without the prefix length."""
        return self.address.partition("/")[0]

    @property
    def hwaddr(self) -> str:
        """A hardware address that stays the same over restarts, so that neighbours keep reaching it."""
        digest = hashlib.sha256(f"{self.name} {self.ip}".encode()).hexdigest()
        return ":".join(["02", *(digest[i : i + 2] for i in range(0, 10, 2))])


def lxc_config(guest: Guest, folder: Path) -> str:
    """Return the whole configuration file of a container for plain LXC.

    Order matters: userns.conf clears the device rules, common.conf sets the allow-list, then come the container's own.

    Args:
        guest: the definition.
        folder: the container's folder, with rootfs and, where it has devices, devices.conf.
    """
    lines = [MARK, f"# vmid: {guest.vmid}"]
    if not guest.privileged:
        lines += [f"lxc.include = {SHARE}/userns.conf"]
    lines += [f"lxc.include = {SHARE}/common.conf"]
    if guest.nesting:
        lines += [f"lxc.include = {SHARE}/nesting.conf"]
    lines += [
        f"lxc.uts.name = {guest.name}",
        f"lxc.apparmor.profile = {'generated' if Path('/sys/kernel/security/apparmor').exists() else 'unconfined'}",
        f"lxc.rootfs.path = dir:{folder}/rootfs",
    ]
    if not guest.privileged:
        lines += [
            f"lxc.idmap = u 0 {ID_MAP_START} {ID_MAP_SIZE}",
            f"lxc.idmap = g 0 {ID_MAP_START} {ID_MAP_SIZE}",
        ]
    lines += [
        "lxc.net.0.type = veth",
        f"lxc.net.0.link = {guest.bridge}",
        f"lxc.net.0.veth.pair = veth{guest.vmid}i0",
        "lxc.net.0.name = eth0",
        f"lxc.net.0.hwaddr = {guest.hwaddr}",
        "lxc.net.0.flags = up",
        f"lxc.net.0.ipv4.address = {guest.address}",
    ]
    if guest.gateway:
        lines += [f"lxc.net.0.ipv4.gateway = {guest.gateway}"]
    if guest.cores:
        lines += [f"lxc.cgroup2.cpu.max = {guest.cores * 100000} 100000"]
    if guest.memory_mib:
        lines += [
            f"lxc.cgroup2.memory.max = {guest.memory_mib}M",
            f"lxc.cgroup2.memory.swap.max = {guest.swap_mib}M",
        ]
    for mount in guest.mounts:
        options = "bind,create=dir" + (",ro" if mount.read_only else "")
        lines += [f"lxc.mount.entry = {mount.source} {mount.target.lstrip('/')} none {options} 0 0"]
    if guest.devices:
        lines += [f"lxc.include = {folder}/devices.conf"]
    # What it was started with, whoever starts it: the next run knows from this whether a restart is due.
    lines += ["lxc.hook.version = 1", f'lxc.hook.pre-start = sh -c "cat {folder}/*conf* >{folder}/started"']
    lines += [f"lxc.start.auto = {int(guest.autostart)}"]
    return "".join(f"{line}\n" for line in lines)


def parts(value: str) -> dict[str, str]:
    """Return the k=v parts of an option of Proxmox VE; its first part may have no name, which is "" here."""
    pairs = (part.strip().partition("=") for part in value.split(",") if part.strip())
    return {key if mark else "": rest if mark else key for key, mark, rest in pairs}


def joined(values: dict[str, str]) -> str:
    """Return an option of Proxmox VE from its parts."""
    pairs = sorted(values.items(), key=lambda pair: pair[0] != "")
    return ",".join(f"{key}={value}" if key else value for key, value in pairs)


def pct_options(guest: Guest, current: dict[str, str]) -> dict[str, str | None]:
    """Return the options that this definition owns, None for those that are to be away.

    What it says nothing about stays: parts of net0 and features, volumes, hardware addresses.

    Args:
        guest: the definition.
        current: the options that the container has now.
    """
    net = {"hwaddr": guest.hwaddr.upper(), **parts(current.get("net0", ""))}
    net |= {"name": "eth0", "bridge": guest.bridge, "ip": guest.address, "type": "veth", "gw": guest.gateway}
    features = parts(current.get("features", "")) | {"nesting": str(int(guest.nesting))}
    options: dict[str, str | None] = {
        "hostname": guest.name,
        "memory": str(guest.memory_mib or host_memory_mib()),
        "swap": str(guest.swap_mib),
        "cores": str(guest.cores) if guest.cores else None,
        "nameserver": " ".join(guest.nameservers) or None,
        "onboot": str(int(guest.autostart)),
        "features": joined({key: value for key, value in features.items() if value != "0"}) or None,
        "net0": joined({key: value for key, value in net.items() if value}),
    }
    options |= numbered("dev", current, {device: {"": device, "mode": "0666"} for device in guest.devices}, "")
    mounts = {
        mount.target: {"": mount.source, "mp": mount.target, "ro": str(int(mount.read_only))} for mount in guest.mounts
    }
    options |= numbered("mp", current, mounts, "mp")
    return options


def numbered(
    kind: str, current: dict[str, str], wanted: dict[str, dict[str, str]], identity: str
) -> dict[str, str | None]:
    """Return options such as dev0 or mp1: an entry keeps its number and what the definition does not say.

    Args:
        kind: "dev" or "mp".
        current: the options that the container has now.
        wanted: parts of each wanted entry by its identity.
        identity: the part that says which entry is which.
    """
    present = {key: parts(value) for key, value in current.items() if re.fullmatch(rf"{kind}\d+", key)}
    named = {key: {"" if name in ("path", "volume") else name: value for name, value in one.items()}
             for key, one in present.items()}  # fmt: skip
    options: dict[str, str | None] = {}
    left = dict(wanted)
    for key, one in sorted(named.items()):
        entry = left.pop(one.get(identity, ""), None)
        if entry is not None:
            options[key] = joined({name: value for name, value in (one | entry).items() if value != "0"})
        elif one.get("", "").startswith("/"):
            options[key] = None
    free = (f"{kind}{index}" for index in range(256) if f"{kind}{index}" not in named)
    for entry in left.values():
        options[next(free)] = joined({name: value for name, value in entry.items() if value != "0"})
    return options


def volume_problems(guest: Guest, current: dict[str, str]) -> list[str]:
    """Return which mounts would take the place of a volume that the container has."""
    volumes = {}
    for key, value in current.items():
        one = parts(value)
        source = one.get("") or one.get("volume", "")
        if re.fullmatch(r"mp\d+", key) and not source.startswith("/"):
            volumes[one.get("mp", "")] = source
    return [
        f"lxc_container_mounts: {mount.target} is the volume {volumes[mount.target]} of {guest.name}. Choose another "
        "target, or detach the volume first."
        for mount in guest.mounts
        if mount.target in volumes
    ]


def normal(value: str) -> tuple[tuple[str, str], ...]:
    """Return an option's value so that two spellings of the same thing compare equal."""
    named = {"" if key in ("path", "volume") else key: part for key, part in parts(value).items()}
    return tuple(sorted((key, part) for key, part in named.items() if part != "0"))


def main_section(text: str) -> dict[str, str]:
    """Return the options in a Proxmox container file with those that wait for a restart, without its snapshots'."""
    options: dict[str, str] = {}
    section = PENDING
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip()
        if section != PENDING:
            continue
        found = re.match(r"([\w.]+)\s*[:=]\s*(.*)", line)
        if not found or line.startswith("#"):
            continue
        if found[1] == "delete":
            for key in re.split(r"[,;\s]+", found[2]):
                options.pop(key.lstrip("!"), None)
        else:
            options[found[1]] = found[2].strip()
    return options


def pct_changes(current: dict[str, str], wanted: dict[str, str | None]) -> tuple[dict[str, str], list[str]]:
    """Return what `pct set` has to set and to delete."""
    changed = {}
    for key, value in wanted.items():
        if value is not None and (key not in current or normal(current[key]) != normal(value)):
            changed[key] = value
    stale = sorted(key for key, value in wanted.items() if value is None and normal(current.get(key, "")))
    return changed, stale


def raw_device_lines(text: str, majors: set[int]) -> list[str]:
    """Return the hand-written lines about GPUs in the main section of a Proxmox container file.

    Such lines have fixed numbers, and lxc.cgroup.devices is ignored on cgroup2; devN entries take their place.

    Args:
        text: the file.
        majors: majors of GPU devices.
    """
    rule = re.compile(r"lxc\.cgroup2?\.devices\.(?:allow|deny)\s*[:=]\s*c\s+(\d+):")
    found = []
    for line in text.partition("\n[")[0].splitlines():
        numbers = rule.match(line)
        if re.match(r"lxc\.mount\.entry\s*[:=]\s*/dev/nvidia", line) or (numbers and int(numbers[1]) in majors):
            found.append(line)
    return found


def gpu_majors(devices: Iterable[str], proc_devices: str) -> set[int]:
    """Return the majors of NVIDIA's drivers and of some device nodes.

    Args:
        devices: device nodes of this host.
        proc_devices: text of /proc/devices.
    """
    drivers = re.findall(r"^\s*(\d+) nvidia", proc_devices.partition("Block devices:")[0], re.M)
    nodes = (os.major(Path(device).stat().st_rdev) for device in devices if is_device(device))
    return {NVIDIA_MAJOR, *map(int, drivers), *nodes}


def name_problems(guest: Guest) -> list[str]:
    """Return what is wrong with name and number, without which nothing is looked up or touched."""
    problems = []
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", guest.name):
        problems.append(
            f"lxc_container_name: {guest.name!r} is not a host name. Make it of small letters, digits and hyphens."
        )
    if guest.vmid < 100:
        problems.append(f"lxc_container_vmid: {guest.vmid} is below 100, which Proxmox VE reserves. Choose a free one.")
    return problems


def definition_problems(guest: Guest) -> list[str]:
    """Return what is wrong with a definition by itself."""
    problems = name_problems(guest)
    for variable, value in (
        ("memory_mib", guest.memory_mib),
        ("swap_mib", guest.swap_mib),
        ("cores", guest.cores),
        ("rootfs_size_gib", guest.rootfs_size_gib - 1),
    ):
        if value < 0:
            problems.append(f"lxc_container_{variable}: {getattr(guest, variable)} is too small. Give a larger number.")
    for mount in guest.mounts:
        for end, path in (("source", mount.source), ("target", mount.target)):
            if not path.startswith("/"):
                problems.append(f"lxc_container_mounts: {end} {path!r} is not an absolute path. Write it from / on.")
    try:
        interface = ipaddress.ip_interface(guest.address)
        if "/" not in guest.address:
            problems.append(
                f"lxc_container_address: {guest.address!r} has no prefix length. Write it as {guest.address}/24."
            )
        elif guest.gateway and ipaddress.ip_address(guest.gateway) not in interface.network:
            problems.append(
                f"lxc_container_gateway: {guest.gateway} is not in {interface.network} of lxc_container_address. "
                "Correct one of the two."
            )
    except ValueError as error:
        problems.append(f"lxc_container_address: {error}. Write an address with prefix length, such as 192.0.2.200/24.")
    if not guest.ssh_public_keys:
        problems.append("lxc_container_ssh_public_keys: empty, nobody could log in. Give at least one public key.")
    for key in guest.ssh_public_keys:
        if not re.match(r"(ssh-|ecdsa-|sk-)\S+ \S+", key):
            problems.append(
                f"lxc_container_ssh_public_keys: {key[:40]!r} is not a public key. Give the text of a .pub file."
            )
    return problems


def privilege_problems(guest: Guest, privileged: bool) -> list[str]:
    """Return what is wrong when an existing container is privileged, or is not, against its definition."""
    if guest.privileged == privileged:
        return []
    return [
        f"lxc_container_privileged: {guest.privileged}, but {guest.name} was made with {privileged}, and its files "
        "belong to other users then. Keep the value, or remove the container (lxc_container_state: absent) first."
    ]


def run(argv: list[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program.

    Raises:
        GuestError: it is missing, or failed and `check` is set.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise GuestError(f"{argv[0]} is not on this host; is lxc_container_backend right for it?") from error
    if check and done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise GuestError(f"`{' '.join(argv)}` ended with {done.returncode}: {text[-800:]}")
    return done


def answers(address: str) -> bool:
    """Tell whether a machine with this address answers to ARP (or neighbour discovery) from this host now."""
    run(["ip", "neighbour", "flush", "to", address], check=False)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.sendto(b"", (address, 9))
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        state = run(["ip", "neighbour", "show", address], check=False).stdout
        if "lladdr" in state and "FAILED" not in state and "INCOMPLETE" not in state:
            return True
        if "FAILED" in state or not state.strip():
            return False
        time.sleep(0.1)
    return False


def readable_text(path: Path) -> str:
    """Return a file's text, empty where there is none."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        new.chmod(mode)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def host_memory_mib() -> int:
    """Return the memory of this host in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file.

    Raises:
        GuestError: another run still holds it after LOCK_TIMEOUT_S.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise GuestError(
                        f"another run has been at work for {LOCK_TIMEOUT_S:.0f} s ({path}). Wait for its end."
                    ) from None
                time.sleep(0.2)
        yield


class Backend:
    """What both managers of containers have in common."""

    def __init__(self, guest: Guest, dry: bool) -> None:
        """Work on one container; with `dry` nothing is changed."""
        self.guest = guest
        self.dry = dry
        self.before = ""
        self.after = ""

    def owner_problems(self) -> list[str]:
        """Return why what is there under this name or number is not this container."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """Return all that stands in the way of the definition on this host."""
        guest, found = self.guest, definition_problems(self.guest) + self.owner_problems()
        if guest.bridge and not Path("/sys/class/net", guest.bridge, "bridge").exists():
            bridges = sorted(folder.parent.name for folder in Path("/sys/class/net").glob("*/bridge"))
            found.append(
                f"lxc_container_bridge: {guest.bridge!r} is not a bridge of this host. Name one of them: {bridges}."
            )
        for device in guest.devices:
            if not is_device(device) and device not in guest.planned_devices:
                found.append(
                    f"lxc_container_devices: {device} is not a character device on this host. Name it in "
                    "gpu_devices_nodes, load its driver, or take it out."
                )
        for mount in guest.mounts:
            if not Path(mount.source).exists():
                found.append(
                    f"lxc_container_mounts: {mount.source} does not exist on this host. Make it, or take it out."
                )
        if guest.memory_mib > host_memory_mib():
            found.append(
                f"lxc_container_memory_mib: {guest.memory_mib} is more than the host's {host_memory_mib()}. Lower it."
            )
        for other, ip in self.others():
            if guest.ip and ip == guest.ip:
                found.append(f"lxc_container_address: {guest.address} is {other}'s on this host. Choose a free one.")
        if not found and not self.running() and answers(guest.ip):
            found.append(
                f"lxc_container_address: {guest.address} is in use: a machine answers there, while {guest.name} is not "
                "running. Choose a free address, or turn the other machine off."
            )
        return found

    def exists(self) -> bool:
        """Tell whether the container exists whole."""
        raise NotImplementedError

    def running(self) -> bool:
        """Tell whether it runs."""
        raise NotImplementedError

    def others(self) -> Iterator[tuple[str, str]]:
        """Yield name and address of the host's other containers."""
        raise NotImplementedError

    def create(self) -> None:
        """Create the container, not yet started."""
        raise NotImplementedError

    def configure(self) -> bool:
        """Bring the configuration to the definition and tell whether it changed."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it."""
        raise NotImplementedError

    def stop(self) -> None:
        """Shut it down, at once where it does not follow in time."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Remove it with its data."""
        raise NotImplementedError

    def execute(self, argv: list[str]) -> str:
        """Run a program in it and return what it prints."""
        raise NotImplementedError

    def stale(self) -> bool:
        """Tell whether it has run since before its configuration changed."""
        raise NotImplementedError

    def partial(self) -> bool:
        """Tell whether something of it is there, but not the whole container."""
        return False

    def former(self) -> dict[Path, str]:
        """Return the configuration files that it last started with, empty where they are the present ones."""
        raise NotImplementedError

    def proved(self) -> None:
        """Note that it runs with the present configuration."""
        raise NotImplementedError

    def put_back(self, files: dict[Path, str]) -> None:
        """Write a former configuration."""
        raise NotImplementedError

    def host_keys(self) -> list[str]:
        """Return its public SSH host keys, making them where it was created without."""
        if not self.dry:
            self.execute(["sh", "-c", MAKE_HOST_KEYS])
        text = self.execute(["sh", "-c", "cat /etc/ssh/ssh_host_*_key.pub"])
        return [" ".join(line.split()[:2]) for line in text.splitlines() if line.strip()]


def decompressor(template: str) -> str:
    """Return the program that decompresses a tarball, by its name.

    Raises:
        GuestError: the name ends in nothing known.
    """
    programs = {".zst": "zstd", ".gz": "gzip", ".tgz": "gzip", ".xz": "xz"}
    suffix = Path(template).suffix
    if suffix not in programs:
        raise GuestError(f"lxc_container_template: {template} ends in none of {', '.join(sorted(programs))}.")
    return programs[suffix]


def is_device(path: str) -> bool:
    """Tell whether there is a character device at `path`."""
    try:
        return stat.S_ISCHR(Path(path).stat().st_mode)
    except OSError:
        return False


def effective_lines(config: str) -> list[str]:
    """Return the lines of an LXC configuration that a running container was shaped by."""
    return [line for line in config.splitlines() if not line.startswith(("#", "lxc.start."))]


class Lxc(Backend):
    """Plain LXC: a folder below lxcpath with config and rootfs."""

    def __init__(self, guest: Guest, dry: bool, lxcpath: Path) -> None:
        """Work on the container of that name below `lxcpath`."""
        super().__init__(guest, dry)
        self.lxcpath = lxcpath
        self.folder = lxcpath / guest.name
        self.config = self.folder / "config"
        self.devices = GUESTS / f"{guest.name}.json"
        self.kept = self.folder / "former"

    def owner_problems(self) -> list[str]:
        """Return why what is there under this name is not this container."""
        name, config = self.guest.name, readable_text(self.config)
        vmid = re.search(rf"^{re.escape(MARK)}\n# vmid: (\d+)$", config, re.M)
        if vmid is not None:
            ours, owner = int(vmid[1]) == self.guest.vmid, f"has vmid {vmid[1]}"
        else:
            ours = not self.folder.is_dir() or not any(self.folder.iterdir())
            owner = "was not made by this role"
        if ours:
            return []
        return [
            f"lxc_container_name: a container {name} exists in {self.lxcpath} and {owner}, not {self.guest.vmid}. "
            "Correct the name or the vmid, or rename that container."
        ]

    def partial(self) -> bool:
        """Tell whether something of it is there, but not the whole container."""
        return not self.exists() and (self.folder.exists() or self.devices.exists())

    def files(self) -> tuple[Path, ...]:
        """Return the files that make up its configuration."""
        return (self.config, self.devices)

    def keep(self) -> None:
        """Keep the configuration that it last started with, until it has started with another."""
        if not self.kept.exists() and (self.folder / "started").exists():
            write(self.kept, json.dumps({str(path): readable_text(path) for path in self.files()}), 0o600)

    def former(self) -> dict[Path, str]:
        """Return the configuration files that it last started with, empty where they are the present ones."""
        kept = {Path(path): text for path, text in json.loads(readable_text(self.kept) or "{}").items()}
        return {} if all(readable_text(path) == text for path, text in kept.items()) else kept

    def proved(self) -> None:
        """Note that it runs with the present configuration."""
        self.kept.unlink(missing_ok=True)

    def put_back(self, files: dict[Path, str]) -> None:
        """Write a former configuration."""
        for path, text in files.items():
            if text:
                write(path, text)
            else:
                path.unlink(missing_ok=True)
        self._make_rules()

    def _make_rules(self) -> bool:
        """Let gpu-devices write the rules of its devices and tell whether they changed."""
        if not self.devices.exists():
            return False
        done, mine = run(["/usr/local/sbin/gpu-devices", "--guest", self.guest.name], False), f"{self.guest.name}: "
        try:
            answer = json.loads(done.stdout)
        except ValueError as error:
            raise GuestError(f"gpu-devices: {done.stderr.strip()[-500:]}") from error
        errors = [line.removeprefix(mine) for line in answer["errors"] if line.startswith(mine)]
        if errors:
            raise GuestError(f"gpu-devices: {'; '.join(errors)}. Correct lxc_container_devices, or load the driver.")
        return any(change.startswith(mine) for change in answer["changes"])

    def problems(self) -> list[str]:
        """Return all that stands in the way of the definition on this host."""
        guest, found = self.guest, super().problems()
        if not self.exists() and not Path(guest.template).is_file():
            found.append(
                f"lxc_container_template: {guest.template} is not a file on this host. Download it there first."
            )
        if self.exists():
            found += privilege_problems(guest, "\nlxc.idmap" not in self.config.read_text())
        for config in self.lxcpath.glob("*/config"):
            if config != self.config and f"\n# vmid: {guest.vmid}\n" in config.read_text():
                found.append(
                    f"lxc_container_vmid: {guest.vmid} is used by {config.parent.name} on this host. Choose a free one."
                )
        controllers = readable_text(Path("/sys/fs/cgroup/cgroup.controllers")).split()
        for variable, value, controller in (
            ("lxc_container_memory_mib", guest.memory_mib, "memory"),
            ("lxc_container_cores", guest.cores, "cpu"),
        ):
            if value and controller not in controllers:
                found.append(
                    f"{variable}: {value} cannot be enforced, this host's cgroup2 has no {controller} controller "
                    f"(it has {controllers}). Set it to 0."
                )
        return found

    def exists(self) -> bool:
        """Tell whether the container exists whole."""
        return self.config.exists() and (self.folder / "rootfs").is_dir()

    def running(self) -> bool:
        """Tell whether it runs."""
        if not self.config.exists():
            return False
        return (
            run(["lxc-info", "-P", str(self.lxcpath), "-n", self.guest.name, "-sH"], False).stdout.strip() == "RUNNING"
        )

    def others(self) -> Iterator[tuple[str, str]]:
        """Yield name and address of the host's other containers."""
        for config in self.lxcpath.glob("*/config"):
            found = re.search(r"^lxc\.net\.0\.ipv4\.address\s*=\s*([^/\s]+)", config.read_text(), re.M)
            if found and config != self.config:
                yield config.parent.name, found[1]

    def create(self) -> None:
        """Unpack the template; the container counts as made when the finished rootfs is renamed into place."""
        guest, partial = self.guest, self.folder / "rootfs.partial"
        if self.dry or (self.folder / "rootfs").is_dir():
            return
        self._map_ids()
        owner = 0 if guest.privileged else ID_MAP_START
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.folder.chmod(0o711)
        if not self.config.exists():
            write(self.config, f"{MARK}\n# vmid: {guest.vmid}\n")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        os.chown(partial, owner, owner)

        def put(name: str, text: str, mode: int = 0o644) -> None:
            path = partial / name
            path.unlink(missing_ok=True)
            path.write_text(text)
            path.chmod(mode)
            os.chown(path, owner, owner)

        # As root of the container's user namespace, so that owners, set-uid bits and file capabilities are the
        # container's; LXC 5's id-mapped mounts would do without, but are lost when a container reboots itself.
        mapped = [] if guest.privileged else ["lxc-usernsexec", "-m", f"b:0:{ID_MAP_START}:{ID_MAP_SIZE}", "--"]
        unpack = ["tar", "--extract", "--numeric-owner", f"--use-compress-program={decompressor(guest.template)}"]
        skip = ["--exclude=./dev/*", "--exclude=dev/*"]
        run([*mapped, *unpack, *skip, "--file", guest.template, "--directory", str(partial)])
        put("etc/hostname", f"{guest.name}\n")
        put("etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{guest.ip} {guest.name}\n")
        servers = "".join(f"nameserver {server}\n" for server in guest.nameservers)
        put("etc/resolv.conf", servers or readable_text(Path("/etc/resolv.conf")))
        (partial / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
        os.chown(partial / "root/.ssh", owner, owner)
        put("root/.ssh/authorized_keys", "".join(f"{key.strip()}\n" for key in guest.ssh_public_keys), 0o600)
        run([*mapped, "ssh-keygen", "-A", "-f", str(partial)])
        partial.rename(self.folder / "rootfs")

    def configure(self) -> bool:
        """Bring the configuration to the definition and tell whether it changed."""
        guest = self.guest
        wanted = lxc_config(guest, self.folder)
        rules = {"devices": list(guest.devices), "include": str(self.folder / "devices.conf")}
        wanted_devices = json.dumps(rules, indent=1) + "\n" if guest.devices else ""
        self.before = readable_text(self.config) + readable_text(self.devices)
        self.after = wanted + wanted_devices
        changed = self.before != self.after
        if changed and not self.dry:
            self.keep()
            if wanted_devices:
                write(self.devices, wanted_devices)
            else:
                self.devices.unlink(missing_ok=True)
                (self.folder / "devices.conf").unlink(missing_ok=True)
            if readable_text(self.config) != wanted:
                write(self.config, wanted)
        if not self.dry:
            changed |= self._make_rules()
        return changed

    def _map_ids(self) -> None:
        """Let root of this host map the container's ids, as Proxmox VE does at its installation."""
        if self.guest.privileged:
            return
        for name in ("/etc/subuid", "/etc/subgid"):
            line, text = f"root:{ID_MAP_START}:{ID_MAP_SIZE}", readable_text(Path(name))
            if line not in text.splitlines():
                write(Path(name), f"{text}{line}\n")

    def stale(self) -> bool:
        """Tell whether it has run since before its configuration changed."""
        files = sorted(file for file in self.folder.glob("*conf*") if not file.name.startswith("."))
        now = "".join(file.read_text() for file in files)
        return effective_lines(now) != effective_lines(readable_text(self.folder / "started"))

    def start(self) -> None:
        """Start it."""
        log = self.folder / "lxc.log"
        log.unlink(missing_ok=True)
        try:
            run(["lxc-start", "-P", str(self.lxcpath), "-n", self.guest.name, "-o", str(log), "-l", "WARN"])
        except GuestError as error:
            lines = [line for line in readable_text(log).splitlines() if " ERROR " in line]
            raise GuestError("\n".join([str(error), *lines[-5:]])) from error

    def stop(self) -> None:
        """Shut it down, at once where it does not follow in time."""
        run(["lxc-stop", "-P", str(self.lxcpath), "-n", self.guest.name, "-t", str(STOP_TIMEOUT_S)])

    def destroy(self) -> None:
        """Remove it with its data."""
        self.devices.unlink(missing_ok=True)
        if self.folder.exists():
            for one in self.folder.iterdir():
                if one != self.config:
                    shutil.rmtree(one) if one.is_dir() else one.unlink()
            shutil.rmtree(self.folder)

    def execute(self, argv: list[str]) -> str:
        """Run a program in it and return what it prints."""
        base = ["lxc-attach", "-P", str(self.lxcpath), "-n", self.guest.name, "--clear-env", "--"]
        return run([*base, "env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *argv]).stdout


class Pct(Backend):
    """Proxmox VE: /etc/pve/lxc/VMID.conf, changed through pct."""

    def __init__(self, guest: Guest, dry: bool) -> None:
        """Work on the container with the definition's vmid."""
        super().__init__(guest, dry)
        self.id = str(guest.vmid)
        self.config = PVE_CONFIG / f"{guest.vmid}.conf"
        self.kept = FORMER / f"{guest.vmid}.conf"
        self.outdated = FORMER / f"{guest.vmid}.outdated"

    def owner_problems(self) -> list[str]:
        """Return why what is there under this number is not this container."""
        found = []
        owner = main_section(readable_text(self.config)).get("hostname", "a container without a hostname")
        if self.config.exists() and owner != self.guest.name:
            found.append(
                f"lxc_container_vmid: {self.guest.vmid} is used by {owner} on this host. Choose a free one, or correct "
                "lxc_container_name."
            )
        for config in Path("/etc/pve").glob(f"nodes/*/*/{self.id}.conf"):
            if not (self.config.exists() and config.samefile(self.config)):
                found.append(
                    f"lxc_container_vmid: {self.guest.vmid} is used by {config.relative_to('/etc/pve')}. "
                    "Choose a free one."
                )
        return found

    def problems(self) -> list[str]:
        """Return all that stands in the way of the definition on this host."""
        found = super().problems()
        if self.exists():
            current = main_section(readable_text(self.config))
            found += privilege_problems(self.guest, current.get("unprivileged", "0") != "1")
            found += volume_problems(self.guest, current)
        elif not self.guest.template:
            found.append("lxc_container_template: empty. Name one from `pveam list local`.")
        return found

    def exists(self) -> bool:
        """Tell whether the container exists whole."""
        return self.config.exists()

    def running(self) -> bool:
        """Tell whether it runs."""
        return self.exists() and "running" in run(["pct", "status", self.id]).stdout

    def others(self) -> Iterator[tuple[str, str]]:
        """Yield name and address of the host's other containers."""
        for config in PVE_CONFIG.glob("*.conf"):
            options = main_section(config.read_text())
            found = re.search(r"\bip=([^/,]+)", options.get("net0", ""))
            if found and config != self.config:
                yield options.get("hostname", config.stem), found[1]

    def create(self) -> None:
        """Create the container, not yet started; pct removes a half-made one itself."""
        guest = self.guest
        if self.dry or self.exists():
            return
        keys = Path(f"/run/lxc-guest-{self.id}.pub")
        keys.write_text("".join(f"{key.strip()}\n" for key in guest.ssh_public_keys))
        options = {
            **{key: value for key, value in pct_options(guest, {}).items() if value is not None},
            "rootfs": f"{guest.storage}:{guest.rootfs_size_gib}",
            "unprivileged": str(int(not guest.privileged)),
            "ssh-public-keys": str(keys),
        }
        try:
            run(["pct", "create", self.id, guest.template, *flags(options), "--start", "0"])
        finally:
            keys.unlink()

    def configure(self) -> bool:
        """Bring the configuration to the definition and tell whether it changed."""
        text = readable_text(self.config)
        current = main_section(text)
        wanted = pct_options(self.guest, current)
        changed, stale = pct_changes(current, wanted)
        raw = raw_device_lines(text, gpu_majors(self.guest.devices, readable_text(Path("/proc/devices"))))
        touched = sorted({*changed, *stale} & current.keys())
        self.before = "".join([*(f"{key}: {current[key]}\n" for key in touched), *(f"{line}\n" for line in raw)])
        self.after = "".join(f"{key}: {changed[key]}\n" for key in sorted(changed))
        if not self.dry:
            if (changed or stale or raw) and text and not self.kept.exists():
                write(self.kept, text, 0o600)
            if changed or stale:
                delete = ["--delete", ",".join(stale)] if stale else []
                run(["pct", "set", self.id, *flags(changed), *delete])
            if raw:
                if self.running():
                    write(self.outdated, self.started())
                self.remove_lines(raw)
        return bool(changed or stale or raw)

    def remove_lines(self, lines: list[str]) -> None:
        """Take lines out of the main section of its file, which pct itself writes meanwhile or not at all."""
        with exclusive(Path(f"/run/lock/lxc/pve-config-{self.id}.lock")):
            head, *sections = re.split(r"(?m)^(?=\[)", readable_text(self.config))
            kept = (line for line in head.splitlines(keepends=True) if line.rstrip("\n") not in lines)
            write(self.config, "".join([*kept, *sections]), 0o640)

    def started(self) -> str:
        """Return what identifies this run of the container: its first process and when that began."""
        pid = run(["lxc-info", "-n", self.id, "-pH"]).stdout.strip()
        return f"{pid} {readable_text(Path(f'/proc/{pid}/stat')).rpartition(')')[2].split()[19]}\n"

    def stale(self) -> bool:
        """Tell whether it has run since before its configuration changed."""
        waits = PENDING in readable_text(self.config).splitlines()
        return waits or (self.outdated.exists() and readable_text(self.outdated) == self.started())

    def former(self) -> dict[Path, str]:
        """Return the configuration file that it last started with, empty where it is the present one."""
        kept = readable_text(self.kept)
        return {self.config: kept} if kept and kept != readable_text(self.config) else {}

    def proved(self) -> None:
        """Note that it runs with the present configuration."""
        self.kept.unlink(missing_ok=True)
        self.outdated.unlink(missing_ok=True)

    def put_back(self, files: dict[Path, str]) -> None:
        """Write the main section of a former configuration; snapshots made since stay."""
        with exclusive(Path(f"/run/lock/lxc/pve-config-{self.id}.lock")):
            former = re.split(r"(?m)^\[", files[self.config])[0].rstrip("\n")
            sections = re.split(r"(?m)^(?=\[)", readable_text(self.config))[1:]
            snapshots = "".join(section for section in sections if not section.startswith(PENDING))
            write(self.config, f"{former}\n" + (f"\n{snapshots}" if snapshots else ""), 0o640)

    def start(self) -> None:
        """Start it."""
        run(["pct", "start", self.id])

    def stop(self) -> None:
        """Shut it down, at once where it does not follow in time."""
        run(["pct", "shutdown", self.id, "--timeout", str(STOP_TIMEOUT_S), "--forceStop", "1"])

    def destroy(self) -> None:
        """Remove it with its data."""
        run(["pct", "destroy", self.id, "--purge", "1"])
        self.proved()

    def execute(self, argv: list[str]) -> str:
        """Run a program in it and return what it prints."""
        return run(["pct", "exec", self.id, "--", *argv]).stdout


def flags(options: dict[str, str]) -> list[str]:
    """Return options as command line words of pct."""
    return [word for key, value in options.items() for word in (f"--{key}", value)]


def refuse(problems: list[str]) -> None:
    """End where there are problems.

    Raises:
        GuestError: there are.
    """
    if problems:
        raise GuestError("nothing was changed:\n" + "\n".join(f"- {line}" for line in problems))


def converge(backend: Backend, state: str) -> dict[str, Any]:
    """Bring a container to `state` and return the module's result.

    Raises:
        GuestError: the definition has problems, or a step failed.
    """
    dry = backend.dry
    refuse(name_problems(backend.guest) or backend.owner_problems())
    existed = backend.exists()
    running = backend.running() if existed else False
    if state == "absent":
        present = existed or backend.partial()
        if present and not dry:
            if running:
                backend.stop()
            backend.destroy()
        return {"changed": present, "exists": False, "restart_required": False}
    if state == "stopped":
        if running and not dry:
            backend.stop()
        return {"changed": running, "exists": existed, "restart_required": False}
    if state in ("started", "restarted"):
        return run_guest(backend, existed, running, state)
    refuse(backend.problems())
    if state == "checked":
        return {"changed": False, "exists": existed, "restart_required": False}
    if not existed:
        backend.create()
    configured = backend.configure()
    due = running and (configured if dry else backend.stale())
    if running and not due and not dry:
        backend.proved()
    header = {"before_header": "before", "after_header": "after"}
    result = {
        "changed": configured or not existed,
        "exists": existed or not dry,
        "restart_required": due,
        "settled": running and not due,
        "diff": {"before": backend.before, "after": backend.after, **header},
    }
    return result | ({"host_keys": backend.host_keys()} if running and not due else {})


def run_guest(backend: Backend, exists: bool, running: bool, state: str) -> dict[str, Any]:
    """Start or restart a container and return the module's result.

    Raises:
        GuestError: there is no such container, or it does not start; it runs with its former configuration then.
    """
    dry = backend.dry
    if not exists and not dry:
        raise GuestError("does not exist. Make it first: run the play without `--tags run`.")
    changed = state == "restarted" or not running
    if changed and not dry:
        if running:
            backend.stop()
        begin(backend)
    result: dict[str, Any] = {"changed": changed, "exists": exists, "restart_required": False}
    if exists and (running or not dry):
        result["host_keys"] = backend.host_keys()
    return result


def begin(backend: Backend) -> None:
    """Start a container, with its former configuration where it does not start with the present one.

    Raises:
        GuestError: it did not start with the present one.
    """
    try:
        backend.start()
        backend.proved()
    except GuestError as error:
        former = backend.former()
        if not former:
            raise
        try:
            backend.put_back(former)
            backend.start()
            backend.proved()
            outcome = "it runs with its former configuration again"
        except GuestError:
            outcome = "it does not start with its former configuration either, which is in place"
        raise GuestError(f"did not start with its new configuration; {outcome}.\n{error}") from error


def main() -> None:
    """Run the module."""
    mount = {
        "source": {"type": "path", "required": True},
        "target": {"type": "path", "required": True},
        "read_only": {"type": "bool", "default": False},
    }
    states = ["checked", "present", "started", "restarted", "stopped", "absent"]
    module = AnsibleModule(
        argument_spec={
            "backend": {"type": "str", "required": True, "choices": ["lxc", "pct"]},
            "state": {"type": "str", "default": "present", "choices": states},
            "vmid": {"type": "int", "required": True},
            "name": {"type": "str", "required": True},
            "template": {"type": "str", "default": ""},
            "storage": {"type": "str", "default": "local"},
            "rootfs_size_gib": {"type": "int", "default": 32},
            "cores": {"type": "int", "default": 0},
            "memory_mib": {"type": "int", "default": 0},
            "swap_mib": {"type": "int", "default": 0},
            "privileged": {"type": "bool", "default": False},
            "nesting": {"type": "bool", "default": False},
            "bridge": {"type": "str", "default": ""},
            "address": {"type": "str", "default": ""},
            "gateway": {"type": "str", "default": ""},
            "nameservers": {"type": "list", "elements": "str", "default": []},
            "ssh_public_keys": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "devices": {"type": "list", "elements": "path", "default": []},
            "planned_devices": {"type": "list", "elements": "path", "default": []},
            "mounts": {"type": "list", "elements": "dict", "default": [], "options": mount},
            "autostart": {"type": "bool", "default": True},
            "lxcpath": {"type": "path", "default": "/var/lib/lxc"},
        },
        supports_check_mode=True,
    )
    values = dict(module.params)
    backend_name, state, lxcpath = values.pop("backend"), values.pop("state"), Path(values.pop("lxcpath"))
    for key in ("nameservers", "ssh_public_keys", "devices", "planned_devices"):
        values[key] = tuple(values[key])
    values["mounts"] = tuple(Mount(**mount) for mount in values["mounts"])
    guest = Guest(**values)
    dry = module.check_mode
    backend: Backend = Lxc(guest, dry, lxcpath) if backend_name == "lxc" else Pct(guest, dry)
    try:
        with (
            contextlib.nullcontext()
            if dry or state == "checked"
            else exclusive(Path(f"/run/lxc-guest-{guest.vmid}.lock"))
        ):
            result = converge(backend, state)
    except (GuestError, OSError) as error:
        module.fail_json(msg=f"container {guest.name} ({guest.vmid}): {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
