"""The inventory as tests see it: hosts by group and limit, each with the variables its plays see."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import testinfra
from ansible import constants
from ansible.cli import CLI
from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[2]
CONTROL_PATH = Path("~/.ansible/cp/testinfra-%C").expanduser()
"""One connection to each machine for all checks."""


@dataclass(frozen=True)
class Unresolved:
    """Why a variable has no value outside a run."""

    reason: str


class Fleet:
    """One inventory, limited as the run is."""

    def __init__(self, sources: list[str] | None = None, limit: str | None = None) -> None:
        """Read an inventory.

        Args:
            sources: inventory paths; ansible.cfg's where None.
            limit: pattern as after `ansible-playbook -l`.
        """
        init_plugin_loader()
        loader = DataLoader()
        loader.set_basedir(str(ROOT))
        identities = constants.DEFAULT_VAULT_IDENTITY_LIST
        loader.set_vault_secrets(CLI.setup_vault_secrets(loader, identities, auto_prompt=False))
        self._loader = loader
        self._inventory = InventoryManager(loader, sources=sources or constants.DEFAULT_HOST_LIST)
        self._defaults: dict[str, Any] = {}
        for file in sorted(ROOT.glob("roles/*/defaults/main.yml")):
            self._defaults |= loader.load_from_file(str(file), trusted_as_template=True) or {}
        self._resolved: dict[str, dict[str, Any]] = {}
        self._manager = VariableManager(loader, self._inventory)
        self._manager._hostvars = HostVars(self._inventory, self._manager, loader)
        if limit:
            self._inventory.subset(limit)

    def names(self, pattern: str) -> list[str]:
        """Return the hosts of a group or pattern that are within the limit."""
        return [host.name for host in self._inventory.get_hosts(pattern)]

    def variables(self, name: str) -> dict[str, Any]:
        """Return a host's variables as a play sees them: role defaults below the inventory, templates resolved.

        A variable that only a run can resolve (one made from facts) is an Unresolved.
        """
        if name in self._resolved:
            return self._resolved[name]
        host = self._inventory.get_host(name)
        if host is None:
            raise KeyError(f"{name} is not a host of the inventory")
        raw = self._defaults | self._manager.get_vars(host=host)
        templar = Templar(self._loader, variables=raw)
        resolved = {}
        for key in raw:
            try:
                resolved[key] = templar.template(raw[key])
            except AnsibleError as error:
                resolved[key] = Unresolved(str(error))
        self._resolved[name] = resolved
        return resolved

    def host(self, name: str) -> Host:
        """Return a connection to a host by the ways its inventory variables name."""
        found = self.variables(name)
        if found.get("ansible_connection") == "local":
            return testinfra.get_host("local://")
        user, address = found.get("ansible_user", "root"), found.get("ansible_host", name)
        port = found.get("ansible_port", 22)
        CONTROL_PATH.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        arguments = [str(found.get("ansible_ssh_common_args", "")), "-o ServerAliveInterval=5"]
        return testinfra.get_host(
            f"ssh://{user}@{f'[{address}]' if ':' in address else address}:{port}",
            ssh_identity_file=found.get("ansible_ssh_private_key_file"),
            ssh_extra_args=" ".join(filter(None, arguments)),
            controlpath=str(CONTROL_PATH).replace("%", "%%"),
            sudo=bool(found.get("ansible_become", False)),
        )


def journal(host: Host, unit: str) -> str:
    """Return the end of a unit's journal, for the message of a failed check."""
    with host.sudo():
        return str(host.run("journalctl --no-pager -n 40 -u %s", unit).stdout)
