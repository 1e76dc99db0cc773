"""Nodes are made by their unit when something differs, and a list that cannot work is refused in words."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loading import ROOT, load

module = load("roles/gpu_devices/library/gpu_nodes.py")
PROGRAM = (ROOT / "roles/gpu_devices/files/gpu_devices.py").read_text()
UNIT = "[Service]\n"


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"minor": 0}, "(/dev/a): has none of sysfs, driver and major. Give one of them."),
        ({"major": 195, "driver": "nvidia", "minor": 0}, "(/dev/a): has driver and major of sysfs, driver and major"),
        ({"sysfs": "/sys/x", "major": 1, "minor": 0}, "(/dev/a): has sysfs and major of sysfs, driver and major"),
        ({"major": 195}, "(/dev/a): has no minor, which major needs. Give it."),
        ({"driver": "nvidia-uvm"}, "(/dev/a): has no minor, which driver needs. Give it."),
        ({"major": 195, "minor": 0, "path": "/tmp/a"}, "(/tmp/a): is not below /dev. Correct the path."),
        ({"major": 195, "minor": 0, "mode": "rw"}, "mode 'rw' is not octal. Write it as \"0666\"."),
    ],
)
def test_node_that_cannot_be_made_is_named(node: dict[str, Any], message: str) -> None:
    (problem,) = module.problems([{"path": "/dev/a"} | node])
    assert problem.startswith("gpu_devices_nodes[0] ")
    assert message in problem


def test_node_that_is_there_twice_is_named() -> None:
    node = {"path": "/dev/a", "major": 195, "minor": 0}
    assert module.problems([node, node]) == ["gpu_devices_nodes: /dev/a is there twice. Take one out."]


def test_good_nodes_have_no_problem() -> None:
    nodes = [
        {"path": "/dev/a", "major": 195, "minor": 0, "driver": None},
        {"path": "/dev/b", "driver": "nvidia-uvm", "minor": 0, "mode": "0660"},
        {"path": "/dev/c", "sysfs": "/sys/c"},
    ]
    assert module.problems(nodes) == []


def test_order_of_keys_makes_no_difference() -> None:
    node = {"path": "/dev/a", "major": 195, "minor": 0}
    assert module.configuration([node], 5) == module.configuration([dict(reversed(node.items()))], 5)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Let everything be in a temporary folder, and note what systemctl was told; a unit that ran is active."""
    found: list[tuple[str, ...]] = []

    def systemctl(*words: str) -> subprocess.CompletedProcess[str]:
        queries = {"is-active": "restart", "is-enabled": "enable"}
        if words[0] in queries:
            done = [call for call in found if call[0] in (queries[words[0]], "disable")]
            return subprocess.CompletedProcess(words, int(not done or done[-1][0] == "disable"), "", "")
        found.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(module, "CONFIG", tmp_path / "etc")
    monkeypatch.setattr(module, "PROGRAM", tmp_path / "program")
    monkeypatch.setattr(module, "UNIT", tmp_path / "unit")
    monkeypatch.setattr(module, "systemctl", systemctl)
    return found


def nodes(path: Path, dry: bool = False, unit: str = UNIT) -> Any:
    return module.Nodes([{"path": str(path), "major": 1, "minor": 3}], 5, PROGRAM, unit, dry)


def test_first_run_installs_and_starts_and_the_second_changes_nothing(calls: list[tuple[str, ...]]) -> None:
    node = Path("/dev/null")
    first = nodes(node)
    assert first.present()
    assert calls == [("daemon-reload",), ("enable", module.NAME), ("restart", module.NAME)]
    assert module.PROGRAM.stat().st_mode & 0o777 == 0o755
    assert first.asked.changes == []
    calls_before = list(calls)
    assert not nodes(node).present()
    assert calls == calls_before


def test_dry_run_on_a_bare_host_knows_the_nodes_to_come(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    run = nodes(tmp_path / "nvidia0", dry=True)
    assert run.present()
    assert run.asked.changes == [f"{tmp_path}/nvidia0: character device 1:3, mode 0666"]
    assert {one["after_header"] for one in run.diff} == {
        "device nodes", str(module.PROGRAM), str(module.CONFIG / "nodes.json"), str(module.UNIT),
    }  # fmt: skip
    assert calls == []
    assert not module.PROGRAM.exists()


def test_node_that_vanished_is_made_again(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    nodes(Path("/dev/null")).present()
    calls.append(("restart",))
    run = nodes(tmp_path / "gone")
    module.write(module.CONFIG / "nodes.json", *run.files[module.CONFIG / "nodes.json"])
    calls_before = len(calls)
    assert run.present()
    assert calls[calls_before:] == [("enable", module.NAME), ("restart", module.NAME)]


def test_another_unit_is_read_anew(calls: list[tuple[str, ...]]) -> None:
    nodes(Path("/dev/null")).present()
    calls_before = len(calls)
    assert nodes(Path("/dev/null"), unit="[Unit]\n").present()
    assert calls[calls_before:] == [("daemon-reload",), ("enable", module.NAME), ("restart", module.NAME)]


def test_absent_takes_everything_away_once(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    node = tmp_path / "nvidia0"
    nodes(Path("/dev/null")).present()
    node.touch()
    assert nodes(node, dry=True).absent()
    assert node.exists()
    assert nodes(node).absent()
    assert [path.name for path in tmp_path.iterdir()] == []
    assert not nodes(node).absent()
    assert ("disable", "--now", module.NAME) in calls


def test_program_that_does_not_answer_is_named() -> None:
    with pytest.raises(module.NodesError, match=r"(?s)gpu-devices --check: .*SyntaxError"):
        module.ask("this is no program", [])
