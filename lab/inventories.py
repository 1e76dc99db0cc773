"""Inventories that vary the lab's: more hosts, and containers that do not exist yet."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lab.settings import Settings
from lab.up import CONTAINER, HOST, INVENTORY


@dataclass(frozen=True)
class Carrier:
    """A host of the inventory that is really kpro6.

    Attributes:
        name: its name in the inventory.
        last: last number of the address at which it is reached.
    """

    name: str = HOST[0]
    last: int = HOST[1]


@dataclass(frozen=True)
class Container:
    """A container like ct200.

    Attributes:
        name: its name in the inventory.
        last: last number of its address.
        vmid: its number on its host.
        host: name of its carrier.
        variables: what differs from ct200.
    """

    name: str
    last: int
    vmid: int
    host: str = HOST[0]
    variables: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, settings: Settings, carriers: list[Carrier], containers: list[Container]) -> Path:
    """Write an inventory that knows nothing of ct200 and return its folder.

    Args:
        folder: does not exist yet.
        settings: the lab.
        carriers: hosts, all of them kpro6 under the key that it was made with.
        containers: containers on these hosts.
    """
    own, host = ({**_variables(name)} for name in (CONTAINER[0], HOST[0]))
    alias = f"-o UserKnownHostsFile={{{{ lab_state }}}}/ssh/known_hosts -o HostKeyAlias={settings.address(HOST[1])}"
    inventory = {
        "lxc_hosts": {
            "hosts": {
                one.name: {**host, "ansible_host": settings.address(one.last), "ansible_ssh_common_args": alias}
                for one in carriers
            }
        },
        "gpu_hosts": {"children": {"lxc_hosts": None}},
        "gpu_containers": {
            "hosts": {
                one.name: {
                    **own, "ansible_host": settings.address(one.last), "lxc_host": one.host, "lxc_vmid": one.vmid,
                    **one.variables,
                }
                for one in containers
            }
        },
        "sglang_servers": {"hosts": {one.name: None for one in containers}},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    (folder / "group_vars").symlink_to(INVENTORY / "group_vars")
    return folder


def _variables(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((INVENTORY / "host_vars" / f"{name}.yml").read_text()))
