"""The inventories are right, and a wrong one is refused on the controller with host, variable, value and remedy."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible import constants
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import VaultSecret, VaultSecretsContext
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager

from tests.unit.loading import ROOT, load

init_plugin_loader()
VaultSecretsContext.initialize(VaultSecretsContext([("default", VaultSecret(b"example"))]))
plugin = load("plugins/action/check_inventory.py")

VAULT_PASSWORD = "example"  # noqa: S105
"""Documented in the example's vault.yml; protects nothing."""
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA operator"
INVENTORIES = [name for name in ("example", "lab") if (ROOT / "inventories" / name).is_dir()]
PLAYS = """
- hosts: lxc_hosts
  roles: [gpu_devices]
  tasks:
    - ansible.builtin.import_role: {name: lxc_container, tasks_from: host}
- hosts: gpu_containers
  roles: [lxc_container]
"""
SITE = ROOT / "site.yml"


@pytest.fixture(autouse=True)
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the operator a home with an SSH key and the vault's password, and the lab its state."""
    home, lab = tmp_path / "home", tmp_path / "lab/77"
    for folder in (home / ".ssh", lab / "ssh"):
        folder.mkdir(parents=True)
        (folder / "id_ed25519.pub").write_text(f"{PUBLIC_KEY}\n")
    (home / "vault-password").write_text(VAULT_PASSWORD)
    for name, value in {"HOME": home, "LAB_STATE": tmp_path / "lab", "LAB_SUBNET": "77"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(home / "vault-password"))
    monkeypatch.setenv("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
    monkeypatch.setattr(constants, "DEFAULT_ROLES_PATH", [str(ROOT / "roles")])
    return home


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that says what is wrong with an inventory after changes to variables of hosts."""

    def checked(
        changes: dict[str, dict[str, Any]] | None = None,
        inventory: str = "example",
        running: list[str] | None = None,
        plays: str | None = None,
        groups: dict[str, Any] | None = None,
    ) -> list[str]:
        extra = Path(tempfile.mkdtemp(dir=tmp_path))
        (extra / "host_vars").mkdir()
        (extra / "hosts.yml").write_text(yaml.safe_dump(groups or {"all": {"hosts": dict.fromkeys(changes or {})}}))
        for host, variables in (changes or {}).items():
            (extra / "host_vars" / f"{host}.yml").write_text(yaml.safe_dump(variables, sort_keys=False))
        playbook = SITE
        if plays or not SITE.exists():
            playbook = extra / "plays.yml"
            playbook.write_text(plays or PLAYS)
        loader = DataLoader()
        sources = [str(ROOT / "inventories" / inventory), *([str(extra)] if changes or groups else [])]
        manager = InventoryManager(loader, sources=sources)
        variables = VariableManager(loader, manager)
        hostvars = HostVars(manager, variables, loader)
        seen = variables.get_vars() | {
            "hostvars": hostvars,
            "groups": manager.get_groups_dict(),
            "ansible_play_hosts_all": running or list(manager.hosts),
        }
        action = plugin.ActionModule(
            task=SimpleNamespace(args={"playbook": str(playbook)}),
            connection=None,
            play_context=None,
            loader=loader,
            templar=Templar(loader, variables=seen),
            shared_loader_obj=None,
        )
        return list(plugin.report(action._problems(seen), seen["ansible_play_hosts_all"]))

    return checked


def ansible(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of Ansible's programs in the repository."""
    return subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_has_the_whole_fleet() -> None:
    done = ansible("ansible-inventory", "-i", "inventories/example", "--list")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    hosts = listed["_meta"]["hostvars"]
    assert sorted(hosts) == ["b200", "ct129", "ct200", "kpro5", "kpro6", "pro4", "spark1", "spark2"]
    assert {name: hosts[name]["lxc_host"] for name in listed["gpu_containers"]["hosts"]} == {
        "ct129": "kpro5",
        "ct200": "kpro6",
    }
    counts = {name: (values["gpu_preflight_model"], values["gpu_preflight_count"]) for name, values in hosts.items()}
    assert counts == {
        "kpro5": ("NVIDIA RTX A6000", 2),
        "ct129": ("NVIDIA RTX A6000", 2),
        "kpro6": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 8),
        "ct200": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 8),
        "pro4": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4),
        "b200": ("NVIDIA B200", 7),
        "spark1": ("NVIDIA GB10", 1),
        "spark2": ("NVIDIA GB10", 1),
    }


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_inventory_lists_and_the_site_reads(inventory: str) -> None:
    assert ansible("ansible-inventory", "-i", f"inventories/{inventory}", "--list").returncode == 0
    if SITE.exists():
        done = ansible("ansible-playbook", "-i", f"inventories/{inventory}", "--syntax-check", "site.yml")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_inventory_has_no_problem(check: Callable[..., list[str]], inventory: str) -> None:
    assert check(inventory=inventory) == []


FAULTS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "host unknown": (
        {"ct200": {"lxc_host": "kpro7"}},
        "ct200: lxc_host: 'kpro7' is not a host of the inventory. Write kpro6.",
    ),
    "host carries no containers": (
        {"ct200": {"lxc_host": "pro4"}},
        "ct200: lxc_host: 'pro4' is not in the group lxc_hosts. Add it there.",
    ),
    "container outside its group": (
        {"pro4": {"lxc_host": "kpro6"}},
        "pro4: lxc_host: is 'kpro6', but pro4 is not in gpu_containers. Add it there.",
    ),
    "back end that the host is not prepared for": (
        {"ct129": {"lxc_container_backend": "lxc"}},
        "ct129: lxc_container_backend: is lxc, but pct on its host kpro5. Set the same on both.",
    ),
    "vmid twice in a cluster": (
        {"ct129": {"lxc_vmid": 200}},
        "ct129, ct200: lxc_vmid: 200 is given to more than one container of kpro. Give each its own number.",
    ),
    "vmid too low": (
        {"ct129": {"lxc_vmid": 7}},
        "ct129: lxc_container_vmid: 7 is below 100, which Proxmox VE reserves. Choose a free one.",
    ),
    "address twice": (
        {"ct129": {"lxc_container_address": "192.0.2.200/24", "ansible_host": "ct129.example"}},
        "ct129, ct200: lxc_container_address: 192.0.2.200 is given to more than one container. "
        "Give each its own address.",
    ),
    "address of a host": (
        {"ct129": {"ansible_host": "192.0.2.6"}},
        "ct129, kpro6: ansible_host: 192.0.2.6 is where Ansible reaches more than one host. Correct all but one.",
    ),
    "address that is none": (
        {"ct129": {"lxc_container_address": "192.0.2.300/24"}},
        "ct129: lxc_container_address: '192.0.2.300/24' does not appear to be an IPv4 or IPv6 interface. "
        "Write an address with prefix length, such as 192.0.2.200/24.",
    ),
    "address without prefix": (
        {"ct129": {"lxc_container_address": "192.0.2.129"}},
        "ct129: lxc_container_address: '192.0.2.129' has no prefix length. Write it as 192.0.2.129/24.",
    ),
    "another address to reach it": (
        {"ct129": {"lxc_container_address": "192.0.2.130/24"}},
        "ct129: ansible_host: 192.0.2.129 is not 192.0.2.130 of lxc_container_address, so Ansible would reach another "
        "machine. Make the two equal.",
    ),
    "gateway elsewhere": (
        {"ct129": {"lxc_container_gateway": "198.51.100.1"}},
        "ct129: lxc_container_gateway: 198.51.100.1 is not in 192.0.2.0/24 of lxc_container_address. "
        "Correct one of the two.",
    ),
    "shared memory as large as memory": (
        {"ct200": {"shm_size_mib": 1048576}},
        "ct200: shm_size_mib: 1048576 is not below lxc_container_memory_mib, 1048576. What lies in /dev/shm counts as "
        "memory: lower the one or raise the other.",
    ),
    "driver of another version than the host's": (
        {"ct129": {"nvidia_driver_version": "580.159.03-1"}},
        "ct129, kpro5: nvidia_driver_version: is 580.159.03-1 in ct129 and 580.126.09-1 on its host. A container needs "
        "the version of its host's kernel module: set it on the host only, and in gpu_containers to "
        "{{ hostvars[lxc_host].nvidia_driver_version }}.",
    ),
    "driver with the kernel's part in a container": (
        {"ct129": {"nvidia_driver_scope": "host"}},
        "ct129: nvidia_driver_scope: is 'host', which brings the kernel's part. Set it to container.",
    ),
    "model that the host has not": (
        {"ct129": {"gpu_preflight_model": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}},
        "ct129: gpu_preflight_model: is 'NVIDIA RTX PRO 6000 Blackwell Server Edition', but 'NVIDIA RTX A6000' on its "
        "host kpro5. Correct one of the two, or lxc_host.",
    ),
    "more GPUs than devices": (
        {"ct129": {"gpu_preflight_count": 3}},
        "ct129: gpu_preflight_count: is 3, but lxc_container_devices has 2 GPUs. Correct one of the two.",
    ),
    "device that the host has not": (
        {"ct129": {"lxc_container_devices": ["/dev/nvidia1", "/dev/nvidia2", "/dev/nvidia-cap3", "/dev/fuse"]}},
        "ct129: lxc_container_devices: not among gpu_devices_nodes of kpro5: /dev/nvidia2, /dev/nvidia-cap3. Add them "
        "there, or take them out here.",
    ),
    "no key to log in with": (
        {"ct129": {"lxc_container_ssh_public_keys": []}},
        "ct129: lxc_container_ssh_public_keys: empty, nobody could log in. Give at least one public key.",
    ),
    "a key that is none": (
        {"ct129": {"lxc_container_ssh_public_keys": ["secret"]}},
        "ct129: lxc_container_ssh_public_keys: 'secret' is not a public key. Give the text of a .pub file.",
    ),
    "misspelt variable": (
        {"kpro6": {"gpu_devices_nods": []}},
        "kpro6: gpu_devices_nods: nothing reads it. Write gpu_devices_nodes, or give a variable of your own a name "
        "less alike.",
    ),
    "misspelt prefix": (
        {"kpro6": {"gpu_device_nodes": []}},
        "kpro6: gpu_device_nodes: nothing reads it. Write gpu_devices_nodes, or give a variable of your own a name "
        "less alike.",
    ),
    "variable of a role that has none such": (
        {"ct200": {"lxc_container_weight": 5}},
        "ct200: lxc_container_weight: nothing reads it. Take it out, or give a variable of your own another prefix.",
    ),
    "choice that is none": (
        {"ct200": {"lxc_container_backend": "docker"}},
        "ct200: lxc_container_backend: is 'docker'. Set it to one of lxc, pct.",
    ),
    "text for a number": (
        {"ct200": {"lxc_container_memory_mib": "much"}},
        "ct200: lxc_container_memory_mib: is 'much'. Set it to a whole number: Memory limit in MiB. With 0 there is "
        "none; Proxmox VE, which always has one, gets the host's memory.",
    ),
    "key inside a variable": (
        {"ct200": {"lxc_container_mounts": [{"source": "/a", "target": "/b", "readonly": True}]}},
        "ct200: lxc_container_mounts[0]: has the unknown key readonly. Write read_only.",
    ),
    "relative path of a mount": (
        {"ct200": {"lxc_container_mounts": [{"source": "/a", "target": "b"}]}},
        "ct200: lxc_container_mounts: target 'b' is not an absolute path. Write it from / on.",
    ),
    "name of an environment that leaves its folder": (
        {"ct200": {"uv_venv_name": "../victim", "uv_venv_state": "absent"}},
        "ct200: uv_venv_name: '../victim' is not a folder name: a letter or digit, then letters, digits, '.', '_' and "
        "'-'.",
    ),
    "name of a container that leaves its folder": (
        {"ct200": {"lxc_container_name": "..", "lxc_container_state": "absent"}},
        "ct200: lxc_container_name: '..' is not a host name. Make it of small letters, digits and hyphens.",
    ),
    "negative memory": (
        {"ct200": {"lxc_container_memory_mib": -5}},
        "ct200: lxc_container_memory_mib: -5 is too small. Give a larger number.",
    ),
    "shared memory of no size": (
        {"ct200": {"shm_size_mib": 0}},
        "ct200: shm_size_mib: 0 is not a size. Set it to a number of MiB above 0.",
    ),
    "driver version without a revision": (
        {"kpro6": {"nvidia_driver_version": "580"}},
        "ct200, kpro6: nvidia_driver_version: is '580', which is not a package's full version. Write it with the "
        "revision, such as 580.126.09-1; `apt-cache policy` on the host lists those there are.",
    ),
    "node without numbers": (
        {"kpro6": {"gpu_devices_nodes": [{"path": "/dev/nvidia0"}]}, "ct200": {"lxc_container_devices": []}},
        "kpro6: gpu_devices_nodes[0] (/dev/nvidia0): has none of sysfs, driver and major. Give one of them.",
    ),
    "declared GPUs of another model": (
        {"kpro6": {"gpu_preflight_simulated": [{"name": "NVIDIA H200", "memory_mib": 1, "compute_capability": "9.0"}]}},
        "kpro6: gpu_preflight_model: is 'NVIDIA RTX PRO 6000 Blackwell Server Edition', but gpu_preflight_simulated "
        "has NVIDIA H200. Correct one of the two.",
    ),
    "CUDA that the driver is too old for": (
        {
            "kpro5": {"nvidia_driver_version": "570.148.08-1"},
            "ct129": {"uv_venv_required_mib": 1},
        },
        "ct129: gpu_preflight_cuda_variant: 'cu130' needs driver 580.65 or newer for NVIDIA RTX A6000, and it is "
        "570.148.08-1. Raise nvidia_driver_version on the host and its containers, or choose a variant of an older "
        "CUDA (`python -m images list`).",
    ),
    "CUDA that has no code for the GPU": (
        {"ct129": {"gpu_preflight_compute_capability": "7.5"}},
        "ct129: gpu_preflight_cuda_variant: 'cu130' has code for compute capability 8.0, 8.6, 8.9, 9.0, 10.0, 10.3, "
        "12.0, and NVIDIA RTX A6000 has 7.5. Choose another variant (`python -m images list`).",
    ),
    "unknown CUDA variant": (
        {"ct129": {"gpu_preflight_cuda_variant": "cu131", "uv_venv_requirements": "images/locks/cu130-serve.txt"}},
        "ct129: gpu_preflight_cuda_variant: There is no variant 'cu131'. Use one of cu128, cu129, cu130, cu130-newest.",
    ),
    "lock of another CUDA, and DFLASH where there is none": (
        {"ct200": {"gpu_preflight_cuda_variant": "cu128", "uv_venv_requirements": "images/locks/cu130-serve.txt"}},
        "ct200: sglang_deployments, qwen-dflash: cu128 refuses DFLASH: no release of SGLang with DFLASH is built for "
        "CUDA 12.8. Use NEXTN here, or cu129 on driver 575 or later.\n"
        "ct200: uv_venv_requirements: images/locks/cu130-serve.txt belongs to cu130, but gpu_preflight_cuda_variant is "
        "'cu128'. Write images/locks/cu128-serve.txt.",
    ),
    "lock that is not there": (
        {"ct200": {"uv_venv_requirements": "images/locks/none.txt"}},
        f"ct200: uv_venv_requirements: images/locks/none.txt is not below {ROOT} on the controller. Correct the path.",
    ),
    "port of two deployments, and a GPU too": (
        {
            "ct129": {
                "sglang_deployments": [
                    {"name": "one", "model_path": "/m", "port": 30000, "gpus": [0]},
                    {"name": "two", "model_path": "/m", "port": 30000, "gpus": [0]},
                ]
            }
        },
        "ct129: sglang_deployments, two: gpus has 0, which is one's too. A GPU serves one deployment.\n"
        "ct129: sglang_deployments, two: port 30000 is one's too. Give one of them another.",
    ),
    "GPU that the container has not": (
        {"ct129": {"sglang_deployments": [{"name": "one", "model_path": "/m", "port": 30000, "gpus": [1, 2]}]}},
        "ct129: sglang_deployments, one: gpus has [2], but lxc_container_devices has 2 GPUs, 0 to 1. Correct one.",
    ),
    "more ranks than GPUs": (
        {
            "ct129": {
                "sglang_deployments": [{"name": "one", "model_path": "/m", "port": 1, "arguments": {"tp_size": 4}}]
            }
        },
        "ct129: sglang_deployments, one: tensor parallel size 4 needs as many GPUs, and it has 2. Correct one.",
    ),
    "key that a deployment lacks": (
        {"ct129": {"sglang_deployments": [{"name": "one", "port": 30000}]}},
        "ct129: sglang_deployments[0] (one): has no model_path. Set it to a text: Folder of the model, or its name on "
        "a hub.",
    ),
    "type inside a deployment": (
        {"ct129": {"sglang_deployments": [{"name": "one", "model_path": "/m", "port": "http"}]}},
        "ct129: sglang_deployments[0] (one).port: is 'http'. Set it to a whole number: TCP port, unique in the "
        "container.",
    ),
    "deployment that is none": (
        {"ct129": {"sglang_deployments": ["s3cret"]}},
        "ct129: sglang_deployments[0]: is a value that is not shown. Set it to a mapping with the keys api_key, "
        "arguments, canaries, environment, gpus, host, metrics, min_acceptance_length, model_path, name, port, "
        "served_model_name, start_timeout_s, venv.",
    ),
    "reference to nothing": (
        {"ct200": {"lxc_container_gateway": "{{ gateway_of_the_rack }}"}},
        "ct200: lxc_container_gateway: has no value: 'gateway_of_the_rack' is undefined. Correct it, or make what it "
        "refers to.",
    ),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_named_with_its_remedy(
    check: Callable[..., list[str]], changes: dict[str, dict[str, Any]], message: str
) -> None:
    assert check(changes) == message.split("\n")


@pytest.mark.parametrize(
    ("path", "option"), [("a", {"type": "int", "no_log": True}), ("list[0].api_key", {"type": "int"})]
)
def test_no_secret_is_shown(path: str, option: dict[str, Any]) -> None:
    assert list(plugin.value_errors(path, "s3cret", option)) == [
        (path, "is a value that is not shown. Set it to a whole number: ")
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "empty"), ({"a": 1}, "a mapping"), ([1], "a list"), (True, "True"), ("x", "'x'")]
)
def test_wrong_values_are_shown_in_few_words(value: Any, text: str) -> None:
    assert plugin.shown(value, False) == text


def test_long_values_are_cut() -> None:
    assert len(plugin.shown("x" * 500, False)) == plugin.SHOWN + 3


def test_a_gpu_in_two_containers_must_be_declared_shared(check: Callable[..., list[str]]) -> None:
    moved = {"lxc_host": "kpro6", "gpu_preflight_model": "", "gpu_preflight_count": 1, "sglang_deployments": []}
    twice = {"ct129": moved | {"lxc_container_devices": ["/dev/nvidia7", "/dev/nvidiactl"]}}
    assert check(twice) == [
        "ct129, ct200: lxc_container_devices: /dev/nvidia7 of kpro6 is given to more than one container. Leave it with "
        "one, or name it in lxc_shared_gpus of kpro6."
    ]
    assert check(twice | {"kpro6": {"lxc_shared_gpus": ["/dev/nvidia7"]}}) == []


def test_vmid_counts_per_host_without_a_cluster(check: Callable[..., list[str]]) -> None:
    assert check({"ct129": {"lxc_vmid": 200}, "kpro5": {"lxc_cluster": ""}, "kpro6": {"lxc_cluster": ""}}) == []


def test_a_required_variable_is_asked_for(check: Callable[..., list[str]]) -> None:
    new = {"gpu_containers": {"hosts": {"ct300": {"lxc_vmid": 300, "ansible_host": "192.0.2.30"}}}}
    found = check(groups=new)
    assert [line for line in found if "lxc_host" in line.split(": ")[1]] == [
        "ct300: lxc_host: is not set. Name the host that carries the container: ['kpro5', 'kpro6']."
    ]


def test_a_required_variable_without_a_value(check: Callable[..., list[str]]) -> None:
    assert check({}, plays="- hosts: b200\n  roles: [lxc_container]\n")[0] == (
        "b200: lxc_container_address: is not set, and lxc_container needs it. Set it to a text: Address with prefix "
        "length, such as 192.0.2.200/24."
    )


def test_a_group_nearly_named(check: Callable[..., list[str]]) -> None:
    assert check(groups={"gpu_container": {"hosts": {"ct129": None}}}) == [
        "group gpu_container: no play runs on it. Write gpu_containers, or name it less alike."
    ]


def test_a_container_without_its_host_in_the_run(check: Callable[..., list[str]]) -> None:
    assert check(running=["ct200"]) == [
        "ct200: lxc_host: kpro6 carries it and is not in this run. Add it: -l ct200,kpro6. The callback "
        "limit_with_hosts, enabled in ansible.cfg, does so by itself."
    ]


def test_a_limited_run_is_not_stopped_by_others(check: Callable[..., list[str]]) -> None:
    wrong = {"ct129": {"lxc_container_backend": "docker"}}
    assert check(wrong, running=["ct200", "kpro6"]) == []
    assert len(check(wrong, running=["ct129", "kpro5"])) == 1


def test_what_is_made_from_facts_is_left_to_the_run(check: Callable[..., list[str]]) -> None:
    late = {"lxc_container_cores": "{{ half }}", "half": "{{ ansible_facts['processor_nproc'] // 2 }}"}
    assert check({"ct200": late}) == []


def test_all_problems_come_together(check: Callable[..., list[str]]) -> None:
    found = check({"ct129": {"lxc_vmid": 200}, "ct200": {"lxc_container_backend": "docker", "shm_size_mib": 2000000}})
    assert [line.split(": ")[:2] for line in found] == [
        ["ct129, ct200", "lxc_vmid"],
        ["ct200", "lxc_container_backend"],
        ["ct200", "shm_size_mib"],
    ]


def test_a_locked_vault_is_named(operator: Path) -> None:
    (operator / "vault-password").write_text("wrong")
    done = ansible("ansible-playbook", "-i", "inventories/example", "playbooks/preflight.yml")
    assert done.returncode == 2
    assert "* ct129, ct200: sglang_deployments: has no value: " in done.stdout
    assert "Decryption failed" in done.stdout
    assert "Set ANSIBLE_VAULT_PASSWORD_FILE to the file with the vault's password." in done.stdout


def test_the_vault_opens_with_the_documented_password() -> None:
    show = ("-m", "ansible.builtin.debug", "-a", "var=vault_sglang_api_key")
    done = ansible("ansible", "-i", "inventories/example", "ct200", *show)
    assert "vault_sglang_api_key: replace-me" in done.stdout, done.stderr


@pytest.mark.skipif(not SITE.exists(), reason="no site.yml")
def test_a_run_stops_before_any_machine() -> None:
    wrong = '{"lxc_container_backend": "docker"}'
    done = ansible("ansible-playbook", "-i", "inventories/example", "site.yml", "-l", "ct200", "-e", wrong)
    assert done.returncode == 2
    assert "lxc_container_backend: is 'docker'. Set it to one of lxc, pct." in done.stdout
    assert "PLAY [The inventory is right]" in done.stdout
    assert done.stdout.count("PLAY [") == 1
    assert "unreachable=1" not in done.stdout
