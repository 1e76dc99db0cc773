"""The driver: one version on a machine and on its host, kept by pin and holds, whole in the cache."""

import json
import re
import shlex
from typing import Any

import pytest
from testinfra.host import Host

from tests.testinfra.fleet import Fleet

GROUP = "lxc_hosts:gpu_containers"
STATUS = "${Package} ${db:Status-Want} ${db:Status-Status} ${Version}\n"


@pytest.fixture(scope="module")
def manifest(host: Host, variables: dict[str, Any]) -> dict[str, Any]:
    """Return what the wanted version consists of, from the cache."""
    file = f"{variables['nvidia_driver_cache_dir']}/{variables['nvidia_driver_version']}.json"
    return dict(json.loads(host.file(file).content_string))


@pytest.fixture(scope="module")
def packages(host: Host) -> dict[str, list[str]]:
    """Return selection, status and version of every package on the machine."""
    rows = [row.split() for row in host.check_output("dpkg-query -W -f %s", STATUS).splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4 and row[2] not in ("not-installed", "config-files")}


def library(host: Host) -> str:
    """Return the file that a CUDA program gets as libcuda.so.1."""
    found = host.run("ldconfig -p").stdout.partition("libcuda.so.1 ")[2].splitlines()
    assert found, "the linker does not know libcuda.so.1"
    return str(host.check_output("readlink -f %s", found[0].split("=>")[1].strip()))


def upstream(version: str) -> str:
    """Return the driver's own number, which the kernel module and all libraries share."""
    return version.rpartition("-")[0]


def test_whole_family_is_installed_in_the_version_of_the_inventory_and_held(
    manifest: dict[str, Any], packages: dict[str, list[str]], variables: dict[str, Any]
) -> None:
    family = {name: packages[name] for name in manifest["family"] if name in packages}
    assert set(variables["nvidia_driver_packages"]) <= set(packages)
    assert family
    wanted = ["hold", "installed", variables["nvidia_driver_version"]]
    assert {name: found for name, found in family.items() if found != wanted} == {}


def test_no_other_version_has_a_chance(host: Host, manifest: dict[str, Any], variables: dict[str, Any]) -> None:
    """Apt's own answer for each package: our version above 1000, any other below zero."""
    wanted = variables["nvidia_driver_version"]
    names = sorted(manifest["family"])
    answer = host.check_output(f"LC_ALL=C apt-cache policy {' '.join(names)}")
    policies = re.findall(r"^(\S+):\n(.*\n)*?  Version table:\n((?: .*\n?)*)", f"{answer}\n", re.MULTILINE)
    known = {name for name, _, _ in policies}
    assert set(variables["nvidia_driver_packages"]) <= known <= set(names)
    for name, _, table in policies:
        priorities = dict(re.findall(r"^ (?:\*\*\*|   ) (\S+) (-?\d+)$", table, re.MULTILINE))
        own = int(priorities.pop(wanted, 1001))
        assert own > 1000, (name, own)
        assert all(int(priority) < 0 for priority in priorities.values()), (name, priorities)


def test_upgrade_of_everything_leaves_the_driver_alone(
    host: Host, manifest: dict[str, Any], variables: dict[str, Any]
) -> None:
    family = set(manifest["family"])

    def touched(*options: str) -> set[str]:
        words = " ".join(map(shlex.quote, options))
        output = host.check_output(f"LC_ALL=C apt-get --simulate {words} dist-upgrade")
        changes = (line.split()[1] for line in output.splitlines() if line.startswith(("Inst ", "Remv ", "Purg ")))
        return family & {name.partition(":")[0] for name in changes}

    assert touched() == set()
    assert touched("--ignore-hold") == set(), "only the holds keep the driver, not the pin"
    if newer_is_offered(host, variables):
        assert touched("--ignore-hold", "-oDir::Etc::preferencesparts=/nonexistent"), "this check cannot fail here"


def newer_is_offered(host: Host, variables: dict[str, Any]) -> bool:
    """Tell whether a source offers a newer driver, as the lab's does on purpose."""
    wanted = variables["nvidia_driver_version"]
    lines = host.check_output("apt-cache madison %s", variables["nvidia_driver_packages"][0]).splitlines()
    offered = {line.split("|")[1].strip() for line in lines}
    return any(host.run("dpkg --compare-versions %s gt %s", one, wanted).rc == 0 for one in offered)


def test_unattended_upgrades_may_not_touch_the_driver(host: Host, manifest: dict[str, Any]) -> None:
    listed = host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert [name for name in manifest["family"] if f'"^{name}$"' not in listed] == []


def test_cache_has_every_installed_package_unharmed(
    host: Host, manifest: dict[str, Any], packages: dict[str, list[str]], variables: dict[str, Any]
) -> None:
    assert {name for name in manifest["family"] if name in packages} <= set(manifest["packages"])
    sums = "".join(f"{one['sha256']}  {one['file']}\n" for one in manifest["packages"].values())
    folder = shlex.quote(variables["nvidia_driver_cache_dir"])
    answer = host.run(f"cd {folder} && printf %s {shlex.quote(sums)} | sha256sum --check --strict --quiet")
    assert answer.rc == 0, answer.stdout + answer.stderr


def test_files_on_disk_are_those_of_the_packages(
    host: Host, manifest: dict[str, Any], packages: dict[str, list[str]], variables: dict[str, Any]
) -> None:
    names = sorted(set(manifest["family"]) & set(packages))
    report = host.run(f"dpkg --verify {' '.join(names)}").stdout.splitlines()
    assert [line for line in report if "/usr/share/" not in line] == []
    assert library(host).endswith(f"libcuda.so.{upstream(variables['nvidia_driver_version'])}")


def test_loaded_kernel_module_is_of_the_same_version(host: Host, variables: dict[str, Any]) -> None:
    module = host.file("/sys/module/nvidia/version")
    if not module.exists:
        pytest.skip("no NVIDIA kernel module is loaded")
    assert module.content_string.strip() == upstream(variables["nvidia_driver_version"])


def test_container_has_the_libraries_of_its_host(host: Host, fleet: Fleet, variables: dict[str, Any]) -> None:
    if "lxc_host" not in variables:
        pytest.skip("not a container")
    assert library(host).endswith(library(fleet.host(variables["lxc_host"])).rpartition("/")[2])
