"""Callback plugin: `-l ct200` takes the container's host along."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: limit_with_hosts
type: aggregate
short_description: A limit to containers includes the hosts that carry them
description:
  - A container is made by work on its host, so a run limited to a container needs its host in the play. Before the
    first play this adds the C(lxc_host) of every container in the limit to the limit.
  - Without this plugin site.yml refuses such a run and says which hosts to add.
requirements:
  - enabled in ansible.cfg
"""


class CallbackModule(CallbackBase):
    """Extend the limit once, before any play has chosen its hosts."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "limit_with_hosts"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Add the hosts of the limit's containers."""
        variables = playbook.get_plays()[0].get_variable_manager()
        inventory = variables._inventory
        if not inventory._subset:
            return
        limited = inventory.get_hosts("all")
        names = {host.name for host in limited}
        missing = []
        for host in limited:
            carrier = variables.get_vars(host=host, include_hostvars=False).get("lxc_host")
            if carrier is None or carrier in names:
                continue
            if inventory.get_host(carrier) is None:
                raise AnsibleError(
                    f"lxc_host of {host.name}: {carrier!r} is not a host of the inventory. Add it, or correct the name."
                )
            names.add(carrier)
            missing.append(carrier)
        if missing:
            inventory.subset([*inventory._subset, *missing])
            self._display.display(f"Hosts of the containers in the limit: {', '.join(missing)}", color="cyan")
