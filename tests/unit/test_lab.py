"""The lab finds the machine's mirror, marks what it makes, and refuses what it cannot work with."""

import os
from pathlib import Path

import pytest

from lab import doctor, network, rootfs
from lab.__main__ import mount
from lab.machine import Machine
from lab.settings import LabError, Settings

SETTINGS = Settings(91, Path("/state/91"), Path("/cache"))

ONE_LINE = """
# deb http://old.example/debian bookworm main
deb [signed-by=/k.gpg] http://mirror.example/debian bookworm main
deb http://mirror.example/debian-security bookworm-security main
deb http://vendor.example/apt stable main
"""
DEB822 = """Types: deb
# a comment
URIs: http://mirror.example/debian/
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main
"""


@pytest.mark.parametrize(
    ("text", "security"),
    [
        (ONE_LINE, "http://mirror.example/debian-security"),
        (DEB822, "http://security.example/debian-security"),
        ("deb http://mirror.example/debian bookworm main", "http://mirror.example/debian-security"),
    ],
)
def test_mirror_is_found_in_both_forms(text: str, security: str) -> None:
    assert rootfs.parse_mirror(["", text]) == rootfs.Mirror("http://mirror.example/debian", security)


def test_machine_without_debian_is_told() -> None:
    with pytest.raises(LabError, match="no Debian archive found"):
        rootfs.parse_mirror(["deb http://vendor.example/apt stable main"])


def test_archive_is_named_by_what_goes_into_it() -> None:
    mirror = rootfs.Mirror("http://a.example/debian", "http://a.example/debian-security")
    other = rootfs.Mirror("http://b.example/debian", "http://b.example/debian-security")
    digests = {rootfs.digest(rootfs.recipe(kind, one)) for kind in ("host", "guest") for one in (mirror, other)}
    assert len(digests) == 4
    assert rootfs.digest(rootfs.recipe("host", mirror)) == rootfs.digest(rootfs.recipe("host", mirror))


def test_every_rule_carries_the_bridges_name() -> None:
    assert all(rule[rule.index("--comment") + 1] == "gpulab91" for rule in network.rules(SETTINGS))


@pytest.mark.parametrize("text", ["0", "255", "-1", "seventy", ""])
def test_wrong_subnet_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_SUBNET", text)
    with pytest.raises(LabError, match=r"LAB_SUBNET: .* is not a whole number from 1 to 254"):
        Settings.from_environment()


def test_interface_names_fit() -> None:
    assert all(len(f"{SETTINGS.identity}v{last}") <= 15 for last in (2, 254))


def test_mounts_of_the_command_line() -> None:
    assert mount("/a:/b") == (Path("/a"), "/b", False)
    assert mount("/a:/b:ro") == (Path("/a"), "/b", True)
    for text in ("/a", "/a:/b:rw", "/a:/b:ro:x"):
        with pytest.raises(LabError, match="--mount"):
            mount(text)


def test_read_only_mount_is_read_only() -> None:
    config = Machine("m", 20, mounts=((Path("/a"), "/b", True), (Path("/c"), "/d", False))).config(SETTINGS)
    assert "lxc.mount.entry = /a b none bind,create=dir,ro 0 0\n" in config
    assert "lxc.mount.entry = /c d none bind,create=dir 0 0\n" in config


@pytest.mark.parametrize(("release", "numbers"), [("6.1.0-37-amd64", (6, 1)), ("6.18.3", (6, 18)), ("7.0-rc1", (7, 0))])
def test_kernel_release(release: str, numbers: tuple[int, int]) -> None:
    assert doctor.release_number(release) == numbers


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None if program == "zstd" else f"/bin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    findings = {one.name: one for one in doctor.examine(Settings(91, tmp_path / "state", tmp_path / "cache"))}
    assert not findings["root"].fine
    assert "apt-get install zstd" in findings["packages"].text
    report = doctor.report(list(findings.values()))
    assert len(report.splitlines()) <= 24
    assert report.endswith("thing(s) are missing.")
