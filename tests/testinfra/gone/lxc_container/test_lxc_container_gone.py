"""Nothing of the container is left on its host, and the controller has forgotten its keys."""

from pathlib import Path
from typing import Any

from testinfra.host import Host

GROUP = "gpu_containers"


def test_container_and_its_device_list_are_gone(carrier: Host, variables: dict[str, Any]) -> None:
    name, vmid = variables["lxc_container_name"], variables["lxc_container_vmid"]
    for path in (
        f"/var/lib/lxc/{name}",
        f"/var/lib/lxc/{vmid}",
        f"/etc/pve/lxc/{vmid}.conf",
        f"/etc/gpu-devices/guests/{name}.json",
    ):
        assert not carrier.file(path).exists, path
    assert name not in carrier.check_output("lxc-ls -1").splitlines()


def test_controller_knows_no_key_of_it(variables: dict[str, Any]) -> None:
    known = Path(variables["lxc_container_known_hosts"]).expanduser().read_text()
    assert variables["ansible_host"] not in [line.split()[0] for line in known.splitlines()]
