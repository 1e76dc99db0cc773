"""Nothing of the role is left on the host."""

from typing import Any

from testinfra.host import Host

GROUP = "lxc_hosts"


def test_nodes_unit_and_program_are_gone(host: Host, variables: dict[str, Any]) -> None:
    paths = [node["path"] for node in variables["gpu_devices_nodes"]]
    for path in [*paths, "/usr/local/sbin/gpu-devices", "/etc/gpu-devices", "/etc/systemd/system/gpu-devices.service"]:
        assert not host.file(path).exists, path
    assert host.run("systemctl cat gpu-devices.service").rc == 1
    assert host.run("systemctl is-system-running").stdout.strip() == "running"
