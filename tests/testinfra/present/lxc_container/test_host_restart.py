"""A restart of the host brings its containers, and what they serve, back by itself."""

from typing import Any

import pytest
from testinfra.host import Host

from tests.testinfra.fleet import Fleet
from tests.testinfra.restart import boot, reboot, wait_until_running
from tests.testinfra.serving import servers_of

GROUP = "lxc_hosts"


@pytest.mark.disruptive
def test_restart_of_the_host_brings_everything_back(host: Host, variables: dict[str, Any], fleet: Fleet) -> None:
    carried = [
        name
        for name in fleet.names("gpu_containers")
        if fleet.variables(name)["lxc_host"] == variables["inventory_hostname"]
        and fleet.variables(name)["lxc_container_autostart"]
    ]
    since = {name: boot(fleet.host(name)) for name in carried}
    reboot(host)
    for name in carried:
        wait_until_running(fleet.host(name), since[name])
        if name in fleet.names("sglang_servers"):
            for server in servers_of(fleet.variables(name)):
                server.ask("/health")
