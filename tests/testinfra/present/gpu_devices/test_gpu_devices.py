"""A host's device nodes are what the inventory says, with the numbers the kernel uses."""

from typing import Any

from testinfra.host import Host

from tests.testinfra.fleet import journal
from tests.unit.loading import load

GROUP = "lxc_hosts"
tool = load("roles/gpu_devices/files/gpu_devices.py")


def test_boot_unit_made_the_nodes(host: Host) -> None:
    unit = host.service("gpu-devices.service")
    assert unit.is_enabled
    assert unit.is_running, journal(host, "gpu-devices.service")


def test_nodes_are_character_devices_with_the_kernels_numbers(host: Host, variables: dict[str, Any]) -> None:
    drivers = tool.majors(host.file("/proc/devices").content_string)
    for node in variables["gpu_devices_nodes"]:
        kind, major, minor, mode = host.check_output("stat -c '%%F|%%t|%%T|%%a' %s", node["path"]).split("|")
        if "sysfs" in node:
            wanted = tuple(map(int, host.check_output(f"cat {node['sysfs']}").split(":")))
        else:
            wanted = (node.get("major") or drivers[node["driver"]], node["minor"])
        assert kind == "character special file", node["path"]
        assert (int(major, 16), int(minor, 16)) == wanted, node["path"]
        assert int(mode, 8) == int(node.get("mode", "0666"), 8), node["path"]
