#!/usr/bin/python3
"""Ansible module: the size of /dev/shm, now and after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: dev_shm
short_description: Size of /dev/shm, now and after a restart
description:
  - Remounts the tmpfs at C(/dev/shm), which keeps what is in it, and names the size in C(/etc/fstab), from which
    systemd-remount-fs sets it at boot. Any other C(/etc/fstab) line for C(/dev/shm) is replaced.
  - All problems are found before anything is changed and reported together, each with variable, value and remedy.
options:
  state:
    type: str
    default: present
    choices: [checked, present, absent]
    description: V(checked) only looks for problems, V(absent) brings back the kernel's default of half the memory.
  size_mib: {type: int, required: true, description: Size in MiB.}
  memory_mib: {type: int, default: 0, description: "Memory of the machine in MiB, 0 to detect it."}
author: [maintainers]
"""

EXAMPLES = r"""
- name: 16 GiB
  dev_shm:
    size_mib: 16384
"""

RETURN = r"""
size_mib: {type: int, returned: always, description: Size of /dev/shm in MiB before this task.}
used_mib: {type: int, returned: always, description: Space in use in MiB.}
memory_mib: {type: int, returned: always, description: Memory that the size was compared with in MiB.}
"""

MOUNT_POINT = "/dev/shm"
FSTAB = Path("/etc/fstab")
MIB = 1024 * 1024
KEPT_FLAGS = ("nosuid", "nodev", "noexec")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class ShmError(Exception):
    """A size that cannot be had; the text says why."""


@dataclass(frozen=True)
class Mount:
    """The tmpfs at /dev/shm; sizes in bytes."""

    flags: tuple[str, ...]
    size: int
    used: int


def mount_flags(mountinfo: str) -> tuple[str, ...]:
    """Return the per-mount flags of /dev/shm, from the text of /proc/self/mountinfo (proc(5)).

    Raises:
        ShmError: /dev/shm is not a tmpfs.
    """
    found = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 5 and fields[4] == MOUNT_POINT:
            found = (after.split()[0], tuple(fields[5].split(",")))
    if found is None or found[0] != "tmpfs":
        kind = "not a mount point" if found is None else f"a {found[0]}, not a tmpfs"
        raise ShmError(f"{MOUNT_POINT} is {kind}. Mount a tmpfs there, as systemd does at boot, and run again.")
    return found[1]


def current() -> Mount:
    """Return what is mounted now."""
    flags = mount_flags(Path("/proc/self/mountinfo").read_text())
    numbers = os.statvfs(MOUNT_POINT)
    return Mount(flags, numbers.f_blocks * numbers.f_frsize, (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize)


def memory(meminfo: str, limits: Iterable[str]) -> int:
    """Return the memory of this machine in bytes: what /proc/meminfo says, or a cgroup limit below it."""
    total = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:"))
    return min([total, *(int(limit) for limit in limits if limit.strip().isdigit())])


def detected_memory() -> int:
    """Return the memory of this machine in bytes."""
    limits = [path.read_text() for path in CGROUP_LIMITS if path.is_file()]
    return memory(Path("/proc/meminfo").read_text(), limits)


def problems(size_mib: int, memory_mib: int, mount: Mount) -> list[str]:
    """Return everything that is wrong with a size, each with variable, value and remedy."""
    found = []
    if size_mib <= 0:
        found.append(f"shm_size_mib is {size_mib}. Set it to a number of MiB above 0.")
    if size_mib >= memory_mib:
        found.append(
            f"shm_size_mib is {size_mib}, but the machine has {memory_mib} MiB of memory, which /dev/shm is part of. "
            "Lower shm_size_mib, or give the container more memory (shm_memory_mib, where that is not what it sees)."
        )
    if 0 < size_mib * MIB < mount.used:
        found.append(
            f"shm_size_mib is {size_mib}, but {-(-mount.used // MIB)} MiB of /dev/shm are in use. "
            "Remove files from /dev/shm, or stop what uses them, or raise shm_size_mib."
        )
    return found


def mount_options(size: str, flags: tuple[str, ...]) -> str:
    """Return the mount options for a size; flags that are set stay, as a user namespace cannot drop them."""
    kept = [flag for flag in KEPT_FLAGS if flag in flags or flag != "noexec"]
    return ",".join([*kept, f"size={size}"])


def with_line(fstab: str, line: str | None) -> str:
    """Return an fstab whose only line for /dev/shm is `line`, at the place of the first one; None for no line."""
    kept: list[str] = []
    place = None
    for old in fstab.splitlines():
        fields = old.split()
        if len(fields) > 1 and not old.lstrip().startswith("#") and fields[1] == MOUNT_POINT:
            place = len(kept) if place is None else place
        else:
            kept.append(old)
    if line is not None:
        kept.insert(len(kept) if place is None else place, line)
    return "".join(f"{each}\n" for each in kept)


def write(module: AnsibleModule, text: str) -> None:
    """Replace /etc/fstab at once."""
    new = Path(module.tmpdir) / "fstab"
    new.write_text(text)
    new.chmod(0o644)
    module.atomic_move(str(new), str(FSTAB))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["checked", "present", "absent"]},
            "size_mib": {"type": "int", "required": True},
            "memory_mib": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    state, size_mib = module.params["state"], module.params["size_mib"]
    try:
        mount = current()
    except (ShmError, OSError) as error:
        module.fail_json(msg=str(error))
    memory_mib = module.params["memory_mib"] or detected_memory() // MIB
    facts = {"size_mib": mount.size // MIB, "used_mib": -(-mount.used // MIB), "memory_mib": memory_mib}
    found = problems(size_mib, memory_mib, mount) if state != "absent" else []
    if found:
        module.fail_json(msg=" ".join(found), problems=found, **facts)
    if state == "checked":
        module.exit_json(changed=False, **facts)

    old = FSTAB.read_text() if FSTAB.is_file() else ""
    options = mount_options(f"{size_mib}m" if state == "present" else "50%", mount.flags)
    new = with_line(old, f"tmpfs {MOUNT_POINT} tmpfs {options} 0 0" if state == "present" else None)
    listed = new != old
    resize = mount.size != size_mib * MIB if state == "present" else listed
    wanted = f"{size_mib} MiB" if state == "present" else "half the memory"
    diff = [
        {
            "before": f"{mount.size // MIB} MiB\n",
            "after": f"{wanted if resize else f'{mount.size // MIB} MiB'}\n",
            "before_header": MOUNT_POINT,
            "after_header": MOUNT_POINT,
        },
        {"before": old, "after": new, "before_header": str(FSTAB), "after_header": str(FSTAB)},
    ]
    if not module.check_mode:
        if listed:
            write(module, new)
        if resize:
            # Source and target both named: mount(8) then takes no option from the mount table, where an unprivileged
            # container has uid and gid of the host, which the kernel refuses in it.
            code, _, stderr = module.run_command(["mount", "-o", f"remount,{options}", "tmpfs", MOUNT_POINT])
            if code:
                if listed:
                    write(module, old)
                module.fail_json(
                    msg=f"/dev/shm stays at {mount.size // MIB} MiB, not {wanted}: {stderr.strip()}", **facts
                )
    module.exit_json(changed=listed or resize, diff=diff, **facts)


if __name__ == "__main__":
    main()
