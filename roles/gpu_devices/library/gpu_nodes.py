#!/usr/bin/python3
"""Ansible module: a host's GPU device nodes, now and at each boot before its containers start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: gpu_nodes
short_description: GPU device nodes of a host, made by a boot unit
description:
  - Installs the program that makes the nodes, its list of nodes and its unit, and lets the unit run where something
    differs. What would change is asked of the program itself, so a dry run knows it on a bare host too.
options:
  state: {type: str, default: present, choices: [checked, present, absent], description: V(checked) changes nothing.}
  nodes: {type: list, elements: dict, default: [], description: The nodes, as in the role's argument_specs.}
  wait_s: {type: int, default: 30, description: Seconds that the unit waits for drivers at boot.}
  program: {type: str, default: "", description: Text of the program.}
  unit: {type: str, default: "", description: Text of the unit.}
author: [maintainers]
"""

EXAMPLES = r"""
- name: NVIDIA's first card
  gpu_nodes:
    nodes:
      - {path: /dev/nvidia0, major: 195, minor: 0}
      - {path: /dev/nvidia-uvm, driver: nvidia-uvm, minor: 0}
    program: "{{ lookup('ansible.builtin.file', 'gpu_devices.py') }}"
    unit: "{{ lookup('ansible.builtin.template', 'gpu-devices.service.j2') }}"
"""

RETURN = r"""
nodes: {type: list, elements: str, returned: when present, description: Nodes and rules that differed.}
"""

CONFIG = Path("/etc/gpu-devices")
PROGRAM = Path("/usr/local/sbin/gpu-devices")
NAME = "gpu-devices.service"
UNIT = Path("/etc/systemd/system") / NAME
JOURNAL_LINES = 10


class NodesError(Exception):
    """Nodes that cannot be made; the text says which and why."""


@dataclass(frozen=True)
class Asked:
    """What the program says about a list of nodes: what it would change, and what stands in its way."""

    changes: list[str]
    errors: list[str]


def problems(nodes: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a list of nodes."""
    found = []
    for index, node in enumerate(nodes):
        where = f"gpu_devices_nodes[{index}] ({node['path']})"
        sources = [name for name in ("sysfs", "driver", "major") if node.get(name) is not None]
        if len(sources) != 1:
            found.append(
                f"{where}: has {' and '.join(sources) or 'none'} of sysfs, driver and major. Give one of them."
            )
        elif sources != ["sysfs"] and node.get("minor") is None:
            found.append(f"{where}: has no minor, which {sources[0]} needs. Give it.")
        if not str(node["path"]).startswith("/dev/"):
            found.append(f"{where}: is not below /dev. Correct the path.")
        if not re.fullmatch(r"0?[0-7]{3}", str(node.get("mode") or "0666")):
            found.append(f'{where}: mode {node["mode"]!r} is not octal. Write it as "0666".')
    paths = [node["path"] for node in nodes]
    found += [
        f"gpu_devices_nodes: {path} is there twice. Take one out."
        for path in sorted({p for p in paths if paths.count(p) > 1})
    ]
    return found


def configuration(nodes: list[dict[str, Any]], wait_s: int) -> str:
    """Return the program's list of nodes as JSON."""
    given = [{key: value for key, value in node.items() if value is not None} for node in nodes]
    wanted = {"wait_s": wait_s, "nodes": [{"mode": "0666", **node} for node in given]}
    return json.dumps(wanted, indent=1, sort_keys=True) + "\n"


def systemctl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run systemctl."""
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)


def text_of(path: Path) -> str:
    """Return a file's text, empty where there is none."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def write(path: Path, text: str, mode: int) -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        new.chmod(mode)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def ask(program: str, nodes: list[dict[str, Any]]) -> Asked:
    """Ask the program what differs from a list of nodes, before either is installed.

    Raises:
        NodesError: it gave no answer.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "gpu_devices.py").write_text(program)
        (folder / "nodes.json").write_text(configuration(nodes, 0))
        (folder / "guests").symlink_to(CONFIG / "guests")
        words = [sys.executable, str(folder / "gpu_devices.py"), "--check", "--config", name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        return Asked(**json.loads(done.stdout))
    except (ValueError, TypeError) as error:
        raise NodesError(f"gpu-devices --check: {done.stderr.strip()[-500:]}") from error


class Nodes:
    """The nodes of this host, with all that makes them."""

    def __init__(self, nodes: list[dict[str, Any]], wait_s: int, program: str, unit: str, dry: bool) -> None:
        """Work towards these nodes; with `dry` nothing is changed."""
        self.nodes, self.program, self.dry = nodes, program, dry
        self.files = {
            PROGRAM: (program, 0o755),
            CONFIG / "nodes.json": (configuration(nodes, wait_s), 0o644),
            UNIT: (unit, 0o644),
        }
        self.diff: list[dict[str, str]] = []
        self.asked = Asked([], [])

    def present(self) -> bool:
        """Bring everything to the definition and tell whether something differed.

        Raises:
            NodesError: the nodes cannot be made.
        """
        differing = [path for path, (text, mode) in self.files.items() if self.differs(path, text, mode)]
        self.asked = ask(self.program, self.nodes)
        stale = bool(differing or self.asked.changes or self.asked.errors) or not self.is_("active")
        changed = stale or not self.is_("enabled")
        for path in differing:
            self.note(str(path), text_of(path), self.files[path][0])
        self.note("device nodes", "", "".join(f"{line}\n" for line in self.asked.changes))
        if self.dry:
            return changed
        (CONFIG / "guests").mkdir(parents=True, exist_ok=True)
        for path in differing:
            write(path, *self.files[path])
        if UNIT in differing:
            systemctl("daemon-reload")
        if changed:
            systemctl("enable", NAME)
        if stale and systemctl("restart", NAME).returncode:
            words = ["journalctl", "--unit", NAME, "--lines", str(JOURNAL_LINES), "--output", "cat", "--no-pager"]
            journal = subprocess.run(words, capture_output=True, text=True, check=False).stdout
            raise NodesError(
                "gpu_devices_nodes: the nodes cannot be made. Load what is missing (gpu_devices_modules), or correct "
                f"the node. The journal of {NAME} ends:\n{journal}"
            )
        return changed

    def absent(self) -> bool:
        """Take everything away and tell whether something was there."""
        paths = [*self.files, CONFIG, *(Path(node["path"]) for node in self.nodes)]
        there = [path for path in paths if path.exists() or path.is_symlink()]
        for path in there:
            self.note(str(path), "present\n", "")
        if self.dry or not there:
            return bool(there)
        systemctl("disable", "--now", NAME)
        for path in there:
            if path == CONFIG:
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        systemctl("daemon-reload")
        systemctl("reset-failed", NAME)
        return True

    def differs(self, path: Path, text: str, mode: int) -> bool:
        """Tell whether a file is not as it should be."""
        return text_of(path) != text or path.stat().st_mode & 0o777 != mode

    def is_(self, what: str) -> bool:
        """Tell whether the unit is active, or enabled."""
        return systemctl(f"is-{what}", "--quiet", NAME).returncode == 0

    def note(self, what: str, before: str, after: str) -> None:
        """Add to the diff what changes."""
        if before != after:
            self.diff.append({"before_header": what, "after_header": what, "before": before, "after": after})


def main() -> None:
    """Run the module."""
    node = {
        "path": {"type": "path", "required": True},
        "mode": {"type": "str", "default": "0666"},
        "major": {"type": "int"},
        "driver": {"type": "str"},
        "sysfs": {"type": "str"},
        "minor": {"type": "int"},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["checked", "present", "absent"]},
            "nodes": {"type": "list", "elements": "dict", "default": [], "options": node},
            "wait_s": {"type": "int", "default": 30},
            "program": {"type": "str", "default": ""},
            "unit": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    values = module.params
    state = values["state"]
    found = problems(values["nodes"])
    if found:
        module.fail_json(msg="nothing was changed:\n" + "\n".join(f"- {line}" for line in found))
    nodes = Nodes(values["nodes"], values["wait_s"], values["program"], values["unit"], module.check_mode)
    try:
        changed = state != "checked" and (nodes.present() if state == "present" else nodes.absent())
    except (NodesError, OSError) as error:
        module.fail_json(msg=f"{os.uname().nodename}: {error}")
    for text in nodes.asked.errors if module.check_mode else []:
        module.warn(
            f"gpu-devices: {text}; a real run loads gpu_devices_modules first and fails where that does not help"
        )
    module.exit_json(changed=changed, nodes=nodes.asked.changes, diff=nodes.diff)


if __name__ == "__main__":
    main()
