"""The environment is the lock's, belongs to root, has no pip, and its modules come from it."""

import json
import re
from pathlib import PurePosixPath
from typing import Any

import pytest
from testinfra.host import Host

from tests.testinfra.fleet import ROOT

GROUP = "gpu_containers"

PLACES = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
places = {name: spec.origin or list(spec.submodule_search_locations)[0] for name, spec in specs.items() if spec}
print(json.dumps(places))
"""
VERSIONS = """
import importlib.metadata, json
print(json.dumps({one.name: one.version for one in importlib.metadata.distributions()}))
"""


@pytest.fixture(scope="module")
def folder(variables: dict[str, Any]) -> PurePosixPath:
    return PurePosixPath(variables["uv_venv_root"]) / variables["uv_venv_name"]


@pytest.fixture(scope="module")
def release(host: Host, folder: PurePosixPath) -> PurePosixPath:
    return PurePosixPath(host.check_output("readlink -e %s", str(folder / "current")))


def places(host: Host, release: PurePosixPath, modules: list[str]) -> dict[str, str]:
    """Return where the release's Python finds modules, without importing them; those it does not find are left out."""
    words = " ".join(modules)
    return dict(json.loads(host.check_output(f"cd / && %s -I -c %s {words}", f"{release}/bin/python", PLACES)))


def test_current_is_a_complete_release(host: Host, folder: PurePosixPath, release: PurePosixPath) -> None:
    assert release.parent == folder / "releases"
    assert host.file(f"{release}/.complete").exists


def test_releases_are_no_more_than_asked_for_and_in_use(
    host: Host, folder: PurePosixPath, variables: dict[str, Any]
) -> None:
    found = host.check_output("find %s -mindepth 1 -maxdepth 1 -type d", str(folder / "releases")).split()
    complete = host.check_output("find %s -mindepth 2 -maxdepth 2 -name .complete", str(folder / "releases")).split()
    assert sorted(complete) == sorted(f"{release}/.complete" for release in found)
    units = host.run("grep -hors %s /etc/systemd/system", f"{folder}/releases/[^/]*").stdout.split()
    assert found
    assert len(set(found) - set(units)) <= variables["uv_venv_keep_releases"]


def test_packages_are_the_locks(host: Host, release: PurePosixPath, variables: dict[str, Any]) -> None:
    """Every distribution but the local ones has its version from the lock."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lock = (ROOT / variables["uv_venv_requirements"]).read_text()
    pins = {normal(name): version for name, version in re.findall(r"(?m)^([\w.-]+)(?:\[.*?\])?==([^\s;\\]+)", lock)}
    installed = json.loads(host.check_output("cd / && %s -I -c %s", f"{release}/bin/python", VERSIONS))
    others = {name: version for name, version in installed.items() if pins.get(normal(name)) != version}
    assert len(installed) > len(others)
    assert len(others) == len(variables["uv_venv_local_packages"]), others


def test_there_is_no_pip(host: Host, release: PurePosixPath) -> None:
    assert places(host, release, ["pip"]) == {}
    assert host.run("ls %s/bin/pip*", str(release)).rc != 0


def test_modules_come_from_the_release(host: Host, release: PurePosixPath, variables: dict[str, Any]) -> None:
    found = places(host, release, variables["uv_venv_imports"])
    assert list(found) == variables["uv_venv_imports"]
    elsewhere = {name: place for name, place in found.items() if not place.startswith(f"{release}/")}
    assert elsewhere == {}


def test_only_root_can_write_it(host: Host, folder: PurePosixPath) -> None:
    loose = host.check_output(r"find %s ! -type l \( ! -user root -o -perm /022 \) -print -quit", str(folder))
    assert loose == ""


def test_service_user_can_run_its_python(host: Host, release: PurePosixPath, variables: dict[str, Any]) -> None:
    user = variables.get("sglang_user", "sglang")
    if not host.user(user).exists:
        user = "nobody"
    code = "import sys; print(sys.prefix)"
    words = "setpriv --reuid %s --clear-groups --no-new-privs %s -c %s"
    shown = host.check_output(words, user, f"{release}/bin/python", code)
    assert shown == str(release)
