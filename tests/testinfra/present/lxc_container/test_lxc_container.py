"""A container runs as defined, reaches its devices and no others, and comes back by itself."""

import ipaddress
import json
import shlex
from typing import Any

import pytest
from testinfra.host import Host

from tests.testinfra.restart import reboot

GROUP = "gpu_containers"

OPEN = """
import errno, json, os, sys
answers = {}
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        answers[path] = "opened"
    except OSError as error:
        answers[path] = errno.errorcode[error.errno]
print(json.dumps(answers))
"""
NUMBERS = "stat -c '%%F %%t:%%T' %s"


def container_id(variables: dict[str, Any]) -> str:
    """Return the name under which LXC's programs know the container."""
    backend = variables["lxc_container_backend"]
    return str(variables["lxc_container_vmid"] if backend == "pct" else variables["lxc_container_name"])


def open_answers(host: Host, devices: list[str], within: list[str] | None = None) -> dict[str, str]:
    """Return what opening each device says ("opened" or the error's name), by a program run through `within`."""
    return dict(json.loads(host.check_output(shlex.join([*(within or []), "python3", "-c", OPEN, *devices]))))


def test_system_is_running(host: Host) -> None:
    assert host.run("systemctl is-system-running").stdout.strip() == "running", host.run("systemctl --failed").stdout


def test_name_and_address(host: Host, variables: dict[str, Any]) -> None:
    wanted = ipaddress.ip_interface(variables["lxc_container_address"])
    shown = json.loads(host.check_output("ip -json address show scope global"))
    found = {f"{one['local']}/{one['prefixlen']}" for link in shown for one in link.get("addr_info", []) if one}
    assert str(wanted) in found
    assert host.check_output("hostname") == variables["lxc_container_name"]


def test_privileges_are_the_inventorys(host: Host, variables: dict[str, Any]) -> None:
    outside = int(host.check_output("cat /proc/self/uid_map").split()[1])
    assert (outside == 0) == variables["lxc_container_privileged"]


def test_devices_have_the_hosts_numbers(host: Host, carrier: Host, variables: dict[str, Any]) -> None:
    for device in variables["lxc_container_devices"]:
        inside = host.check_output(NUMBERS, device)
        assert inside.startswith("character special file"), device
        assert inside == carrier.check_output(NUMBERS, device)


def test_devices_with_a_rule_can_be_opened(host: Host, carrier: Host, variables: dict[str, Any]) -> None:
    devices = variables["lxc_container_devices"]
    inside = open_answers(host, devices)
    assert inside == open_answers(carrier, devices)
    assert "EPERM" not in inside.values()


def test_device_without_a_rule_cannot_be_opened(carrier: Host, variables: dict[str, Any]) -> None:
    """A node with numbers that no rule names, opened from within the container's control group."""
    name = container_id(variables)
    node = f"/dev/without-rule-{name}"
    first = carrier.check_output("lxc-info -n %s -pH", name)
    group = carrier.check_output("sed -n s/^0:://p /proc/%s/cgroup", first)
    join = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', f"/sys/fs/cgroup{group}/cgroup.procs"]
    try:
        carrier.check_output("mknod -m 666 %s c 195 200", node)
        outside = open_answers(carrier, [node])
        inside = open_answers(carrier, [node], join)
    finally:
        carrier.run("rm -f %s", node)
    assert outside[node] != "EPERM"
    assert inside[node] == "EPERM"


def test_mounts_are_there(host: Host, variables: dict[str, Any]) -> None:
    for mount in variables["lxc_container_mounts"]:
        options = host.check_output("findmnt --noheadings --output VFS-OPTIONS %s", mount["target"]).split(",")
        assert ("ro" in options) == mount.get("read_only", False), mount["target"]


def test_starts_with_its_host(carrier: Host, variables: dict[str, Any]) -> None:
    if variables["lxc_container_backend"] == "pct":
        config = carrier.check_output("pct config %s", str(variables["lxc_container_vmid"]))
        assert ("onboot: 1" in config) == variables["lxc_container_autostart"]
    else:
        config = carrier.check_output("cat /var/lib/lxc/%s/config", container_id(variables))
        assert ("lxc.start.auto = 1" in config) == variables["lxc_container_autostart"]
        assert carrier.service("lxc.service").is_enabled


@pytest.mark.disruptive
def test_restart_of_the_container_brings_everything_back(host: Host) -> None:
    reboot(host)
