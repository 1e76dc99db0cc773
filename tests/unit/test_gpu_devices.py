"""Numbers of device nodes are read, nodes are made, and rules follow what is there."""

import json
import os
import stat
from pathlib import Path

import pytest

from tests.unit.loading import load

tool = load("roles/gpu_devices/files/gpu_devices.py")

PROC_DEVICES = """Character devices:
  1 mem
195 nvidia-frontend
238 nvidia-caps
511 nvidia-uvm

Block devices:
195 not-this-one
259 blkext
"""


def test_majors_are_those_of_character_devices() -> None:
    assert tool.majors(PROC_DEVICES) == {"mem": 1, "nvidia-frontend": 195, "nvidia-caps": 238, "nvidia-uvm": 511}


def test_numbers_from_each_source(tmp_path: Path) -> None:
    (tmp_path / "sys/class/x/tap7").mkdir(parents=True)
    (tmp_path / "sys/class/x/tap7/dev").write_text("246:3\n")
    drivers = tool.majors(PROC_DEVICES)
    assert tool.resolve({"path": "/dev/a", "major": 195, "minor": 255}, {}) == tool.Numbers(195, 255)
    assert tool.resolve({"path": "/dev/b", "driver": "nvidia-uvm", "minor": 1}, drivers) == tool.Numbers(511, 1)
    assert tool.resolve({"path": "/dev/c", "sysfs": "/sys/class/x/tap*/dev"}, {}, tmp_path) == tool.Numbers(246, 3)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"path": "/dev/b", "driver": "nvidia-uvm", "minor": 0}, "/dev/b: driver nvidia-uvm has no major"),
        ({"path": "/dev/c", "sysfs": "/sys/none*/dev"}, "names 0 devices, not one"),
    ],
)
def test_missing_numbers_are_named(tmp_path: Path, node: dict[str, object], message: str) -> None:
    with pytest.raises(tool.DeviceError, match=message):
        tool.resolve(node, {}, tmp_path)


def test_a_node_takes_the_place_of_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "nvidia0"
    path.write_text("left by a bind mount without a source")
    assert tool.actual(path) is None
    tool.make(path, tool.Numbers(195, 0), 0o660)
    status = path.lstat()
    assert stat.S_ISCHR(status.st_mode)
    assert (os.major(status.st_rdev), os.minor(status.st_rdev)) == (195, 0)
    assert tool.actual(path) == (tool.Numbers(195, 0), 0o660)


def configure(folder: Path, nodes: list[dict[str, object]], devices: list[str]) -> Path:
    (folder / "guests").mkdir(exist_ok=True)
    (folder / "nodes.json").write_text(json.dumps({"wait_s": 0, "nodes": nodes}))
    include = folder / "devices.conf"
    (folder / "guests/ct1.json").write_text(json.dumps({"devices": devices, "include": str(include)}))
    return include


def test_rules_have_the_numbers_of_the_nodes_and_are_written_once(tmp_path: Path) -> None:
    node = tmp_path / "nvidia0"
    include = configure(tmp_path, [{"path": str(node), "major": 195, "minor": 0, "mode": "0666"}], [str(node)])
    first = tool.Plan(tmp_path)
    first.run(dry=False)
    assert len(first.changes) == 2
    assert include.read_text() == (
        f"lxc.cgroup2.devices.allow = c 195:0 rwm\nlxc.mount.entry = {node} {str(node)[1:]} none bind,create=file 0 0\n"
    )
    second = tool.Plan(tmp_path)
    second.run(dry=False)
    assert second.changes == []


def test_dry_run_changes_nothing(tmp_path: Path) -> None:
    node = tmp_path / "nvidia0"
    include = configure(tmp_path, [{"path": str(node), "major": 195, "minor": 0, "mode": "0666"}], ["/dev/null"])
    plan = tool.Plan(tmp_path)
    plan.run(dry=True)
    assert plan.changes == [f"{node}: character device 195:0, mode 0666", f"ct1: {include}"]
    assert not node.exists()
    assert not include.exists()


def test_without_its_device_a_container_has_no_rules_and_cannot_start(tmp_path: Path) -> None:
    include = configure(tmp_path, [], ["/dev/does-not-exist"])
    include.write_text("lxc.cgroup2.devices.allow = c 195:0 rwm\n")
    plan = tool.Plan(tmp_path)
    plan.run(dry=False)
    assert plan.errors == ["ct1: /dev/does-not-exist: not a character device on this host"]
    assert not include.exists()


def test_a_guest_whose_folder_is_gone_is_named_and_the_others_get_their_rules(tmp_path: Path) -> None:
    include = configure(tmp_path, [], ["/dev/null"])
    gone = {"devices": ["/dev/null"], "include": str(tmp_path / "gone/devices.conf")}
    (tmp_path / "guests/ct0.json").write_text(json.dumps(gone))
    plan = tool.Plan(tmp_path)
    plan.run(dry=False)
    (error,) = plan.errors
    assert error.startswith(
        f"ct0: {tmp_path}/gone/devices.conf: No such file or directory. Where the container is gone"
    )
    assert include.read_text().startswith("lxc.cgroup2.devices.allow = c 1:3 rwm\n")


def test_one_guest_can_be_chosen(tmp_path: Path) -> None:
    include = configure(tmp_path, [], ["/dev/null"])
    (tmp_path / "guests/ct0.json").write_text(json.dumps({"devices": ["/dev/none"], "include": str(tmp_path / "x")}))
    plan = tool.Plan(tmp_path, "ct1")
    plan.run(dry=False)
    assert plan.errors == []
    assert include.exists()


@pytest.mark.parametrize("text", ["no json", "{}", '{"devices": null, "include": "/x"}'])
def test_a_guests_file_that_cannot_be_read_is_named_and_the_others_get_their_rules(tmp_path: Path, text: str) -> None:
    include = configure(tmp_path, [], ["/dev/null"])
    (tmp_path / "guests/ct0.json").write_text(text)
    plan = tool.Plan(tmp_path)
    plan.run(dry=False)
    (error,) = plan.errors
    assert error.startswith(f"ct0: {tmp_path}/guests/ct0.json cannot be read")
    assert include.exists()


def test_a_node_that_cannot_be_made_is_named_and_guests_get_their_rules(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node = {"path": str(tmp_path / "file/nvidia0"), "major": 195, "minor": 0, "mode": "0666"}
    include = configure(tmp_path, [node], ["/dev/null"])
    plan = tool.Plan(tmp_path)
    plan.run(dry=False)
    assert plan.errors == [f"{tmp_path}/file/nvidia0: File exists"]
    assert include.exists()
