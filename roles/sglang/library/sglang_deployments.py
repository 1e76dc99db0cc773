#!/usr/bin/python3
"""Ansible module: SGLang servers as systemd units, changed only to what works and put back where it does not."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: sglang_deployments
short_description: SGLang servers as systemd units, with a check before and a way back
description:
  - Each deployment is an instance of C(sglang@.service). Its flags are compared with those that its own SGLang knows
    before a running service is touched. A changed deployment is restarted once; where the new form does not become
    healthy, the former one is put back and started, and the module fails.
  - Deployments that are no longer named are stopped and taken away.
options:
  state: {type: str, default: present, choices: [checked, present, absent], description: V(checked) changes nothing.}
  deployments: {type: list, elements: dict, default: [], description: The deployments, as in the role's argument_specs.}
  user: {type: str, default: sglang, description: System user that runs the servers.}
  venv: {type: path, default: /opt/venvs/sglang/current, description: Environment of deployments that name none.}
  unit: {type: str, default: "", description: Text of C(sglang@.service).}
author: [maintainers]
"""

EXAMPLES = r"""
- name: One server
  sglang_deployments:
    unit: "{{ lookup('ansible.builtin.template', 'sglang@.service.j2') }}"
    deployments:
      - name: main
        model_path: /models/qwen
        port: 30000
        gpus: [0, 1]
        arguments: {tp-size: 2}
"""

RETURN = r"""
restarted: {type: list, elements: str, returned: always, description: Deployments that were started or restarted.}
removed: {type: list, elements: str, returned: always, description: Deployments that were taken away.}
"""

UNITS = Path("/etc/systemd/system")
CONFIGS = Path("/etc/sglang")
CACHE = Path("/var/cache/sglang-flags")
OWNED = {
    "model-path": "model_path",
    "served-model-name": "served_model_name",
    "host": "host",
    "port": "port",
    "api-key": "api_key",
    "enable-metrics": "metrics",
    "config": "arguments",
}
"""Flags that have a variable of their own."""

LIST_FLAGS = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("FLAGS " + json.dumps({
    option.removeprefix("--"): [str(choice) for choice in action.choices or []]
    for action in parser._actions for option in action.option_strings if option.startswith("--")
}))
"""

JOURNAL_LINES = 25


class DeploymentError(Exception):
    """A deployment that cannot be made as defined, or that did not come up; the text says why."""


@dataclass(frozen=True)
class Deployment:
    """One server; the fields are described in the role's argument_specs."""

    name: str
    model_path: str
    port: int
    served_model_name: str = ""
    host: str = "0.0.0.0"  # noqa: S104
    gpus: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    api_key: str = ""
    metrics: bool = True
    venv: str = ""
    start_timeout_s: int = 900

    @property
    def unit(self) -> str:
        """Name of its unit."""
        return f"sglang@{self.name}.service"

    @property
    def dropin(self) -> Path:
        """File with its environment and command."""
        return UNITS / f"{self.unit}.d" / "deployment.conf"

    @property
    def config(self) -> Path:
        """File that only the service reads, with the flag that no list of processes may show: the API key."""
        return CONFIGS / f"{self.name}.yml"

    @property
    def flags(self) -> dict[str, Any]:
        """Every flag of its command line with its value."""
        own: dict[str, Any] = {
            "model-path": self.model_path,
            "served-model-name": self.served_model_name or self.name,
            "host": self.host,
            "port": self.port,
        }
        if self.metrics:
            own["enable-metrics"] = True
        return own | {key.replace("_", "-"): value for key, value in self.arguments.items()}

    @property
    def health_url(self) -> str:
        """Address that answers when the server can generate."""
        local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104
        return f"http://{local.get(self.host, self.host)}:{self.port}/health_generate"


def config_text(deployment: Deployment) -> str:
    """Return the file with its secret flag: JSON, which is YAML too."""
    return json.dumps({"api-key": deployment.api_key} if deployment.api_key else {}) + "\n"


def command(deployment: Deployment, python: Path) -> str:
    """Return the command line of its unit, one flag a line."""
    lines = [f"{python} -m sglang.launch_server --config {deployment.config}"]
    for flag, value in sorted(deployment.flags.items()):
        if value is True:
            lines.append(f"--{flag}")
        elif value is not False:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            lines.append(" ".join([f"--{flag}", *(word(str(one)) for one in values)]))
    return " \\\n  ".join(lines)


def word(value: str) -> str:
    """Return one word of a command in a unit file, where % and $ have a meaning and quotes group."""
    return quoted(value).replace("$", "$$")


def quoted(value: str) -> str:
    """Return a word of a setting in a unit file, quoted where it must be."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[\w./:=,@+-]+", escaped) else f'"{escaped}"'


def dropin_text(deployment: Deployment, python: Path, unit: str) -> str:
    """Return the drop-in of its unit.

    Args:
        deployment: the deployment.
        python: interpreter of the very release it runs; a new release is a new text, and so a restart.
        unit: text of sglang@.service, whose digest is in the drop-in for the same reason.
    """
    environment = dict(deployment.environment)
    if deployment.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, deployment.gpus))
    lines = [f"# sglang@.service {hashlib.sha256(unit.encode()).hexdigest()[:16]}", "[Service]"]
    for key, value in sorted(environment.items()):
        lines.append(f"Environment={quoted(f'{key}={value}')}")
    lines += [
        f"TimeoutStartSec={deployment.start_timeout_s}",
        f"ExecStart={command(deployment, python)}",
        f"ExecStartPost=/usr/local/lib/sglang/wait_healthy {deployment.health_url}",
    ]
    return "".join(f"{line}\n" for line in lines)


def shape_problems(deployments: list[Deployment]) -> list[str]:
    """Return what is wrong with the deployments by themselves and beside each other."""
    problems = []
    names: set[str] = set()
    ports: dict[int, str] = {}
    gpus: dict[int, str] = {}
    for one in deployments:
        where = f"sglang_deployments, {one.name}"
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", one.name):
            problems.append(f"{where}: name {one.name!r} is not made of small letters, digits and hyphens. Rename it.")
        if one.name in names:
            problems.append(f"{where}: the name is there twice. Rename one of the two.")
        names.add(one.name)
        if one.port in ports:
            problems.append(f"{where}: port {one.port} is {ports[one.port]}'s too. Give one of them another.")
        ports.setdefault(one.port, one.name)
        if not 1 <= one.port <= 65535:
            problems.append(f"{where}: port {one.port} is not from 1 to 65535.")
        for gpu in one.gpus:
            if gpu in gpus:
                problems.append(f"{where}: gpus has {gpu}, which is {gpus[gpu]}'s too. A GPU serves one deployment.")
            gpus.setdefault(gpu, one.name)
        if "CUDA_VISIBLE_DEVICES" in one.environment:
            problems.append(f"{where}: environment sets CUDA_VISIBLE_DEVICES. Name the devices in gpus instead.")
        for key in one.arguments:
            owner = OWNED.get(key.replace("_", "-"))
            if owner:
                problems.append(f"{where}: arguments has {key}. Use the key {owner} for it.")
    return problems


def machine_problems(deployments: list[Deployment], dry: bool) -> list[str]:
    """Return what this machine lacks for the deployments.

    Args:
        deployments: the deployments.
        dry: whether environments may still be missing, as in a dry run on a bare machine.
    """
    problems = []
    for one in deployments:
        where = f"sglang_deployments, {one.name}"
        paths = {"model_path": one.model_path}
        paths |= {
            f"arguments, {key}": value
            for key, value in one.arguments.items()
            if key.replace("_", "-").endswith("model-path") and isinstance(value, str)
        }
        for key, path in paths.items():
            if path.startswith("/") and not (Path(path) / "config.json").is_file():
                problems.append(
                    f"{where}: {key} {path} has no config.json. Mount the model (lxc_container_mounts), or correct it."
                )
        if not dry and not python_of(one).exists():
            problems.append(f"{where}: venv {one.venv} has no Python. Apply the role uv_venv first, or correct it.")
        if not active(one.unit) and listens(one.port):
            problems.append(f"{where}: another program listens on port {one.port}. Stop it, or choose another port.")
    return problems


def flag_problems(deployment: Deployment, known: dict[str, list[str]]) -> list[str]:
    """Return flags that the deployment's SGLang does not know, and values it does not accept.

    Args:
        deployment: the deployment.
        known: choices by flag, empty where any value goes.
    """
    problems = []
    for flag, value in deployment.flags.items():
        where = f"sglang_deployments, {deployment.name}: arguments, {flag}"
        if flag not in known:
            near = difflib.get_close_matches(flag, known, 3, 0.5)
            problems.append(
                f"{where}: this SGLang has no such flag" + (f"; near it are {', '.join(near)}" if near else "") + "."
            )
        elif known[flag] and not isinstance(value, list) and str(value) not in known[flag]:
            problems.append(f"{where}: {value!r} is none of {', '.join(known[flag])}.")
    return problems


def python_of(deployment: Deployment) -> Path:
    """Return the interpreter of the release that its environment points to now."""
    return Path(deployment.venv).resolve() / "bin" / "python"


def known_flags(python: Path) -> dict[str, list[str]]:
    """Return the flags of an environment's SGLang with their choices; remembered per interpreter.

    Raises:
        DeploymentError: its SGLang cannot be imported.
    """
    cached = CACHE / f"{hashlib.sha256(str(python).encode()).hexdigest()[:16]}.json"
    if cached.exists() and cached.stat().st_mtime > python.lstat().st_mtime:
        return dict(json.loads(cached.read_text()))
    done = subprocess.run([str(python), "-c", LIST_FLAGS], capture_output=True, text=True, check=False, cwd="/")
    found = re.search(r"^FLAGS (.*)$", done.stdout, re.M)
    if done.returncode or not found:
        raise DeploymentError(f"{python} cannot import SGLang: {done.stderr.strip()[-800:]}")
    CACHE.mkdir(parents=True, exist_ok=True)
    write(cached, found[1], 0o644)
    return dict(json.loads(found[1]))


def listens(port: int) -> bool:
    """Tell whether a program on this machine takes connections on a port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def systemctl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run systemctl."""
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)


def active(unit: str) -> bool:
    """Tell whether a unit runs."""
    return systemctl("is-active", "--quiet", unit).returncode == 0


def text_of(path: Path) -> str:
    """Return a file's text, empty where there is none."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def write(path: Path, text: str, mode: int, group: str = "") -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.touch(mode=0o600)
    new.write_text(text)
    if group:
        shutil.chown(new, "root", group)
    new.chmod(mode)
    new.rename(path)


class Manager:
    """Brings the units of this machine to the definition."""

    def __init__(self, deployments: list[Deployment], user: str, unit: str, dry: bool) -> None:
        """Work towards these deployments; with `dry` nothing is changed."""
        self.deployments, self.user, self.unit, self.dry = deployments, user, unit, dry
        self.before: list[str] = []
        self.after: list[str] = []
        self.restarted: list[str] = []
        self.removed: list[str] = []

    def wanted(self, one: Deployment) -> dict[Path, str]:
        """Return the files of a deployment."""
        return {one.dropin: dropin_text(one, python_of(one), self.unit), one.config: config_text(one)}

    def pending(self, one: Deployment) -> Path:
        """Return the folder with the former files of a change that has not been proved yet."""
        return CONFIGS / ".before" / one.name

    def changed(self) -> list[Deployment]:
        """Return the deployments that differ, were left half-changed, or do not run."""
        found = []
        for one in self.deployments:
            wanted = self.wanted(one)
            differs = any(text_of(path) != text for path, text in wanted.items())
            if differs or text_of(UNITS / "sglang@.service") != self.unit:
                self.before += [f"# {path}\n{hidden(text_of(path))}" for path in wanted]
                self.after += [f"# {path}\n{hidden(text)}" for path, text in wanted.items()]
            if differs or self.pending(one).exists() or not active(one.unit) or not enabled(one.unit):
                found.append(one)
        return found

    def check(self) -> list[Deployment]:
        """Return the deployments to change.

        Raises:
            DeploymentError: one of them cannot work.
        """
        problems = shape_problems(self.deployments)
        problems += machine_problems(self.deployments, self.dry)
        changed = self.changed()
        if not problems:
            for one in changed:
                if python_of(one).exists():
                    problems += flag_problems(one, known_flags(python_of(one)))
        if problems:
            raise DeploymentError("nothing was changed:\n" + "\n".join(f"- {problem}" for problem in problems))
        return changed

    def apply(self) -> bool:
        """Change what differs and tell whether anything did.

        Raises:
            DeploymentError: a deployment did not come up; its former form runs again.
        """
        changed = self.check()
        stale = sorted(set(instances()) - {one.name for one in self.deployments})
        unit_changed = text_of(UNITS / "sglang@.service") != self.unit
        self.restarted = [one.name for one in changed]
        self.removed = stale
        if not self.dry:
            if unit_changed:
                write(UNITS / "sglang@.service", self.unit, 0o644)
                systemctl("daemon-reload")
            for name in stale:
                remove(name)
            for one in changed:
                self.change(one)
        return bool(changed or stale or unit_changed)

    def change(self, one: Deployment) -> None:
        """Bring one deployment to its definition, or back to where it was."""
        before = self.pending(one)
        if not before.exists():
            partial = before.with_name(f".{one.name}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700, parents=True)
            for path in (one.dropin, one.config):
                if path.exists():
                    shutil.copy2(path, partial / path.name)
            partial.rename(before)
        self.install(one, self.wanted(one))
        done = systemctl("restart", one.unit)
        if done.returncode == 0:
            systemctl("enable", one.unit)
            shutil.rmtree(before)
            return
        log = journal(one.unit)
        former = {path: text_of(before / path.name) for path in (one.dropin, one.config)}
        if all(former.values()):
            self.install(one, former)
            back = systemctl("restart", one.unit)
            outcome = "its former form runs again" if back.returncode == 0 else "its former form did not come up either"
        else:
            remove(one.name)
            outcome = "it had no former form and is taken away again"
        shutil.rmtree(before, ignore_errors=True)
        raise DeploymentError(f"{one.unit} did not become healthy; {outcome}. Its journal ends:\n{log}")

    def install(self, one: Deployment, files: dict[Path, str]) -> None:
        """Write the files of a deployment and let systemd read them."""
        for path, text in files.items():
            if path == one.config:
                write(path, text, 0o640, self.user)
            else:
                write(path, text, 0o644)
        systemctl("daemon-reload")


def hidden(text: str) -> str:
    """Return a text for a diff, without the API key."""
    return re.sub(r'("api-key": )"[^"]*"', r'\1"(hidden)"', text)


def enabled(unit: str) -> bool:
    """Tell whether a unit starts with the machine."""
    return systemctl("is-enabled", "--quiet", unit).returncode == 0


def journal(unit: str) -> str:
    """Return the end of a unit's journal."""
    words = ["journalctl", "--no-pager", "--output=cat", "--lines", str(JOURNAL_LINES), "--unit", unit]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def instances() -> Iterable[str]:
    """Yield the names of the deployments on this machine."""
    for folder in UNITS.glob("sglang@*.service.d"):
        yield folder.name.removeprefix("sglang@").removesuffix(".service.d")


def remove(name: str) -> None:
    """Stop a deployment and take its files away."""
    systemctl("disable", "--now", f"sglang@{name}.service")
    shutil.rmtree(UNITS / f"sglang@{name}.service.d", ignore_errors=True)
    (CONFIGS / f"{name}.yml").unlink(missing_ok=True)
    shutil.rmtree(CONFIGS / ".before" / name, ignore_errors=True)
    systemctl("daemon-reload")
    systemctl("reset-failed", f"sglang@{name}.service")


def remove_all(dry: bool) -> list[str]:
    """Take away every deployment and the unit, and return what there was."""
    names = sorted(instances())
    left = [str(path) for path in (UNITS / "sglang@.service", CONFIGS, CACHE) if path.exists()]
    if not dry:
        for name in names:
            remove(name)
        (UNITS / "sglang@.service").unlink(missing_ok=True)
        for folder in (CONFIGS, CACHE):
            shutil.rmtree(folder, ignore_errors=True)
        if names or left:
            systemctl("daemon-reload")
    return names + left


def main() -> None:
    """Run the module."""
    deployment = {
        "name": {"type": "str", "required": True},
        "model_path": {"type": "str", "required": True},
        "port": {"type": "int", "required": True},
        "served_model_name": {"type": "str", "default": ""},
        "host": {"type": "str", "default": "0.0.0.0"},  # noqa: S104
        "gpus": {"type": "list", "elements": "int", "default": []},
        "arguments": {"type": "dict", "default": {}},
        "environment": {"type": "dict", "default": {}},
        "api_key": {"type": "str", "default": "", "no_log": True},
        "metrics": {"type": "bool", "default": True},
        "venv": {"type": "path", "default": ""},
        "start_timeout_s": {"type": "int", "default": 900},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["checked", "present", "absent"]},
            "deployments": {"type": "list", "elements": "dict", "default": [], "options": deployment},
            "user": {"type": "str", "default": "sglang"},
            "venv": {"type": "path", "default": "/opt/venvs/sglang/current"},
            "unit": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    values = module.params
    if values["state"] == "absent":
        removed = remove_all(module.check_mode)
        module.exit_json(changed=bool(removed), restarted=[], removed=removed)
    deployments = []
    for one in values["deployments"]:
        fields = {**one, "gpus": tuple(one["gpus"]), "venv": one["venv"] or values["venv"]}
        fields["environment"] = {key: str(value) for key, value in one["environment"].items()}
        deployments.append(Deployment(**fields))
    checking = values["state"] == "checked"
    manager = Manager(deployments, values["user"], values["unit"], module.check_mode)
    try:
        changed = False if checking else manager.apply()
        if checking:
            manager.check()
    except (DeploymentError, OSError) as error:
        module.fail_json(msg=f"SGLang on {os.uname().nodename}: {error}")
    diff = {"before": "".join(manager.before), "after": "".join(manager.after)}
    module.exit_json(
        changed=changed, restarted=manager.restarted, removed=manager.removed, diff=diff if not checking else {}
    )


if __name__ == "__main__":
    main()
