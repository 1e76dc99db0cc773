#!/usr/bin/python3
"""Ansible module: are this machine's GPUs, memory and disk what a deployment needs?"""

from __future__ import annotations

import csv
import difflib
import io
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: gpu_check
short_description: Compare a machine's GPUs, memory and disk with what a deployment needs
description:
  - Reads the GPUs from nvidia-smi, or takes those declared in O(simulated), and reports all differences together.
    Nothing is ever changed.
options:
  model: {type: str, default: "", description: Product name of every GPU as nvidia-smi prints it.}
  count: {type: int, default: 0, description: Number of GPUs.}
  compute_capability: {type: str, default: "", description: Compute capability of every GPU, else the model's own.}
  min_memory_mib: {type: int, default: 0, description: Least memory of each GPU in MiB.}
  min_driver: {type: str, default: "", description: Oldest driver that can run the deployment's CUDA.}
  cuda_variant: {type: str, default: "", description: Row of images/matrix.yml. The controller makes O(cuda) of it.}
  cuda:
    type: dict
    description: A row of images/matrix.yml.
    options:
      variant: {type: str, required: true, description: Its name.}
      driver_floor: {type: dict, required: true, description: Oldest driver by class of GPU.}
      architectures: {type: list, elements: str, required: true, description: Compute capabilities of its packages.}
  min_host_memory_mib: {type: int, default: 0, description: Least memory of the machine in MiB.}
  min_disk_mib: {type: dict, default: {}, description: Least free space in MiB by folder.}
  simulated:
    type: list
    elements: dict
    default: []
    description: GPUs that the inventory declares in the place of nvidia-smi's.
    options:
      name: {type: str, required: true, description: Product name.}
      memory_mib: {type: int, required: true, description: Memory in MiB.}
      compute_capability: {type: str, required: true, description: Such as 12.0.}
      driver_version: {type: str, default: "", description: Driver that it claims to run with.}
author: [maintainers]
"""

EXAMPLES = r"""
- name: Two A6000
  gpu_check:
    model: NVIDIA RTX A6000
    count: 2
    cuda_variant: cu130
"""

RETURN = r"""
ansible_facts:
  type: dict
  returned: always
  description: The GPUs as the fact C(gpus), a list with index, name, uuid, pci_bus_id, memory_mib, compute_capability,
    driver_version and mig of each, and C(gpus_simulated).
"""

QUERY = ("index", "name", "uuid", "pci.bus_id", "memory.total", "compute_cap", "driver_version", "mig.mode.current")

CAPABILITIES = {
    "NVIDIA GeForce RTX 3090": "8.6",
    "NVIDIA RTX A6000": "8.6",
    "NVIDIA GeForce RTX 4090": "8.9",
    "NVIDIA L40S": "8.9",
    "NVIDIA RTX 6000 Ada Generation": "8.9",
    "NVIDIA A100-SXM4-80GB": "8.0",
    "NVIDIA A100 80GB PCIe": "8.0",
    "NVIDIA H100 80GB HBM3": "9.0",
    "NVIDIA H100 PCIe": "9.0",
    "NVIDIA H100 NVL": "9.0",
    "NVIDIA H200": "9.0",
    "NVIDIA H200 NVL": "9.0",
    "NVIDIA B200": "10.0",
    "NVIDIA B300": "10.3",
    "NVIDIA GeForce RTX 5090": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "12.0",
    "NVIDIA GB10": "12.1",
}
"""Compute capability by product name (NVIDIA's list of CUDA GPUs, developer.nvidia.com/cuda-gpus)."""

REMEDIES = (
    (
        "Driver/library version mismatch",
        "the loaded kernel module and the libraries have different versions. Reboot the host, or bring "
        "nvidia_driver_version to the version in /proc/driver/nvidia/version",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "the kernel module is not loaded, or the container has no device nodes. Load nvidia on the host; in a "
        "container look at lxc_container_devices",
    ),
    (
        "Insufficient Permissions",
        "the device nodes cannot be opened. Their mode must let others read and write (gpu_devices_nodes, mode 0666)",
    ),
    (
        "No devices were found",
        "there is a driver but no GPU. Look whether vfio-pci owns the cards: lspci -nnk -d 10de:",
    ),
    (
        "is not a valid field to query",
        "the driver is older than 510, which says too little about its GPUs. Raise nvidia_driver_version",
    ),
    ("GPU is lost", "a GPU has fallen off the bus. Power-cycle the host and look at its kernel log for Xid 79"),
)


class CheckError(Exception):
    """The GPUs cannot be read; the text says why and what to do."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        memory_mib: its own memory in MiB; None where it shares the machine's (GB10).
        mig: whether it is cut into instances.
    """

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    memory_mib: int | None
    compute_capability: str
    driver_version: str
    mig: bool = False


@dataclass(frozen=True)
class Cuda:
    """A row of images/matrix.yml.

    Attributes:
        variant: its name, such as cu130.
        driver_floor: oldest driver by class of GPU.
        architectures: compute capabilities that its packages have code for.
    """

    variant: str
    driver_floor: dict[str, str]
    architectures: list[str]


@dataclass(frozen=True)
class Wanted:
    """What a deployment needs; the fields are described in DOCUMENTATION."""

    model: str = ""
    count: int = 0
    compute_capability: str = ""
    min_memory_mib: int = 0
    min_driver: str = ""
    min_host_memory_mib: int = 0
    min_disk_mib: dict[str, int] | None = None
    cuda: Cuda | None = None


def parse(code: int, output: str) -> list[Gpu]:
    """Return the GPUs in the answer of nvidia-smi to QUERY.

    Args:
        code: its exit status.
        output: what it printed, on both streams.

    Raises:
        CheckError: it reports a fault.
    """
    for sign, remedy in REMEDIES:
        if sign in output:
            raise CheckError(f"nvidia-smi: {sign}: {remedy}.")
    if code:
        raise CheckError(f"nvidia-smi ended with {code}: {output.strip()[-300:]}")
    gpus = []
    for row in csv.reader(io.StringIO(output), skipinitialspace=True):
        if len(row) != len(QUERY):
            raise CheckError(f"nvidia-smi answered {row}, not the {len(QUERY)} fields that were asked for.")
        index, name, uuid, bus, memory, capability, driver, mig = (cell.strip() for cell in row)
        number = int(memory) if memory.isdecimal() else None
        gpus.append(Gpu(int(index), name, uuid, bus, number, capability, driver, mig == "Enabled"))
    return gpus


def version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparing."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def gpu_class(model: str) -> str:
    """Return the class of a GPU, as driver_floor names them, by its product name.

    RTX cards for workstations and servers, and GB10, count as workstation: NVIDIA gives forward compatibility, which
    lets an older driver run a newer CUDA, to its data-centre products only.
    """
    if "GeForce" in model:
        return "geforce"
    return "workstation" if re.search(r"\b(RTX|Quadro|GB10)\b", model) else "data_center"


def cuda_problems(cuda: Cuda, model: str, capability: str, driver: str) -> list[str]:
    """Return in what a GPU cannot run a CUDA variant.

    Args:
        cuda: the variant.
        model: product name of the GPU.
        capability: its compute capability; not compared where empty.
        driver: version of its driver; not compared where empty.
    """
    place, problems = f"gpu_preflight_cuda_variant: {cuda.variant!r}", []
    floor = cuda.driver_floor.get(gpu_class(model)) or max(cuda.driver_floor.values(), key=version_key)
    if driver and version_key(driver) < version_key(floor):
        problems.append(
            f"{place} needs driver {floor} or newer for {model}, and it is {driver}. Raise nvidia_driver_version on "
            "the host and its containers, or choose a variant of an older CUDA (`python -m images list`)."
        )
    if capability:
        major, minor = version_key(capability)
        built = [version_key(one) for one in cuda.architectures]
        if not any(its_major == major and least <= minor for its_major, least in built):
            problems.append(
                f"{place} has code for compute capability {', '.join(cuda.architectures)}, and {model} has "
                f"{capability}. Choose another variant (`python -m images list`)."
            )
    return problems


def model_problems(wanted: Wanted, gpus: list[Gpu]) -> list[str]:
    """Return what is wrong with model and capability."""
    problems = []
    if wanted.model and wanted.model not in CAPABILITIES and not wanted.compute_capability:
        close = difflib.get_close_matches(wanted.model, CAPABILITIES, 3, 0.5)
        problems.append(
            f"gpu_preflight_model: {wanted.model!r} is not a known model"
            + (f"; near it are {close}" if close else "")
            + ". Correct it, or give gpu_preflight_compute_capability too."
        )
    capability = wanted.compute_capability or CAPABILITIES.get(wanted.model, "")
    for gpu in gpus:
        if wanted.model and gpu.name != wanted.model:
            problems.append(
                f"gpu_preflight_model: {wanted.model!r} is wanted, but GPU {gpu.index} is {gpu.name!r}. Deploy on the "
                "machine that has the model, or correct the variable."
            )
        elif capability and gpu.compute_capability != capability:
            problems.append(
                f"gpu_preflight_compute_capability: {capability} is wanted, but GPU {gpu.index} ({gpu.name}) has "
                f"{gpu.compute_capability}. Correct the variable, or choose another deployment."
            )
    return problems


def gpu_problems(wanted: Wanted, gpus: list[Gpu]) -> list[str]:
    """Return what is wrong with the GPUs."""
    problems = model_problems(wanted, gpus)
    if wanted.model and not (gpus or problems):
        problems.append(
            f"gpu_preflight_model: {wanted.model!r} is wanted, and no GPU is here. Look at lxc_container_devices and "
            "at what vfio-pci owns on the host, or empty the variable."
        )
    problems += [
        f"gpu_preflight_count: GPU {gpu.index} ({gpu.name}) is in MIG mode, and whole GPUs are wanted. End it on the "
        f"host: nvidia-smi -i {gpu.index} -mig 0."
        for gpu in gpus
        if gpu.mig
    ]
    if wanted.count and len(gpus) != wanted.count:
        problems.append(
            f"gpu_preflight_count: {wanted.count} GPUs are wanted, {len(gpus)} are here. Look at lxc_container_devices "
            "and at what vfio-pci owns on the host, or correct the variable."
        )
    for gpu in gpus:
        if gpu.memory_mib is not None and gpu.memory_mib < wanted.min_memory_mib:
            problems.append(
                f"gpu_preflight_min_memory_mib: {wanted.min_memory_mib} is wanted, GPU {gpu.index} ({gpu.name}) has "
                f"{gpu.memory_mib}. Choose a smaller model or another machine."
            )
    drivers = {gpu.driver_version for gpu in gpus if gpu.driver_version}
    for driver in sorted(drivers):
        if wanted.min_driver and version_key(driver) < version_key(wanted.min_driver):
            problems.append(
                f"gpu_preflight_min_driver: {wanted.min_driver} or newer is wanted, {driver} runs here. Raise "
                "nvidia_driver_version on the host and its containers, or choose an older CUDA."
            )
    if wanted.cuda:
        found = [cuda_problems(wanted.cuda, gpu.name, gpu.compute_capability, gpu.driver_version) for gpu in gpus]
        problems += dict.fromkeys(text for texts in found for text in texts)
    return problems


def machine_problems(wanted: Wanted, memory_mib: int, free_mib: dict[str, int]) -> list[str]:
    """Return what is wrong with memory and disk.

    Args:
        wanted: the needs.
        memory_mib: memory of the machine in MiB.
        free_mib: free space in MiB by folder.
    """
    problems = []
    if memory_mib < wanted.min_host_memory_mib:
        problems.append(
            f"gpu_preflight_min_host_memory_mib: {wanted.min_host_memory_mib} is wanted, {memory_mib} is here. "
            "Raise lxc_container_memory_mib, or correct the variable."
        )
    for folder, needed in sorted((wanted.min_disk_mib or {}).items()):
        if free_mib[folder] < needed:
            problems.append(
                f"gpu_preflight_min_disk_mib: {folder} needs {needed} MiB free and has {free_mib[folder]}. "
                "Make room there, or name another folder."
            )
    return problems


def memory_limit_mib(meminfo: str, cgroup_max: str) -> int:
    """Return the memory of the machine in MiB: /proc/meminfo's, or the control group's limit where that is lower."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.M)
    total = int(found[1]) // 1024 if found else 0
    return min(total, int(cgroup_max) // 2**20) if cgroup_max.strip().isdecimal() else total


def free_disk_mib(folder: str) -> int:
    """Return the free space in MiB where a folder is or will be."""
    path = Path(folder)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free // 2**20


def main() -> None:
    """Run the module."""
    gpu = {
        "name": {"type": "str", "required": True},
        "memory_mib": {"type": "int", "required": True},
        "compute_capability": {"type": "str", "required": True},
        "driver_version": {"type": "str", "default": ""},
    }
    module = AnsibleModule(
        argument_spec={
            "model": {"type": "str", "default": ""},
            "count": {"type": "int", "default": 0},
            "compute_capability": {"type": "str", "default": ""},
            "min_memory_mib": {"type": "int", "default": 0},
            "min_driver": {"type": "str", "default": ""},
            "cuda": {
                "type": "dict",
                "options": {
                    "variant": {"type": "str", "required": True},
                    "driver_floor": {"type": "dict", "required": True},
                    "architectures": {"type": "list", "elements": "str", "required": True},
                },
            },
            "min_host_memory_mib": {"type": "int", "default": 0},
            "min_disk_mib": {"type": "dict", "default": {}},
            "simulated": {"type": "list", "elements": "dict", "default": [], "options": gpu},
        },
        supports_check_mode=True,
    )
    values = dict(module.params)
    simulated: list[dict[str, Any]] = values.pop("simulated")
    values["min_disk_mib"] = {key: int(size) for key, size in values["min_disk_mib"].items()}
    values["cuda"] = Cuda(**values["cuda"]) if values["cuda"] else None
    wanted = Wanted(**values)
    needs_gpu = bool(wanted.model or wanted.count or wanted.compute_capability or wanted.min_memory_mib or wanted.cuda)
    gpus: list[Gpu] = []
    program = module.get_bin_path("nvidia-smi")
    pending = False
    try:
        if simulated:
            gpus = [Gpu(index, pci_bus_id="", uuid="", **one) for index, one in enumerate(simulated)]
        elif program:
            fields = ",".join(QUERY)
            code, out, err = module.run_command([program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
            if needs_gpu or code == 0:
                gpus = parse(code, out + err)
        elif needs_gpu:
            pending = module.check_mode
            if not pending:
                raise CheckError("nvidia-smi is not on this machine. Apply the role nvidia_driver first.")
    except CheckError as error:
        module.fail_json(msg=str(error))
    problems = [] if pending else gpu_problems(wanted, gpus)
    limit = Path("/sys/fs/cgroup/memory.max")
    memory = memory_limit_mib(Path("/proc/meminfo").read_text(), limit.read_text() if limit.exists() else "")
    problems += machine_problems(
        wanted, memory, {folder: free_disk_mib(folder) for folder in wanted.min_disk_mib or {}}
    )
    if problems:
        module.fail_json(
            msg=f"{os.uname().nodename} is not what the deployment needs:\n" + "\n".join(f"- {p}" for p in problems)
        )
    facts = {"gpus": [asdict(one) for one in gpus], "gpus_simulated": bool(simulated)}
    module.exit_json(changed=False, ansible_facts=facts)


if __name__ == "__main__":
    main()
