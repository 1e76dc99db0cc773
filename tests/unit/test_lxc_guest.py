"""One definition becomes the right configuration on both back ends, and bad definitions are refused in words."""

import contextlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loading import load

module = load("roles/lxc_container/library/lxc_guest.py")

GOOD: dict[str, Any] = {
    "vmid": 200,
    "name": "ct200",
    "template": "/t.tar.zst",
    "bridge": "vmbr0",
    "address": "192.0.2.200/24",
    "gateway": "192.0.2.1",
    "ssh_public_keys": ("ssh-ed25519 AAAA admin",),
    "devices": ("/dev/nvidia0", "/dev/nvidia-uvm"),
    "mounts": (module.Mount("/tank/models", "/models", True), module.Mount("/tank/work", "/work")),
}


def guest(**changes: Any) -> Any:
    return module.Guest(**(GOOD | changes))


def test_good_definition_has_no_problems() -> None:
    assert module.definition_problems(guest()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "CT_200"}, "lxc_container_name: 'CT_200' is not a host name"),
        ({"name": ".."}, "lxc_container_name: '..' is not a host name"),
        ({"vmid": 99}, "lxc_container_vmid: 99 is below 100"),
        ({"memory_mib": -1}, "lxc_container_memory_mib: -1 is too small"),
        ({"swap_mib": -1}, "lxc_container_swap_mib: -1 is too small"),
        ({"cores": -2}, "lxc_container_cores: -2 is too small"),
        ({"rootfs_size_gib": 0}, "lxc_container_rootfs_size_gib: 0 is too small"),
        ({"mounts": (module.Mount("models", "/m"),)}, "lxc_container_mounts: source 'models' is not an absolute path"),
        ({"mounts": (module.Mount("/models", "m"),)}, "lxc_container_mounts: target 'm' is not an absolute path"),
        ({"address": "192.0.2.200"}, "has no prefix length. Write it as 192.0.2.200/24."),
        ({"address": "192.0.2.300/24"}, "lxc_container_address: '192.0.2.300/24' does not appear to be"),
        ({"gateway": "198.51.100.1"}, "198.51.100.1 is not in 192.0.2.0/24"),
        ({"ssh_public_keys": ()}, "lxc_container_ssh_public_keys: empty, nobody could log in"),
        ({"ssh_public_keys": ("-----BEGIN OPENSSH PRIVATE KEY-----",)}, "is not a public key. Give the text of a .pub"),
    ],
)
def test_bad_definition_is_named_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    (problem,) = module.definition_problems(guest(**changes))
    assert message in problem


def lines(**changes: Any) -> list[str]:
    return list(module.lxc_config(guest(**changes), Path("/var/lib/lxc/ct200")).splitlines())


def test_includes_come_in_the_order_that_keeps_the_allow_list() -> None:
    found = [line for line in lines() if line.startswith("lxc.include")]
    assert found == [
        "lxc.include = /usr/share/lxc/config/userns.conf",
        "lxc.include = /usr/share/lxc/config/common.conf",
        "lxc.include = /var/lib/lxc/ct200/devices.conf",
    ]
    assert lines()[-1] == "lxc.start.auto = 1"


def test_privileged_container_maps_no_ids() -> None:
    assert not [line for line in lines(privileged=True) if "idmap" in line or "userns" in line]
    assert "lxc.idmap = u 0 100000 65536" in lines()


def test_limits_are_those_of_cgroup2() -> None:
    found = lines(cores=8, memory_mib=65536, swap_mib=512)
    assert "lxc.cgroup2.cpu.max = 800000 100000" in found
    assert "lxc.cgroup2.memory.max = 65536M" in found
    assert "lxc.cgroup2.memory.swap.max = 512M" in found
    assert not [line for line in lines() if "memory" in line or "cpu.max" in line]


def test_mounts_of_plain_lxc() -> None:
    found = [line for line in lines() if line.startswith("lxc.mount.entry")]
    assert found == [
        "lxc.mount.entry = /tank/models models none bind,create=dir,ro 0 0",
        "lxc.mount.entry = /tank/work work none bind,create=dir 0 0",
    ]


def test_hardware_address_is_local_and_stable() -> None:
    assert guest().hwaddr == guest(vmid=201).hwaddr
    assert guest().hwaddr != guest(name="ct201").hwaddr
    assert guest().hwaddr.startswith("02:")
    assert len(guest().hwaddr) == 17


def test_options_for_proxmox() -> None:
    options = module.pct_options(guest(memory_mib=4096, cores=2, nesting=True), {})
    assert options == {
        "hostname": "ct200",
        "memory": "4096",
        "swap": "0",
        "cores": "2",
        "nameserver": None,
        "onboot": "1",
        "features": "nesting=1",
        "net0": f"hwaddr={guest().hwaddr.upper()},name=eth0,bridge=vmbr0,ip=192.0.2.200/24,type=veth,gw=192.0.2.1",
        "dev0": "/dev/nvidia0,mode=0666",
        "dev1": "/dev/nvidia-uvm,mode=0666",
        "mp0": "/tank/models,mp=/models,ro=1",
        "mp1": "/tank/work,mp=/work",
    }


HAND_MADE = {
    "arch": "amd64",
    "cores": "8",
    "dev1": "mode=0660,/dev/nvidia-uvm",
    "dev4": "/dev/dri/card0",
    "features": "keyctl=1,nesting=1",
    "hostname": "ct200",
    "memory": "512",
    "mp0": "local-lvm:vm-200-disk-1,mp=/data,backup=1",
    "mp2": "/tank/models,mp=/models,backup=1",
    "mp3": "/old,mp=/old",
    "nameserver": "192.0.2.53",
    "net0": "name=eth0,bridge=vmbr1,firewall=1,hwaddr=BC:24:11:AA:BB:CC,ip=192.0.2.9/24,tag=7,type=veth,gw=192.0.2.1",
    "onboot": "1",
    "swap": "0",
}
"""A container that an operator made with pct before the role came."""


def test_adopted_container_keeps_what_the_definition_does_not_say() -> None:
    changed, stale = module.pct_changes(HAND_MADE, module.pct_options(guest(gateway="", memory_mib=512), HAND_MADE))
    assert changed == {
        "dev0": "/dev/nvidia0,mode=0666",
        "dev1": "/dev/nvidia-uvm,mode=0666",
        "features": "keyctl=1",
        "mp1": "/tank/work,mp=/work",
        "mp2": "/tank/models,mp=/models,backup=1,ro=1",
        "net0": "hwaddr=BC:24:11:AA:BB:CC,name=eth0,bridge=vmbr0,firewall=1,ip=192.0.2.200/24,tag=7,type=veth",
    }
    assert stale == ["cores", "dev4", "mp3", "nameserver"]


def test_adopted_container_is_settled_after_its_changes() -> None:
    definition = guest(memory_mib=512, nameservers=("192.0.2.53",), cores=8)
    changed, stale = module.pct_changes(HAND_MADE, module.pct_options(definition, HAND_MADE))
    after = {key: value for key, value in (HAND_MADE | changed).items() if key not in stale}
    assert module.pct_changes(after, module.pct_options(definition, after)) == ({}, [])


def test_limits_that_are_unset_go_away_on_proxmox() -> None:
    before = {
        key: str(value) for key, value in module.pct_options(guest(cores=4, memory_mib=4096), {}).items() if value
    }
    changed, stale = module.pct_changes(before, module.pct_options(guest(), before))
    assert changed == {"memory": str(module.host_memory_mib())}
    assert stale == ["cores"]


def test_mount_in_the_place_of_a_volume_is_refused() -> None:
    (problem,) = module.volume_problems(guest(mounts=(module.Mount("/tank", "/data"),)), HAND_MADE)
    assert problem.startswith("lxc_container_mounts: /data is the volume local-lvm:vm-200-disk-1 of ct200")


PVE = """#comment of an operator
arch: amd64
dev0: mode=0666,/dev/nvidia0
dev2: /dev/nvidia7,mode=0666
hostname: ct200
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.apparmor.profile: unconfined
onboot: 1

[pve:pending]
memory: 4096

[before-upgrade]
hostname: old
memory: 512
"""


def test_only_the_main_section_and_what_is_pending_count() -> None:
    options = module.main_section(PVE)
    assert options["hostname"] == "ct200"
    assert options["memory"] == "4096"


def test_what_waits_for_its_removal_is_away() -> None:
    pending = PVE.replace("memory: 4096", "memory: 4096\ndelete: dev2,!onboot")
    assert {"dev2", "onboot", "delete"} & module.main_section(pending).keys() == set()


def test_order_of_parts_makes_no_difference() -> None:
    assert module.normal("name=eth0,bridge=vmbr0") == module.normal("bridge=vmbr0,name=eth0")
    assert module.normal("/dev/a,mode=0666") != module.normal("/dev/b,mode=0666")
    assert module.normal("volume=/a,mp=/b,ro=0") == module.normal("/a,mp=/b")


def test_raw_lines_about_gpus_are_found_in_the_main_section_and_no_others() -> None:
    text = PVE.replace("onboot: 1", "lxc.cgroup2.devices.allow: c 10:200 rwm\nlxc.cgroup.devices.allow: c 508:0 rwm")
    assert module.raw_device_lines(text + "lxc.cgroup2.devices.allow: c 195:* rwm\n", {195, 508}) == [
        "lxc.cgroup2.devices.allow: c 195:* rwm",
        "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file",
        "lxc.cgroup.devices.allow: c 508:0 rwm",
    ]


def test_majors_of_gpus_are_nvidias_and_those_of_the_devices() -> None:
    devices = "Character devices:\n  1 mem\n195 nvidia\n508 nvidia-uvm\n\nBlock devices:\n259 nvidia-no\n"
    assert module.gpu_majors(["/dev/null", "/dev/none"], devices) == {1, 195, 508}


def test_only_what_shapes_a_running_container_asks_for_a_restart() -> None:
    before, after = lines(), lines(autostart=False)
    assert before != after
    assert module.effective_lines("\n".join(before)) == module.effective_lines("\n".join(after))
    assert module.effective_lines("\n".join(before)) != module.effective_lines("\n".join(lines(gateway="")))


@pytest.mark.parametrize(
    ("template", "program"), [("a.tar.zst", "zstd"), ("a.tar.gz", "gzip"), ("a.tgz", "gzip"), ("a.tar.xz", "xz")]
)
def test_template_is_decompressed_by_its_name(template: str, program: str) -> None:
    assert module.decompressor(template) == program


def test_unknown_template_is_refused() -> None:
    with pytest.raises(module.GuestError, match=r"lxc_container_template: a\.zip ends in none of"):
        module.decompressor("a.zip")


@pytest.fixture
def plain(tmp_path: Path) -> Any:
    """A plain LXC host with two containers."""
    for name, vmid, address in (("ct200", 200, "192.0.2.200"), ("ct201", 201, "192.0.2.201")):
        (tmp_path / name / "rootfs").mkdir(parents=True)
        text = module.lxc_config(guest(name=name, vmid=vmid, address=f"{address}/24"), tmp_path / name)
        (tmp_path / name / "config").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vmid": 201}, "lxc_container_vmid: 201 is used by ct201 on this host. Choose a free one."),
        ({"vmid": 300}, "and has vmid 200, not 300. Correct the name or the vmid, or rename that container."),
        ({"address": "192.0.2.201/24"}, "lxc_container_address: 192.0.2.201/24 is ct201's on this host."),
        ({"privileged": True}, "lxc_container_privileged: True, but ct200 was made with False"),
        ({"devices": ("/dev/nvidia9",)}, "lxc_container_devices: /dev/nvidia9 is not a character device on this host"),
        ({"mounts": (module.Mount("/none", "/n"),)}, "lxc_container_mounts: /none does not exist on this host"),
        ({"bridge": "vmbr9"}, "lxc_container_bridge: 'vmbr9' is not a bridge of this host"),
        ({"memory_mib": 10**9}, "lxc_container_memory_mib: 1000000000 is more than the host's"),
    ],
)
def test_conflicts_on_the_host_are_named(plain: Path, changes: dict[str, Any], message: str) -> None:
    definition = guest(**{"devices": (), "mounts": (), "bridge": "", **changes})
    problems = module.Lxc(definition, True, plain).problems()
    assert [problem for problem in problems if message in problem], problems


class Fake:
    """Programs of a host: what was run, and which container runs; a start fails while `broken` is in its file."""

    def __init__(self, config: Path) -> None:
        """Let the container have this configuration file."""
        self.config = config
        self.calls: list[str] = []
        self.running = False

    def set(self, options: dict[str, str]) -> None:
        """Set options in the main section, or for the next start while it runs."""
        if self.running:
            lines = "".join(f"{key}: {value}\n" for key, value in options.items())
            self.config.write_text(f"{self.config.read_text()}\n{module.PENDING}\n{lines}")
            return
        text = self.config.read_text()
        for key, value in options.items():
            text = re.sub(rf"(?m)^{key}: .*$", f"{key}: {value}", text)
        self.config.write_text(text)

    def start(self) -> None:
        """Start it with what is set."""
        text, _, pending = self.config.read_text().partition(f"\n{module.PENDING}\n")
        self.config.write_text(text)
        self.set(dict(line.split(": ", 1) for line in pending.splitlines()))
        if "broken" in self.config.read_text():
            raise module.GuestError("the container did not start")
        (self.config.parent / "started").write_text(self.config.read_text())
        self.running = True

    def run(self, argv: list[str], check: bool = True) -> Any:
        """Do what the program would do."""
        assert check or argv[0] in ("lxc-info", "ip")
        self.calls.append(" ".join(argv))
        output = ""
        if argv[0] == "lxc-info":
            output = "1" if "-pH" in argv else "RUNNING" if self.running else "STOPPED"
        elif argv[:2] == ["pct", "status"]:
            output = "status: running" if self.running else "status: stopped"
        elif argv[0] == "lxc-start" or argv[:2] == ["pct", "start"]:
            self.start()
        elif argv[0] == "lxc-stop" or argv[:2] == ["pct", "shutdown"]:
            self.running = False
        elif argv[:2] == ["pct", "set"]:
            self.set({key.removeprefix("--"): value for key, value in zip(argv[3::2], argv[4::2], strict=True)})
        return subprocess.CompletedProcess(argv, 0, output, "")


@pytest.fixture(params=["lxc", "pct"])
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with the container ct200, and a way to name a definition of its back end."""
    monkeypatch.setattr(module, "GUESTS", tmp_path / "guests")
    monkeypatch.setattr(module, "FORMER", tmp_path / "former")
    monkeypatch.setattr(module, "PVE_CONFIG", tmp_path / "pve")
    monkeypatch.setattr(module.Backend, "problems", lambda self: self.owner_problems())
    monkeypatch.setattr(module.Backend, "host_keys", lambda _: [])
    plain = {"devices": (), "mounts": ()}

    def backend(**changes: Any) -> Any:
        definition = guest(**plain | changes)
        made = module.Pct(definition, False) if request.param == "pct" else module.Lxc(definition, False, tmp_path)
        monkeypatch.setattr(module, "run", fake.run)
        monkeypatch.setattr(module, "exclusive", lambda _: contextlib.nullcontext())
        return made

    config = tmp_path / "pve/200.conf" if request.param == "pct" else tmp_path / "ct200/config"
    fake = Fake(config)
    (tmp_path / "ct200/rootfs").mkdir(parents=True)
    (tmp_path / "ct200/started").touch()
    config.parent.mkdir(exist_ok=True)
    if request.param == "pct":
        options = {"unprivileged": "1", **module.pct_options(guest(**plain), {})}
        config.write_text("".join(f"{key}: {value}\n" for key, value in options.items() if value is not None))
    else:
        config.write_text(module.lxc_config(guest(**plain), tmp_path / "ct200"))
    return backend, fake


@pytest.mark.parametrize("state", ["checked", "present", "started", "restarted", "stopped", "absent"])
@pytest.mark.parametrize(
    "changes", [{"name": ".."}, {"name": ""}, {"name": "../ct200"}, {"vmid": 5}], ids=["dots", "empty", "path", "vmid"]
)
def test_name_and_number_are_checked_in_every_state(host: Any, state: str, changes: dict[str, Any]) -> None:
    backend, fake = host
    with pytest.raises(module.GuestError, match="nothing was changed:\n- lxc_container_"):
        module.converge(backend(**changes), state)
    assert fake.calls == []


@pytest.mark.parametrize("state", ["checked", "present", "started", "restarted", "stopped", "absent"])
def test_container_of_another_maker_is_never_touched(host: Any, state: str) -> None:
    backend, fake = host
    text = fake.config.read_text().replace(module.MARK, "# Mine.").replace("hostname: ct200", "hostname: mine")
    fake.config.write_text(text)
    fake.running = True
    with pytest.raises(module.GuestError, match=r"was not made by this role|is used by mine on this host"):
        module.converge(backend(), state)
    assert fake.running
    assert fake.config.read_text() == text


def test_container_that_does_not_start_with_a_new_configuration_runs_with_the_former(host: Any) -> None:
    backend, fake = host
    module.converge(backend(), "started")
    before = fake.config.read_text()
    module.converge(backend(bridge="broken"), "present")
    assert fake.config.read_text() != before
    with pytest.raises(module.GuestError, match="it runs with its former configuration again"):
        module.converge(backend(bridge="broken"), "restarted")
    assert fake.running
    assert fake.config.read_text() == before
    assert backend().former() == {}


def test_new_configuration_that_starts_is_the_next_way_back(host: Any) -> None:
    backend, fake = host
    module.converge(backend(), "started")
    module.converge(backend(bridge="vmbr1"), "present")
    assert backend().former()
    module.converge(backend(bridge="vmbr1"), "restarted")
    assert backend().former() == {}
    assert "vmbr1" in fake.config.read_text()


def test_raw_lines_go_and_ask_for_a_restart_until_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path / "200.conf")
    monkeypatch.setattr(module, "run", fake.run)
    monkeypatch.setattr(module, "PVE_CONFIG", tmp_path)
    monkeypatch.setattr(module, "FORMER", tmp_path / "former")
    monkeypatch.setattr(module, "exclusive", lambda _: contextlib.nullcontext())
    definition = guest(devices=(), mounts=())
    options = {key: value for key, value in module.pct_options(definition, {}).items() if value is not None}
    settled = "".join(f"{key}: {value}\n" for key, value in options.items())
    fake.config.write_text(f"{settled}lxc.cgroup2.devices.allow: c 195:* rwm\n\n[old]\nhostname: x\n")
    fake.running = True
    backend = module.Pct(definition, False)
    assert backend.configure()
    assert (backend.before, backend.after) == ("lxc.cgroup2.devices.allow: c 195:* rwm\n", "")
    assert fake.config.read_text() == f"{settled}\n[old]\nhostname: x\n"
    assert module.Pct(guest(devices=(), mounts=()), False).stale()
    backend.proved()
    assert not backend.stale()


def test_raw_lines_stay_where_the_options_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(argv: list[str], check: bool = True) -> Any:
        raise module.GuestError(f"{argv[0]} {check}")

    monkeypatch.setattr(module, "run", fails)
    monkeypatch.setattr(module, "PVE_CONFIG", tmp_path)
    monkeypatch.setattr(module, "FORMER", tmp_path / "former")
    (tmp_path / "200.conf").write_text(PVE)
    with pytest.raises(module.GuestError):
        module.Pct(guest(devices=(), mounts=()), False).configure()
    assert (tmp_path / "200.conf").read_text() == PVE


def test_partial_container_of_this_role_can_be_removed_and_another_folder_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GUESTS", tmp_path / "guests")
    fake = Fake(tmp_path / "ct200/config")
    monkeypatch.setattr(module, "run", fake.run)
    (tmp_path / "ct200/rootfs.partial").mkdir(parents=True)
    backend = module.Lxc(guest(), False, tmp_path)
    with pytest.raises(module.GuestError, match="was not made by this role"):
        module.converge(backend, "absent")
    fake.config.write_text(f"{module.MARK}\n# vmid: 200\n")
    assert module.converge(backend, "absent")["changed"]
    assert not (tmp_path / "ct200").exists()
    assert not module.converge(backend, "absent")["changed"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            '{"changes": [], "errors": ["ct200: /dev/a: not a character device on this host"]}',
            "/dev/a: not a character",
        ),
        ("Traceback", "gpu-devices: it broke"),
    ],
)
def test_rules_that_cannot_be_made_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, message: str
) -> None:
    monkeypatch.setattr(module, "GUESTS", tmp_path)
    monkeypatch.setattr(module, "run", lambda *_: subprocess.CompletedProcess([], 1, answer, "it broke"))
    (tmp_path / "ct200.json").touch()
    with pytest.raises(module.GuestError, match=message):
        module.Lxc(guest(), False, tmp_path)._make_rules()


def test_fault_of_another_node_does_not_concern_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"changes": ["ct200: /x"], "errors": ["/dev/nvidia7: driver nvidia has no major"]}'
    monkeypatch.setattr(module, "GUESTS", tmp_path)
    monkeypatch.setattr(module, "run", lambda *_: subprocess.CompletedProcess([], 1, answer, ""))
    (tmp_path / "ct200.json").touch()
    assert module.Lxc(guest(), False, tmp_path)._make_rules()


def test_rules_of_a_container_whose_folder_is_gone_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GUESTS", tmp_path)
    (tmp_path / "ct200.json").write_text("{}")
    assert module.converge(module.Lxc(guest(), False, tmp_path / "lxc"), "absent")["changed"]
    assert not (tmp_path / "ct200.json").exists()


def test_dry_run_makes_no_host_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = Fake(tmp_path / "config")
    monkeypatch.setattr(module, "run", fake.run)
    module.Lxc(guest(), True, tmp_path).host_keys()
    assert not [call for call in fake.calls if "ssh-keygen" in call]
    module.Lxc(guest(), False, tmp_path).host_keys()
    assert [call for call in fake.calls if "ssh-keygen -A" in call]


@pytest.mark.parametrize("present", [False, True])
def test_ssh_is_started_again_where_host_keys_had_to_be_made(tmp_path: Path, present: bool) -> None:
    keys, calls = tmp_path / "ssh", tmp_path / "calls"
    keys.mkdir()
    if present:
        (keys / "ssh_host_ed25519_key").write_text("key")
    for program, code in (("ssh-keygen", 0), ("systemctl", 1)):
        stub = tmp_path / program
        stub.write_text(f'#!/bin/sh\necho "{program} $*" >>{calls}\nexit {code}\n')
        stub.chmod(0o755)
    script = module.MAKE_HOST_KEYS.replace("/etc/ssh", str(keys))
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run(["/bin/sh", "-c", script], check=True, env={"PATH": path})
    made = ["ssh-keygen -A", "systemctl reset-failed ssh.service", "systemctl --no-block restart ssh.service"]
    assert (calls.read_text().splitlines() if calls.exists() else []) == ([] if present else made)


def test_another_run_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    refused = pytest.raises(module.GuestError, match="another run has been at work")
    with module.exclusive(tmp_path / "lock"), refused, module.exclusive(tmp_path / "lock"):
        pass
