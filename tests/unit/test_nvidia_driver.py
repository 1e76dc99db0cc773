"""The driver role: apt's files, the cache, what holds a GPU, and what is refused before anything is changed."""

import fcntl
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.loading import ROOT, load

role = load("roles/nvidia_driver/library/nvidia_packages.py")
OLD, NEW = "535.216.03-2~bpo12+1", "535.261.03-1"


@pytest.mark.parametrize(
    ("version", "number"),
    [
        (OLD, "535.216.03"),
        ("580.126.09-1ubuntu1", "580.126.09"),
        ("580.126.09-0-1", "580.126.09-0"),
        ("580.1", "580.1"),
    ],
)
def test_upstream_is_what_the_kernel_module_reports(version: str, number: str) -> None:
    assert role.upstream(version) == number


# apt's files

PROXMOX = """\
deb http://ftp.example.org/debian bookworm main contrib
deb http://ftp.example.org/debian bookworm-updates main contrib
# deb http://old.example.org/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/vpn.gpg] https://vpn.example.org/stable/debian bookworm main
deb http://download.example.com/debian/pve bookworm pve-no-subscription
deb-src http://src.example.org/debian bookworm main
"""
DEB822 = """\
Types: deb deb-src
# a comment
URIs: http://ftp.example.org/debian/
Suites: trixie trixie-updates
Components: main
 contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Enabled: no
Types: deb
URIs: http://off.example.org/debian
Suites: trixie
Components: main
"""


def test_one_line_entries_leave_out_sources_and_comments() -> None:
    entries = list(role.one_line_entries(PROXMOX))
    assert [entry.uri for entry in entries] == [
        "http://ftp.example.org/debian", "http://ftp.example.org/debian",
        "https://vpn.example.org/stable/debian", "http://download.example.com/debian/pve",
    ]  # fmt: skip
    assert entries[0].components == ("main", "contrib")
    assert entries[2].signed_by == "/usr/share/keyrings/vpn.gpg"


def test_deb822_entries_join_continuation_lines_and_leave_out_disabled_ones() -> None:
    entries = list(role.deb822_entries(DEB822))
    assert [(entry.uri, entry.suite) for entry in entries] == [
        ("http://ftp.example.org/debian", "trixie"), ("http://ftp.example.org/debian", "trixie-updates"),
    ]  # fmt: skip
    assert entries[0].components == ("main", "contrib")
    assert entries[0].signed_by == "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nabc"


def test_own_mirror_is_not_a_vendor_whose_suite_has_the_same_name() -> None:
    assert role.own_mirror(list(role.one_line_entries(PROXMOX)), "bookworm").uri == "http://ftp.example.org/debian"


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_own_mirror_that_is_not_clear_is_refused(suite: str) -> None:
    twice = "deb http://a.example.org/debian bookworm main\ndeb http://b.example.org/debian bookworm main\n"
    with pytest.raises(role.DriverError, match=r"Set nvidia_driver_source\.uris"):
        role.own_mirror(list(role.one_line_entries(twice)), suite)


def etc(tmp_path: Path) -> Path:
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text("ID=debian\nVERSION_CODENAME=trixie\n")
    (tmp_path / "apt/sources.list.d/debian.sources").write_text(DEB822)
    (tmp_path / "apt/sources.list.d/nvidia-driver.sources").write_text(
        "Types: deb\nURIs: http://stale.example.org\nSuites: trixie\nComponents: main\n"
    )
    (tmp_path / "apt/sources.list.d/readme.txt").write_text(PROXMOX)
    return tmp_path


def test_source_takes_over_mirror_release_and_key_of_the_machine(tmp_path: Path) -> None:
    params = {"uris": [], "suites": [], "components": ["contrib", "non-free"], "signing_key": ""}
    assert role.source_of(params, etc(tmp_path)).render() == (
        "# Managed by the Ansible role nvidia_driver.\n"
        "Types: deb\nURIs: http://ftp.example.org/debian\nSuites: trixie\nComponents: contrib non-free\n"
        "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n"
    )


def test_source_of_a_vendor_is_rendered_as_given(tmp_path: Path) -> None:
    key = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nabc=\n-----END PGP PUBLIC KEY BLOCK-----\n"
    params = {"uris": ["https://packages.example.org/debian12"], "suites": ["./"], "components": [], "signing_key": key}
    assert role.source_of(params, etc(tmp_path)).render() == (
        "# Managed by the Ansible role nvidia_driver.\n"
        "Types: deb\nURIs: https://packages.example.org/debian12\nSuites: ./\n"
        "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc=\n -----END PGP PUBLIC KEY BLOCK-----\n"
    )


@pytest.mark.parametrize(
    ("system", "components"), [("debian", ("contrib", "non-free", "non-free-firmware")), ("ubuntu", ("restricted",))]
)
def test_source_without_components_is_where_the_distribution_has_the_driver(
    tmp_path: Path, system: str, components: tuple[str, ...]
) -> None:
    (etc(tmp_path) / "os-release").write_text(f"ID={system}\nVERSION_CODENAME=trixie\n")
    params = {"uris": [], "suites": [], "components": [], "signing_key": "/k.gpg"}
    assert role.source_of(params, tmp_path) == role.Source(
        ("http://ftp.example.org/debian",), ("trixie",), components, "/k.gpg"
    )


@pytest.mark.parametrize(("suites", "components"), [(["./"], ["main"]), (["trixie"], []), ([], [])])
def test_source_is_flat_or_has_components(tmp_path: Path, suites: list[str], components: list[str]) -> None:
    params = {"uris": ["http://x.example.org"], "suites": suites, "components": components, "signing_key": ""}
    with pytest.raises(role.DriverError, match=r"nvidia_driver_source\.suites is \["):
        role.source_of(params, etc(tmp_path))


def test_source_carries_only_its_own_components() -> None:
    source = role.Source(("http://ftp.example.org/debian",), ("trixie",), ("contrib", "non-free"))
    assert source.carries("ftp.example.org", "contrib")
    assert not source.carries("ftp.example.org", "main")
    assert not source.carries("other.example.org", "contrib")
    assert role.Source(("file:/srv/nvidia",), ("./",), ()).carries("", "")


def test_preferences_let_one_version_in_and_no_other() -> None:
    text = role.preferences({"libcuda1", "nvidia-smi"}, OLD)
    wanted, others = text.split("\n\n")
    assert wanted.splitlines()[1:] == [
        "Package: libcuda1:any nvidia-smi:any",
        f"Pin: version {OLD}",
        "Pin-Priority: 1001",
    ]
    assert others.splitlines()[1:] == ["Package: libcuda1:any nvidia-smi:any", "Pin: version *", "Pin-Priority: -1"]
    assert role.pinned(text) == {"libcuda1", "nvidia-smi"}


def test_unattended_upgrades_patterns_match_only_the_whole_name() -> None:
    assert '    "^libfoo[+][+]1[.]2$";\n' in role.unattended(["libfoo++1.2"])


# what is on the machine


def test_dpkg_answer_without_foreign_and_removed_packages() -> None:
    rows = [
        f"libcuda1\tamd64\t{OLD}\tnvidia-graphics-drivers\thold\tinstalled",
        f"libcuda1\ti386\t{NEW}\tnvidia-graphics-drivers\tinstall\tinstalled",
        "nvidia-support\tall\t1\tnvidia-support\tinstall\thalf-configured",
        "gone\tamd64\t1\tgone\tdeinstall\tconfig-files",
    ]
    found = role.parse_dpkg("".join(f"{row}\n" for row in rows), "amd64")
    assert found == {
        "libcuda1": role.Installed(OLD, "nvidia-graphics-drivers", "hold", "installed"),
        "nvidia-support": role.Installed("1", "nvidia-support", "install", "half-configured"),
    }
    assert found["libcuda1"].complete
    assert not found["nvidia-support"].complete


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.216.03  Fri Oct 25 21:51:51 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build  (builder)  Thu\n"


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.216.03"), (OPEN, "580.126.09"), ("nonsense", "")])
def test_module_version_from_proc(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert role.module_version(tmp_path) == version


def test_module_version_from_sysfs_comes_first(tmp_path: Path) -> None:
    assert role.module_version(tmp_path) == ""
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("580.126.09\n")
    assert role.module_version(tmp_path) == "580.126.09"


def process(proc: Path, number: int, name: str, group: str, links: list[str]) -> None:
    (proc / f"{number}/fd").mkdir(parents=True)
    (proc / f"{number}/comm").write_text(f"{name}\n")
    (proc / f"{number}/cgroup").write_text(f"0::{group}\n")
    for index, link in enumerate(links):
        (proc / f"{number}/fd/{index}").symlink_to(link)


def test_holders_name_process_devices_and_container(tmp_path: Path) -> None:
    process(tmp_path, 9, "python3", "/lxc.payload.ct200/x.service", ["/dev/nvidia1", "/dev/nvidia0", "/dev/nvidia0"])
    process(tmp_path, 10, "vllm", "/lxc/129/ns", ["/dev/nvidia-uvm"])
    process(tmp_path, 11, "bash", "/user.slice", ["/dev/null", "/srv/dev/nvidia0"])
    process(tmp_path, 12, "nvidia-persiste", "/system.slice", ["/dev/nvidia0"])
    (tmp_path / "self").mkdir()
    assert role.holders(tmp_path) == [
        "python3 (pid 9 of container ct200) holds /dev/nvidia0, /dev/nvidia1",
        "vllm (pid 10 of container 129) holds /dev/nvidia-uvm",
    ]


def test_wait_for_lock_gives_up_with_the_variable_to_raise(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    role.wait_for_lock(0, lock)
    code = (
        "import fcntl,sys; f=open(sys.argv[1],'a'); fcntl.lockf(f,fcntl.LOCK_EX); print(1,flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(role.DriverError, match="raise nvidia_driver_lock_timeout_s"):
            role.wait_for_lock(0, lock)
    with lock.open("a") as stream:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_killed_caller_does_not_end_the_transaction(tmp_path: Path) -> None:
    log, done = tmp_path / "log", tmp_path / "done"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\nfrom tests.unit.loading import load\n"
        "role = load('roles/nvidia_driver/library/nvidia_packages.py')\n"
        f"role.run_to_end(['sh', '-c', 'echo begun; sleep 0.7; echo more; touch {done}'], Path({str(log)!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as caller:
        while not (log.exists() and "begun" in log.read_text()):
            assert caller.poll() is None
        caller.kill()
    for _ in range(50):
        if done.exists():
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert done.exists()
    assert log.read_text() == "begun\nmore\n"


# apt's answers


def test_simulated_reads_installs_upgrades_and_removals() -> None:
    text = (
        "Inst libcuda1 [535.261.03-1] (535.216.03-2~bpo12+1 Debian Backports:oldstable [amd64]) []\n"
        "Inst glx-diversions (1.2.2 Debian:12.15/oldstable [amd64])\n"
        "Conf libcuda1 (535.216.03-2~bpo12+1 Debian)\nRemv nvtop [3.0.1-1]\nPurg nvidia-smi [535.261.03-1]\n"
    )
    assert role.simulated(text) == ({"libcuda1": OLD, "glx-diversions": "1.2.2"}, {"nvtop", "nvidia-smi"})


def test_said_gives_the_reason_and_not_the_noise() -> None:
    text = (
        "Reading package lists...\nThe following packages have unmet dependencies:\n"
        " a : Depends: b (= 1) but 2 is there\n"
        "dpkg: error processing archive x.deb (--unpack):\n unable to install new version: No space left on device\n"
        "E: Sub-process dpkg returned an error code (1)\n"
    )
    assert role.said(subprocess.CompletedProcess([], 1, text)) == (
        "a : Depends: b (= 1) but 2 is there dpkg: error processing archive x.deb (--unpack): unable to install new "
        "version: No space left on device E: Sub-process dpkg returned an error code (1)"
    )
    assert role.said(subprocess.CompletedProcess([], 1, "one\n\ntwo\n")) == "one two"


# the cache


def package(name: str, version: str = OLD, depends: tuple[str, ...] = (), data: bytes = b"deb") -> Any:
    return role.Package(
        version, f"{name}_{version}_amd64.deb", hashlib.sha256(data).hexdigest(), len(data), 1000, list(depends)
    )


def manifest(version: str = OLD, /, **depends: tuple[str, ...]) -> Any:
    packages = {name: package(name, version, needs) for name, needs in depends.items()}
    return role.Manifest(version, "amd64", sorted(packages), ["nvidia-graphics-drivers"], packages)


def test_manifest_survives_writing_and_reading(tmp_path: Path) -> None:
    one = manifest(libcuda1=("alternative",), alternative=())
    (tmp_path / f"{OLD}.json").write_text(one.dump())
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps({"version": "1", "packages": {"a": {}}}))
    assert role.manifests(tmp_path) == {OLD: one}


def test_closure_follows_dependencies_in_circles_and_knows_what_it_lacks() -> None:
    one = manifest(a=("b",), b=("c", "a"), c=(), d=())
    assert one.closure(["a"]) == {"a", "b", "c"}
    assert one.closure(["d", "c"]) == {"c", "d"}
    assert one.closure(["a", "x"]) is None


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef"))), st.sets(st.sampled_from("abcdef"))
)
def test_closure_is_closed_and_least(graph: dict[str, set[str]], roots: set[str]) -> None:
    found = manifest(**{name: tuple(needs) for name, needs in graph.items()}).closure(roots)
    reach = set(roots)
    for _ in "abcdef":
        reach |= {need for name in reach for need in graph.get(name, ())}
    assert found == (reach if reach <= set(graph) else None)


def test_merged_keeps_what_only_the_older_manifest_knows() -> None:
    both = role.merged(manifest(a=(), b=("a",)), manifest(b=(), c=()))
    assert both.family == ["a", "b", "c"]
    assert both.packages["b"].depends == []
    assert role.merged(None, both) is both


def test_damaged_names_missing_short_and_changed_files(tmp_path: Path) -> None:
    sound, short, changed, missing = (
        package(name, data=b"content") for name in ("sound", "short", "changed", "missing")
    )
    (tmp_path / sound.file).write_bytes(b"content")
    (tmp_path / short.file).write_bytes(b"cont")
    (tmp_path / changed.file).write_bytes(b"CONTENT")
    found = role.damaged(tmp_path, [sound, short, changed, missing])
    assert set(found) == {short.file, changed.file, missing.file}
    assert found[missing.file] == "is missing"
    assert found[short.file] == "is damaged: it has 4 bytes, not the manifest's 7"
    assert f"not the manifest's {changed.sha256}" in found[changed.file]


def test_too_full_adds_up_what_goes_to_one_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100 * 2**20
    monkeypatch.setattr(role.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    fits = free - role.MARGIN_BYTES
    assert role.too_full([(tmp_path / "not/there", fits)]) == []
    assert role.too_full([(tmp_path / "a", fits), (tmp_path / "b", 0)]) == []
    (problem,) = role.too_full([(tmp_path / "a", fits), (tmp_path / "b", 2**20)])
    assert problem.startswith(f"{tmp_path}: 100 MiB are free, 101 MiB are needed")
    assert role.too_full([(tmp_path, 0)]) == []


def test_write_replaces_in_one_step_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "new/file"
    role.write(file, "text\n")
    assert file.read_text() == "text\n"
    assert file.stat().st_mode & 0o777 == 0o644
    assert [left.name for left in file.parent.iterdir()] == ["file"]
    role.write(file, None)
    role.write(file, None)
    assert role.read(file) is None


# the driver


def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **params: Any) -> Any:
    """Return the driver of a machine without any package, with the role's defaults."""
    monkeypatch.setattr(role, "run", lambda argv: subprocess.CompletedProcess(argv, 0, ""))
    monkeypatch.setattr(role, "module_version", lambda: params.pop("module", ""))
    defaults = yaml.safe_load((ROOT / "roles/nvidia_driver/defaults/main.yml").read_text())
    values = {name.removeprefix("nvidia_driver_"): value for name, value in defaults.items()}
    source = {
        "uris": ["http://ftp.example.org/debian"],
        "suites": ["trixie"],
        "components": ["non-free"],
        "signing_key": "",
    }
    fixed = {"version": OLD, "cache_dir": str(tmp_path), "source": source}
    return role.Driver(values | fixed | params, False, tmp_path)


@pytest.mark.parametrize(
    ("params", "texts"),
    [
        ({}, []),
        ({"version": ""}, ["nvidia_driver_version is ''"]),
        ({"version": "535"}, ["nvidia_driver_version is '535'. Set the full version"]),
        ({"version": f"{OLD} "}, ["nvidia_driver_version is"]),
        ({"version": "*", "packages": []}, ["nvidia_driver_version is '*'", "nvidia_driver_packages is empty"]),
        (
            {"packages": [], "source": {"uris": ["x"], "suites": ["trixie"], "components": [], "signing_key": ""}},
            ["nvidia_driver_source.suites is ['trixie'] with components []", "nvidia_driver_packages is empty"],
        ),
        ({"scope": "container"}, ["nvidia_driver_host_version is empty"]),
        ({"scope": "container", "host_version": OLD}, []),
        ({"scope": "container", "host_version": "535.216.03-1ubuntu1"}, []),
        ({"scope": "container", "host_version": "535.216.08-1"}, ["the host has 535.216.08-1"]),
        ({"module": "535.216.03"}, []),
        ({"module": "535.216.08"}, ["the loaded kernel module is 535.216.08"]),
        ({"module": "535.216.08", "allow_module_mismatch": True}, []),
    ],
)
def test_problems_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], texts: list[str]
) -> None:
    found = driver(tmp_path, monkeypatch, **params).problems()
    assert len(found) == len(texts)
    for problem, text in zip(found, texts, strict=True):
        assert text in problem


def test_an_accepted_module_is_reported_and_asks_for_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = driver(tmp_path, monkeypatch, module="535.216.08", allow_module_mismatch=True)
    one.installed = {name: role.Installed(OLD, "s", "hold", "installed") for name in one.params["packages"]}
    assert one.problems() == []
    assert len(one.warnings) == 1
    facts = {"version": OLD, "module_version": "535.216.08", "reboot_required": True}
    assert one.facts == {"nvidia_driver": facts}


def test_facts_name_no_version_while_a_package_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = driver(tmp_path, monkeypatch)
    one.installed = {name: role.Installed(OLD, "s", "hold", "installed") for name in one.params["packages"]}
    assert one.facts["nvidia_driver"]["version"] == OLD
    one.installed["libcuda1"] = role.Installed(OLD, "s", "hold", "half-installed")
    assert one.facts["nvidia_driver"]["version"] == ""


def test_related_packages_follow_or_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that the new version lacks is obsolete: by its source, or because a manifest knows its version."""
    one = driver(tmp_path, monkeypatch)
    one.known = {NEW: role.Manifest(NEW, "amd64", ["libcompute-570"], ["drivers-570"])}
    one.installed = {
        "libcuda1": role.Installed(NEW, "nvidia-graphics-drivers", "hold", "installed"),
        "libdropped1": role.Installed(NEW, "nvidia-graphics-drivers", "hold", "installed"),
        "libcompute-570": role.Installed(NEW, "drivers-570", "hold", "installed"),
        "libc6": role.Installed("2", "glibc", "install", "installed"),
    }
    assert one.related(manifest(libcuda1=())) == ({"libcuda1"}, {"libdropped1", "libcompute-570"})


def test_prepare_from_a_sound_cache_asks_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = driver(tmp_path, monkeypatch, packages=["libcuda1"])
    cached = manifest(libcuda1=("glx",), glx=())
    cached.family = ["libcuda1"]
    for deb in cached.packages.values():
        (tmp_path / deb.file).write_bytes(b"deb")
    one.known = {OLD: cached}
    one.installed = {
        "libcuda1": role.Installed(NEW, "nvidia-graphics-drivers", "hold", "installed"),
        "glx": role.Installed("other", "glx-alternatives", "install", "installed"),
    }
    apt = SimpleNamespace(source=role.Source(("http://ftp.example.org/debian",), ("trixie",), ("non-free",)))
    plan = one.prepare(apt)
    assert set(plan.install) == {"libcuda1"}
    assert (plan.fetch, plan.obsolete, plan.unheld) == ({}, set(), {"libcuda1"})
    assert one.swaps(plan)
    assert one.words(plan) == [str(tmp_path / f"libcuda1_{OLD}_amd64.deb")]


def test_version_in_neither_cache_nor_source_is_refused_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = driver(tmp_path, monkeypatch, packages=["libcuda1"])
    one.known = {NEW: manifest(NEW, libcuda1=())}
    source = role.Source(("http://ftp.example.org/debian",), ("trixie",), ("non-free",))
    missing = (manifest(), {"libcuda1": [NEW, "550.163.01-2"]})
    apt = SimpleNamespace(source=source, complaint="", update=lambda: None, resolve=lambda *_: missing)
    with pytest.raises(role.DriverError) as error:
        one.prepare(apt)
    text = str(error.value)
    assert f"nvidia_driver_version is {OLD}" in text
    assert f"(http://ftp.example.org/debian) has libcuda1 in {NEW}, 550.163.01-2" in text
    assert f"the cache ({tmp_path}: {NEW})" in text
    assert "Choose one of these versions" in text


@pytest.mark.parametrize(
    ("name", "brings"),
    [
        ("nvidia-kernel-dkms", True), ("nvidia-dkms-580-open", True), ("dkms", True), ("nvidia-kernel-open-dkms", True),
        ("linux-modules-nvidia-580-generic", True), ("nvidia-kernel-source-580", True), ("nvidia-kernel-common", False),
        ("nvidia-kernel-support", False), ("libcuda1", False), ("nvidia-smi", False),
    ],
)  # fmt: skip
def test_parts_of_the_kernel_module_have_no_place_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, brings: bool
) -> None:
    plan = role.Plan(manifest(**{name: ()}), {name}, {}, set(), {}, set(), {})
    inside = driver(tmp_path, monkeypatch, scope="container", host_version=OLD).obstacles(plan)
    assert [name in problem for problem in inside] == ([True] if brings else [])
    assert driver(tmp_path, monkeypatch).obstacles(plan) == []
