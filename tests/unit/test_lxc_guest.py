"""One definition becomes the right configuration on both back ends, and bad definitions are refused in words."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.loading import load

module = load("roles/lxc_container/library/lxc_guest.py")

GOOD: dict[str, Any] = {
    "vmid": 200,
    "name": "ct200",
    "template": "/t.tar.zst",
    "bridge": "vmbr0",
    "address": "192.0.2.200/24",
    "gateway": "192.0.2.1",
    "ssh_public_keys": ("ssh-ed25519 AAAA admin",),
    "devices": ("/dev/nvidia0", "/dev/nvidia-uvm"),
    "mounts": (module.Mount("/tank/models", "/models", True), module.Mount("/tank/work", "/work")),
}


def guest(**changes: Any) -> Any:
    return module.Guest(**(GOOD | changes))


def test_good_definition_has_no_problems() -> None:
    assert module.definition_problems(guest()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "CT_200"}, "lxc_container_name: 'CT_200' is not a host name"),
        ({"vmid": 99}, "lxc_container_vmid: 99 is below 100"),
        ({"address": "192.0.2.200"}, "has no prefix length. Write it as 192.0.2.200/24."),
        ({"address": "192.0.2.300/24"}, "lxc_container_address: '192.0.2.300/24' does not appear to be"),
        ({"gateway": "198.51.100.1"}, "198.51.100.1 is not in 192.0.2.0/24"),
        ({"ssh_public_keys": ()}, "lxc_container_ssh_public_keys: empty, nobody could log in"),
        ({"ssh_public_keys": ("-----BEGIN OPENSSH PRIVATE KEY-----",)}, "is not a public key. Give the text of a .pub"),
    ],
)
def test_bad_definition_is_named_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    (problem,) = module.definition_problems(guest(**changes))
    assert message in problem


def lines(**changes: Any) -> list[str]:
    return list(module.lxc_config(guest(**changes), Path("/var/lib/lxc/ct200")).splitlines())


def test_includes_come_in_the_order_that_keeps_the_allow_list() -> None:
    found = [line for line in lines() if line.startswith("lxc.include")]
    assert found == [
        "lxc.include = /usr/share/lxc/config/userns.conf",
        "lxc.include = /usr/share/lxc/config/common.conf",
        "lxc.include = /var/lib/lxc/ct200/devices.conf",
    ]
    assert lines()[-1] == "lxc.start.auto = 1"


def test_privileged_container_maps_no_ids() -> None:
    assert not [line for line in lines(privileged=True) if "idmap" in line or "userns" in line]
    assert "lxc.idmap = u 0 100000 65536" in lines()


def test_limits_are_those_of_cgroup2() -> None:
    found = lines(cores=8, memory_mib=65536, swap_mib=512)
    assert "lxc.cgroup2.cpu.max = 800000 100000" in found
    assert "lxc.cgroup2.memory.max = 65536M" in found
    assert "lxc.cgroup2.memory.swap.max = 512M" in found
    assert not [line for line in lines() if "memory" in line or "cpu.max" in line]


def test_mounts_of_plain_lxc() -> None:
    found = [line for line in lines() if line.startswith("lxc.mount.entry")]
    assert found == [
        "lxc.mount.entry = /tank/models models none bind,create=dir,ro 0 0",
        "lxc.mount.entry = /tank/work work none bind,create=dir 0 0",
    ]


def test_hardware_address_is_local_and_stable() -> None:
    assert guest().hwaddr == guest(vmid=201).hwaddr
    assert guest().hwaddr != guest(name="ct201").hwaddr
    assert guest().hwaddr.startswith("02:")
    assert len(guest().hwaddr) == 17


def test_options_for_proxmox() -> None:
    options = module.pct_options(guest(memory_mib=4096, cores=2, nesting=True))
    assert options == {
        "hostname": "ct200",
        "memory": "4096",
        "swap": "0",
        "cores": "2",
        "onboot": "1",
        "features": "nesting=1",
        "net0": f"name=eth0,bridge=vmbr0,hwaddr={guest().hwaddr.upper()},ip=192.0.2.200/24,type=veth,gw=192.0.2.1",
        "dev0": "/dev/nvidia0,mode=0666",
        "dev1": "/dev/nvidia-uvm,mode=0666",
        "mp0": "/tank/models,mp=/models,ro=1",
        "mp1": "/tank/work,mp=/work",
    }


PVE = """#comment of an operator
arch: amd64
dev0: mode=0666,/dev/nvidia0
dev2: /dev/nvidia7,mode=0666
hostname: ct200
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.apparmor.profile: unconfined
onboot: 1

[pve:pending]
memory: 4096

[before-upgrade]
hostname: old
memory: 512
"""


def test_only_the_main_section_and_what_is_pending_count() -> None:
    options = module.main_section(PVE)
    assert options["hostname"] == "ct200"
    assert options["memory"] == "4096"


def test_changes_leave_alone_what_the_role_does_not_own() -> None:
    current = {"arch": "amd64", "dev0": "/dev/nvidia0,mode=0666", "dev2": "/dev/nvidia7,mode=0666", "tags": "gpu"}
    changed, stale = module.pct_changes(current, {"dev0": "/dev/nvidia0,mode=0666", "onboot": "1"})
    assert changed == {"onboot": "1"}
    assert stale == ["dev2"]


def test_order_of_parts_makes_no_difference() -> None:
    assert module.normal("name=eth0,bridge=vmbr0") == module.normal("bridge=vmbr0,name=eth0")
    assert module.normal("/dev/a,mode=0666") != module.normal("/dev/b,mode=0666")


def test_raw_device_lines_go_and_all_else_stays() -> None:
    cleaned = module.without_raw_devices(PVE)
    assert "devices.allow" not in cleaned
    assert "lxc.mount.entry" not in cleaned
    assert "lxc.apparmor.profile: unconfined" in cleaned
    assert cleaned.endswith("[before-upgrade]\nhostname: old\nmemory: 512\n")
    assert module.without_raw_devices(cleaned) == cleaned


def test_only_what_shapes_a_running_container_asks_for_a_restart() -> None:
    before, after = lines(), lines(autostart=False)
    assert before != after
    assert module.effective_lines("\n".join(before)) == module.effective_lines("\n".join(after))
    assert module.effective_lines("\n".join(before)) != module.effective_lines("\n".join(lines(gateway="")))


@pytest.mark.parametrize(
    ("template", "program"), [("a.tar.zst", "zstd"), ("a.tar.gz", "gzip"), ("a.tgz", "gzip"), ("a.tar.xz", "xz")]
)
def test_template_is_decompressed_by_its_name(template: str, program: str) -> None:
    assert module.decompressor(template) == program


def test_unknown_template_is_refused() -> None:
    with pytest.raises(module.GuestError, match=r"lxc_container_template: a\.zip ends in none of"):
        module.decompressor("a.zip")


@pytest.fixture
def plain(tmp_path: Path) -> Any:
    """A plain LXC host with two containers."""
    for name, vmid, address in (("ct200", 200, "192.0.2.200"), ("ct201", 201, "192.0.2.201")):
        (tmp_path / name / "rootfs").mkdir(parents=True)
        text = module.lxc_config(guest(name=name, vmid=vmid, address=f"{address}/24"), tmp_path / name)
        (tmp_path / name / "config").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vmid": 201}, "lxc_container_vmid: 201 is used by ct201 on this host. Choose a free one."),
        ({"vmid": 300}, "lxc_container_name: a container ct200 exists and has vmid 200. Rename one of the two."),
        ({"address": "192.0.2.201/24"}, "lxc_container_address: 192.0.2.201/24 is ct201's on this host."),
        ({"privileged": True}, "lxc_container_privileged: True, but ct200 was made with False"),
        ({"devices": ("/dev/nvidia9",)}, "lxc_container_devices: /dev/nvidia9 is not a character device on this host"),
        ({"mounts": (module.Mount("/none", "/n"),)}, "lxc_container_mounts: /none does not exist on this host"),
        ({"bridge": "vmbr9"}, "lxc_container_bridge: 'vmbr9' is not a bridge of this host"),
        ({"memory_mib": 10**9}, "lxc_container_memory_mib: 1000000000 is more than the host's"),
    ],
)
def test_conflicts_on_the_host_are_named(plain: Path, changes: dict[str, Any], message: str) -> None:
    definition = guest(**{"devices": (), "mounts": (), "bridge": "", **changes})
    problems = module.Lxc(definition, True, plain).problems()
    assert [problem for problem in problems if message in problem], problems
