"""What the role promised its deployment is what nvidia-smi says; declared GPUs are only compared with themselves."""

import csv
from typing import Any

import pytest
from testinfra.host import Host

GROUP = "gpu_hosts:gpu_containers"


def test_gpus_are_the_inventorys(host: Host, variables: dict[str, Any]) -> None:
    simulated = variables["gpu_preflight_simulated"]
    if simulated:
        names = [gpu["name"] for gpu in simulated]
        assert not host.run("nvidia-smi -L").stdout.startswith("GPU 0"), "gpu_preflight_simulated: there are real GPUs"
    elif variables["gpu_preflight_model"] or variables["gpu_preflight_count"]:
        rows = csv.reader(host.check_output("nvidia-smi --query-gpu=name --format=csv,noheader").splitlines())
        names = [row[0] for row in rows]
    else:
        pytest.skip("the inventory names no GPUs")
    assert set(names) <= {variables["gpu_preflight_model"] or names[0]}
    assert len(names) == (variables["gpu_preflight_count"] or len(names))
