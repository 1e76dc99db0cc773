"""What nvidia-smi says, and what follows for a deployment.

The answers of the H200, of no device and of an unknown field were recorded; the others follow public reports.
"""

import dataclasses
import re
import runpy
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail

from tests.unit.loading import ROOT, load

gpu_check = load("roles/gpu_preflight/library/gpu_check.py")
row = runpy.run_path(str(ROOT / "roles/gpu_preflight/action_plugins/gpu_check.py"))["row"]

UUID = "GPU-00000000-0000-0000-0000-000000000000"
H200 = f"0, NVIDIA H200, {UUID}, 00000000:00:06.0, 143771, 9.0, 580.159.04, Disabled\n"
A6000 = "".join(
    f"{n}, NVIDIA RTX A6000, {UUID}, 00000000:0{n + 1}:00.0, 49140, 8.6, 580.126.09, [N/A]\n" for n in (0, 1)
)
GB10 = f"0, NVIDIA GB10, {UUID}, 0000000F:01:00.0, [N/A], 12.1, 580.95.05, [N/A]\n"
PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def gpu(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "index": 0, "name": "NVIDIA RTX A6000", "uuid": UUID, "pci_bus_id": "00000000:01:00.0",
        "memory_mib": 49140, "compute_capability": "8.6", "driver_version": "580.126.09",
    }  # fmt: skip
    return gpu_check.Gpu(**values | changes)


def wanted(**values: Any) -> Any:
    return gpu_check.Wanted(**values)


def test_answer_of_one_gpu() -> None:
    assert [dataclasses.asdict(one) for one in gpu_check.parse(0, H200)] == [
        {
            "index": 0, "name": "NVIDIA H200", "uuid": UUID, "pci_bus_id": "00000000:00:06.0",
            "memory_mib": 143771, "compute_capability": "9.0", "driver_version": "580.159.04", "mig": False,
        }
    ]  # fmt: skip


def test_answer_of_two_gpus() -> None:
    assert [(one.index, one.name) for one in gpu_check.parse(0, A6000)] == [(n, "NVIDIA RTX A6000") for n in (0, 1)]


def test_shared_memory_has_no_size_of_its_own() -> None:
    (one,) = gpu_check.parse(0, GB10)
    assert (one.memory_mib, one.compute_capability) == (None, "12.1")
    assert gpu_check.gpu_problems(wanted(min_memory_mib=100000), [one]) == []


@pytest.mark.parametrize(
    ("code", "output", "said"),
    [
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n",
            "Reboot the host",
        ),
        (
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n",
            "lxc_container_devices",
        ),
        (4, "Failed to initialize NVML: Insufficient Permissions\n", "gpu_devices_nodes"),
        (6, "No devices were found\n", "vfio-pci"),
        (0, "No devices were found\n", "vfio-pci"),
        (15, "Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.  Reboot the system\n", "Xid 79"),
        (2, 'Field "compute_cap" is not a valid field to query.\n\n', "older than 510"),
        (0, "0, NVIDIA H200\n", "not the 8 fields"),
    ],
)
def test_each_fault_has_its_own_message(code: int, output: str, said: str) -> None:
    with pytest.raises(gpu_check.CheckError) as error:
        gpu_check.parse(code, output)
    assert said in str(error.value)


def test_another_model_than_the_deployments_is_refused() -> None:
    """An A6000 was once believed to be a PRO 6000."""
    (said,) = gpu_check.gpu_problems(wanted(model=PRO_6000), [gpu()])
    assert said.startswith(f"gpu_preflight_model: {PRO_6000!r} is wanted, but GPU 0 is 'NVIDIA RTX A6000'.")


def test_each_gpu_of_another_model_is_named() -> None:
    gpus = [gpu(), gpu(index=1, name="NVIDIA GeForce RTX 3090"), gpu(index=2, name="NVIDIA GeForce RTX 3090")]
    said = gpu_check.gpu_problems(wanted(model="NVIDIA RTX A6000"), gpus)
    assert [one.split("but ")[1].split(" is ")[0] for one in said] == ["GPU 1", "GPU 2"]


def test_unknown_model_is_refused_with_those_near_it() -> None:
    (said,) = gpu_check.gpu_problems(wanted(model="NVIDIA RTX A600"), [])
    assert said.startswith(
        "gpu_preflight_model: 'NVIDIA RTX A600' is not a known model; near it are ['NVIDIA RTX A6000'"
    )


def test_unknown_model_is_taken_with_its_capability() -> None:
    new = gpu(name="NVIDIA RTX 9000", compute_capability="13.0")
    assert gpu_check.gpu_problems(wanted(model="NVIDIA RTX 9000", compute_capability="13.0"), [new]) == []


@pytest.mark.parametrize(
    ("model", "capability"),
    [
        ("NVIDIA RTX A6000", "8.6"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA B200", "10.0"),
        (PRO_6000, "12.0"),
        ("NVIDIA GB10", "12.1"),
    ],
)
def test_capability_follows_from_the_model(model: str, capability: str) -> None:
    assert gpu_check.gpu_problems(wanted(model=model), [gpu(name=model, compute_capability=capability)]) == []
    (said,) = gpu_check.gpu_problems(wanted(model=model), [gpu(name=model, compute_capability="7.5")])
    assert said.startswith(f"gpu_preflight_compute_capability: {capability} is wanted, but GPU 0 ({model}) has 7.5.")


def test_all_problems_are_named_together() -> None:
    needs = wanted(model=PRO_6000, count=8, min_memory_mib=97000, min_driver="580.159.04")
    said = gpu_check.gpu_problems(needs, [gpu()])
    variables = ["model", "count", "min_memory_mib", "min_driver"]
    assert [one.split(":")[0] for one in said] == [f"gpu_preflight_{name}" for name in variables]
    assert "8 GPUs are wanted, 1 are here" in said[1]
    assert "97000 is wanted, GPU 0 (NVIDIA RTX A6000) has 49140" in said[2]
    assert "580.159.04 or newer is wanted, 580.126.09 runs here" in said[3]


@pytest.mark.parametrize(
    ("driver", "floor", "refused"),
    [
        ("580.65.06", "580.65.06", False),
        ("580.126.09", "580.65", False),
        ("570.148.08", "580.65", True),
        ("570.148.06", "570.148.08", True),
        ("580.9", "580.65", True),
        ("", "580.65", False),
    ],
)
def test_driver_versions_are_compared_by_number(driver: str, floor: str, refused: bool) -> None:
    assert bool(gpu_check.gpu_problems(wanted(min_driver=floor), [gpu(driver_version=driver)])) == refused


def test_nothing_is_asked_for_and_nothing_is_wrong() -> None:
    assert gpu_check.gpu_problems(wanted(), [gpu()]) == []
    assert gpu_check.machine_problems(wanted(), 0, {}) == []


def test_memory_and_each_disk_are_compared() -> None:
    needs = wanted(min_host_memory_mib=1000, min_disk_mib={"/opt/venvs": 20, "/srv": 10})
    said = gpu_check.machine_problems(needs, 999, {"/opt/venvs": 19, "/srv": 10})
    assert [one.split(". ")[0] for one in said] == [
        "gpu_preflight_min_host_memory_mib: 1000 is wanted, 999 is here",
        "gpu_preflight_min_disk_mib: /opt/venvs needs 20 MiB free and has 19",
    ]
    assert gpu_check.machine_problems(needs, 1000, {"/opt/venvs": 20, "/srv": 10}) == []


@pytest.mark.parametrize(
    ("limit", "expected"), [("", 24106), ("max\n", 24106), ("4294967296\n", 4096), ("99999999999999\n", 24106)]
)
def test_memory_is_the_control_groups_where_that_is_lower(limit: str, expected: int) -> None:
    assert gpu_check.memory_limit_mib("MemTotal:       24684568 kB\nMemFree: 1 kB\n", limit) == expected


def test_model_that_is_wanted_where_no_gpu_is() -> None:
    (problem,) = gpu_check.gpu_problems(wanted(model=PRO_6000), [])
    assert "is wanted, and no GPU is here" in problem


def test_gpu_that_is_cut_into_instances_is_refused() -> None:
    (one,) = gpu_check.parse(0, H200.replace("Disabled", "Enabled"))
    (problem,) = gpu_check.gpu_problems(wanted(model="NVIDIA H200", count=1), [one])
    assert problem.endswith("End it on the host: nvidia-smi -i 0 -mig 0.")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("NVIDIA GeForce RTX 5090", "geforce"),
        ("NVIDIA RTX A6000", "workstation"),
        (PRO_6000, "workstation"),
        ("NVIDIA GB10", "workstation"),
        ("NVIDIA B200", "data_center"),
        ("NVIDIA A100-SXM4-80GB", "data_center"),
        ("NVIDIA L40S", "data_center"),
    ],
)
def test_class_of_a_gpu(model: str, expected: str) -> None:
    assert gpu_check.gpu_class(model) == expected


@pytest.mark.parametrize(("driver", "refused"), [("570.148.08", True), ("580.65.06", False), ("580.9", True)])
def test_cuda_13_on_an_older_driver_is_refused(driver: str, refused: bool) -> None:
    gpus = [gpu(driver_version=driver), gpu(index=1, driver_version=driver)]
    found = gpu_check.gpu_problems(wanted(cuda=gpu_check.Cuda(**row("cu130"))), gpus)
    said = (
        f"gpu_preflight_cuda_variant: 'cu130' needs driver 580.65 or newer for NVIDIA RTX A6000, and it is {driver}. "
        "Raise nvidia_driver_version on the host and its containers, or choose a variant of an older CUDA "
        "(`python -m images list`)."
    )
    assert found == ([said] if refused else [])


def test_each_class_has_its_own_floor() -> None:
    cuda = gpu_check.Cuda("cu130", {"data_center": "535.1", "geforce": "580.65"}, ["9.0"])
    assert gpu_check.cuda_problems(cuda, "NVIDIA H200", "9.0", "535.2") == []
    (said,) = gpu_check.cuda_problems(cuda, "NVIDIA RTX A6000", "9.0", "535.2")
    assert "needs driver 580.65 or newer" in said, "a class without a floor has the highest"


@pytest.mark.parametrize(
    ("capability", "refused"),
    [("8.6", False), ("8.9", False), ("12.1", False), ("7.5", True), ("11.0", True), ("", False)],
)
def test_code_of_a_variant_runs_on_later_gpus_of_the_same_major(capability: str, refused: bool) -> None:
    cuda = gpu_check.Cuda("x", {"data_center": "1"}, ["8.0", "8.6", "12.0"])
    found = gpu_check.cuda_problems(cuda, "NVIDIA X", capability, "2")
    assert [bool(re.search(f"8.0, 8.6, 12.0, and NVIDIA X has {capability}", one)) for one in found] == [True] * refused


def test_an_unknown_variant_is_refused_on_the_controller() -> None:
    with pytest.raises(
        AnsibleActionFail, match=r"gpu_preflight_cuda_variant: There is no variant 'cu131'\. Use one of"
    ):
        row("cu131")
