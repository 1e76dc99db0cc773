"""The lab finds the machine's mirror, marks what it makes, and refuses what it cannot work with."""

import hashlib
import os
from pathlib import Path

import pytest

from lab import doctor, machine, network, rootfs, up
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


def test_machines_of_two_labs_have_other_names() -> None:
    other = Settings(92, Path("/state/92"), Path("/cache"))
    one = Machine("kpro6", 6)
    assert one.id(SETTINGS) != one.id(other)
    assert "lxc.uts.name = kpro6\n" in one.config(SETTINGS)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of killed machines of two labs."""
    for name in ("gpulab91-kpro6/ns/x", "gpulab91-kpro6-1", "gpulab9-kpro6", "gpulab92-kpro6"):
        (tmp_path / f"lxc.payload.{name}").mkdir(parents=True)
    (tmp_path / "unified/lxc.monitor.gpulab91-kpro6").mkdir(parents=True)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "CGROUP_TIMEOUT_S", 0.0)
    return tmp_path


def test_only_control_groups_of_this_lab_go(cgroups: Path) -> None:
    machine.clear_cgroups(SETTINGS)
    left = sorted(path.name for path in [*cgroups.glob("lxc.*"), *cgroups.glob("unified/*")])
    assert left == ["lxc.payload.gpulab9-kpro6", "lxc.payload.gpulab92-kpro6"]


def test_busy_control_group_is_named(cgroups: Path) -> None:
    busy = cgroups / "lxc.payload.gpulab91-kpro6/ns/x/process"
    busy.touch()
    with pytest.raises(LabError, match=r"ns/x: Directory not empty\. Processes of a removed machine are still in it"):
        machine.clear_cgroups(SETTINGS)


def test_name_server_that_only_this_machine_reaches_is_not_given_to_others(tmp_path: Path) -> None:
    etc, systemd = tmp_path / "resolv.conf", tmp_path / "upstream"
    systemd.write_text("nameserver 192.0.2.53\n")
    etc.write_text("nameserver 127.0.0.53\n")
    assert machine.resolver(etc, systemd) == "nameserver 192.0.2.53\n"
    etc.write_text("nameserver 192.0.2.1\n")
    assert machine.resolver(etc, systemd) == "nameserver 192.0.2.1\n"
    etc.write_text("nameserver 127.0.0.1\n")
    assert machine.resolver(etc, tmp_path / "none") == "nameserver 127.0.0.1\n"


def test_forwarding_is_put_back_with_the_last_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(91, tmp_path / "91", tmp_path / "cache")
    monkeypatch.setattr(network, "succeeds", lambda _: False)
    monkeypatch.setattr(network, "FORWARDING", tmp_path / "forwarding")
    (tmp_path / "forwarding").write_text("1\n")
    (settings.shared / "ip_forward").write_text("0\n")
    monkeypatch.setattr(network, "others", lambda _: ["gpulab92"])
    network.down(settings)
    assert (tmp_path / "forwarding").read_text() == "1\n"
    monkeypatch.setattr(network, "others", lambda _: [])
    network.down(settings)
    assert (tmp_path / "forwarding").read_text() == "0\n"


def test_two_commands_on_one_lab_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.settings.LOCKS", tmp_path)
    other = Settings(92, tmp_path / "92", tmp_path)
    refused = pytest.raises(LabError, match="another command is building or removing the lab 91")
    with SETTINGS.exclusive(), other.exclusive(), refused, SETTINGS.exclusive():
        pass


def test_torch_that_is_there_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = tmp_path / "torch.txt"
    pins.write_text(f"torch==1 --hash=sha256:{hashlib.sha256(b'wheel').hexdigest()}\n")
    monkeypatch.setattr(up, "TORCH_CPU", pins)
    monkeypatch.setattr(up, "ROOT", tmp_path)
    monkeypatch.setattr(up, "PIP", "/bin/false")
    with pytest.raises(LabError, match=r"LAB_TORCH_INDEX: \S+ did not give the wheel of torch\.txt\. Name an index"):
        up.fetch_torch(tmp_path / "wheels")
    (tmp_path / "wheels/torch-1.whl").write_bytes(b"wheel")
    up.fetch_torch(tmp_path / "wheels")


def test_hints_work_as_they_are_printed(tmp_path: Path) -> None:
    assert "unchanged: .venv/bin/ansible-playbook site.yml" in up.summary(Settings.default())
    text = up.summary(Settings(91, tmp_path / "91", Settings.default().cache))
    assert f"unchanged: LAB_SUBNET=91 LAB_STATE={tmp_path} .venv/bin/ansible-playbook" in text
    assert f"Remove it all:    LAB_SUBNET=91 LAB_STATE={tmp_path} make lab-down" in text


def test_doctor_does_not_ask_for_what_the_lab_makes_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    (finding,) = [one for one in doctor.examine(SETTINGS) if one.name == "environment"]
    assert not finding.needed
    assert doctor.report([finding]) == "later  environment  `make lab` makes it\nEverything is there."


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None if program == "zstd" else f"/bin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    findings = {one.name: one for one in doctor.examine(Settings(91, tmp_path / "state", tmp_path / "cache"))}
    assert not findings["root"].fine
    assert "apt-get install zstd" in findings["packages"].text
    report = doctor.report(list(findings.values()))
    assert len(report.splitlines()) <= 24
    assert report.endswith("thing(s) are missing.")
