#!/usr/bin/python3
"""Ansible module: SGLang servers as systemd units, changed only to what works and put back where it does not."""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
  - Deployments that are no longer named are taken away when all others are healthy. One whose port or GPU another needs
    is stopped before, and started again where that other does not become healthy.
options:
  state: {type: str, default: present, choices: [checked, present, absent], description: V(checked) changes nothing.}
  deployments: {type: list, elements: dict, default: [], description: The deployments, as in the role's argument_specs.}
  user: {type: str, default: sglang, description: System user that runs the servers.}
  venv: {type: path, default: /opt/venvs/sglang/current, description: Environment of deployments that name none.}
  unit: {type: str, default: "", description: Text of C(sglang@.service).}
  support: {type: dict, default: {}, description: Texts of the programs and units that all share, by path.}
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
settled: {type: bool, returned: always, description: "Whether V(present) would do nothing, in V(checked)."}
restarted: {type: list, elements: str, returned: always, description: Deployments that were started or restarted.}
removed: {type: list, elements: str, returned: always, description: Deployments that were taken away.}
"""

UNITS = Path("/etc/systemd/system")
TEMPLATE = UNITS / "sglang@.service"
CONFIGS = Path("/etc/sglang")
PROVED = "proved"
CACHE = Path("/var/cache/sglang-flags")
LOCK = Path("/run/sglang-deployments.lock")
LOCK_TIMEOUT_S = 300.0
GATE = "/usr/local/sbin/sglang-gate"
WATCHDOG = Path("/usr/local/sbin/sglang-watchdog")
WATCHDOG_STATE = Path("/var/lib/sglang-watchdog")
TIMER = "sglang-watchdog.timer"
START_BASE_S = 600
START_S_PER_GIB = 10
RESTARTS = 5
RESTART_PAUSE_S = 5
END_S = 600
"""Seconds that a start which hangs may take to end, so that the count of failed starts outlasts them all."""
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
SECRET_FLAGS = {"api-key", "admin-api-key", "ssl-keyfile-password"}
"""Flags that no list of processes may show."""
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)

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
    start_timeout_s: int = 0
    canaries: tuple[dict[str, Any], ...] = ()
    min_acceptance_length: float = 0.0

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
        """File that only the service reads, with the flags that no list of processes may show."""
        return CONFIGS / f"{self.name}.yml"

    @property
    def variables(self) -> Path:
        """File that only root reads, with its environment variables."""
        return CONFIGS / f"{self.name}.env"

    @property
    def gate(self) -> Path:
        """File that only the service reads, with what a start has to show."""
        return CONFIGS / f"{self.name}.gate"

    @property
    def start_budget_s(self) -> int:
        """Seconds within which it must be healthy: as given, or by the size of its weights."""
        if self.start_timeout_s:
            return self.start_timeout_s
        files = [file for folder in self.model_folders.values() for file in Path(folder).glob("*.safetensors")]
        return START_BASE_S + round(START_S_PER_GIB * sum(file.stat().st_size for file in files) / 2**30)

    @property
    def model_folders(self) -> dict[str, str]:
        """Folders of its model and drafter by the key that names each; a name on a hub is none."""
        named = {"model_path": self.model_path} | {
            f"arguments, {key}": value
            for key, value in self.arguments.items()
            if key.replace("_", "-").endswith("model-path") and isinstance(value, str)
        }
        return {key: path for key, path in named.items() if path.startswith("/")}

    @property
    def flags(self) -> dict[str, Any]:
        """Every flag with its value, secret ones included."""
        own: dict[str, Any] = {
            "model-path": self.model_path,
            "served-model-name": self.served_model_name or self.name,
            "host": self.host,
            "port": self.port,
        }
        if self.metrics:
            own["enable-metrics"] = True
        if self.api_key:
            own["api-key"] = self.api_key
        return own | {key.replace("_", "-"): value for key, value in self.arguments.items()}

    @property
    def url(self) -> str:
        """Where programs of this machine reach it."""
        local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104
        return f"http://{local.get(self.host, self.host)}:{self.port}"


def gate_text(deployment: Deployment) -> str:
    """Return the gate's file as JSON."""
    wanted = {
        "url": deployment.url,
        "canaries": deployment.canaries,
        "min_acceptance_length": deployment.min_acceptance_length,
    }
    return json.dumps(wanted, indent=1) + "\n"


def config_text(deployment: Deployment) -> str:
    """Return the file with its secret flags: JSON, which is YAML too."""
    return json.dumps({flag: value for flag, value in deployment.flags.items() if flag in SECRET_FLAGS}) + "\n"


def variables_text(deployment: Deployment) -> str:
    """Return its environment variables as systemd reads them from a file: quoted, nothing in them has a meaning."""
    lines = []
    for key, value in sorted(deployment.environment.items()):
        escaped = re.sub(r'(["\\$`])', r"\\\1", value)
        lines.append(f'{key}="{escaped}"\n')
    return "".join(lines)


def command(deployment: Deployment, python: Path) -> str:
    """Return the command line of its unit, one flag a line."""
    lines = [f"{python} -m sglang.launch_server --config {deployment.config}"]
    for flag, value in sorted(deployment.flags.items()):
        if flag in SECRET_FLAGS or value is False:
            continue
        if value is True:
            lines.append(f"--{flag}")
        else:
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
    limit = RESTARTS * (deployment.start_budget_s + RESTART_PAUSE_S + END_S)
    lines = [
        f"# sglang@.service {hashlib.sha256(unit.encode()).hexdigest()[:16]}",
        "[Unit]",
        f"StartLimitIntervalSec={limit}",
        f"StartLimitBurst={RESTARTS}",
        "[Service]",
    ]
    if deployment.gpus:
        lines.append(f"Environment=CUDA_VISIBLE_DEVICES={','.join(map(str, deployment.gpus))}")
    lines += [
        f"EnvironmentFile={deployment.variables}",
        f"RestartSec={RESTART_PAUSE_S}",
        f"TimeoutStartSec={deployment.start_budget_s}",
        f"ExecStart={command(deployment, python)}",
        f"ExecStartPost={GATE} {deployment.gate} {deployment.config}",
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
        for key, value in one.environment.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
                problems.append(f"{where}: environment has {key!r}, which is not a variable's name. Rename it.")
            if re.search(r"[\n\r\0]", str(value)):
                problems.append(f"{where}: environment, {key}: the value has more than one line. Make it one.")
        for canary in one.canaries:
            try:
                re.compile(canary["pattern"])
            except re.error as error:
                problems.append(
                    f"{where}: canaries, pattern {canary['pattern']!r}: {error}. Write a regular expression."
                )
        speculates = any(key.replace("_", "-") == "speculative-algorithm" for key in one.arguments)
        if one.min_acceptance_length and not speculates:
            problems.append(
                f"{where}: min_acceptance_length is {one.min_acceptance_length:g}, but arguments name no "
                "speculative-algorithm. Set it to 0, or choose one."
            )
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
    ours = {installed(name)[0] for name in instances() if state(f"sglang@{name}.service") not in ("inactive", "failed")}
    for one in deployments:
        where = f"sglang_deployments, {one.name}"
        for key, path in one.model_folders.items():
            if not (Path(path) / "config.json").is_file():
                problems.append(
                    f"{where}: {key} {path} has no config.json. Mount the model (lxc_container_mounts), or correct it."
                )
        if not dry and not python_of(one).exists():
            problems.append(f"{where}: venv {one.venv} has no Python. Apply the role uv_venv first, or correct it.")
        if one.port not in ours and taken(one.host, one.port):
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


def known_flags(python: Path, dry: bool) -> dict[str, list[str]]:
    """Return the flags of an environment's SGLang with their choices; remembered per interpreter, unless `dry`.

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
    if not dry:
        write(cached, found[1], 0o644)
    return dict(json.loads(found[1]))


def taken(host: str, port: int) -> bool:
    """Tell whether another program's socket keeps a server from listening on this address and port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def systemctl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run systemctl."""
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)


def state(unit: str) -> str:
    """Return whether a unit is active (which a server is when it is healthy), activating, inactive or failed."""
    return str(systemctl("is-active", unit).stdout).strip()


def text_of(path: Path) -> str:
    """Return a file's text, empty where there is none."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def write(path: Path, text: str, mode: int, group: str = "") -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        if group:
            shutil.chown(new, "root", group)
        new.chmod(mode)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def exclusive() -> Iterator[None]:
    """Keep other runs away from the deployments of this machine.

    Raises:
        DeploymentError: one of them is still at work after LOCK_TIMEOUT_S.
    """
    end = time.monotonic() + LOCK_TIMEOUT_S
    with LOCK.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeploymentError(
                        f"another run has been at work on the deployments for {LOCK_TIMEOUT_S:.0f} s. Wait for its end "
                        "and run again."
                    ) from None
                time.sleep(0.5)
        yield


class Manager:
    """Brings the units of this machine to the definition."""

    def __init__(
        self, deployments: list[Deployment], user: str, unit: str, support: dict[Path, str], dry: bool
    ) -> None:
        """Work towards these deployments.

        Args:
            deployments: the deployments.
            user: system user that runs them.
            unit: text of sglang@.service.
            support: texts of the programs and units that all of them share, by path.
            dry: whether nothing is changed.
        """
        self.deployments, self.user, self.unit, self.support, self.dry = deployments, user, unit, support, dry
        self.before: list[str] = []
        self.after: list[str] = []
        self.restarted: list[str] = []
        self.removed: list[str] = []

    def wanted(self, one: Deployment) -> dict[Path, str]:
        """Return the files of a deployment."""
        return {
            one.dropin: dropin_text(one, python_of(one), self.unit),
            one.config: config_text(one),
            one.variables: variables_text(one),
            one.gate: gate_text(one),
        }

    def former(self, one: Deployment) -> Path:
        """Return the folder with the former files of a change that is not over yet."""
        return CONFIGS / ".before" / one.name

    def proved(self, one: Deployment) -> bool:
        """Tell whether a change of an earlier run came to its end, up to taking the former files away."""
        return (self.former(one) / PROVED).exists()

    def changed(self) -> list[Deployment]:
        """Return the deployments that differ, were left half-changed, or do not run."""
        found = []
        for one in self.deployments:
            wanted = self.wanted(one)
            differs = any(text_of(path) != text for path, text in wanted.items())
            if differs or text_of(TEMPLATE) != self.unit:
                self.before += [f"# {path}\n{hidden(text_of(path))}" for path in wanted]
                self.after += [f"# {path}\n{hidden(text)}" for path, text in wanted.items()]
            half = self.former(one).exists() and not self.proved(one)
            if differs or half or state(one.unit) not in ("active", "activating") or not enabled(one.unit):
                found.append(one)
        return found

    def check(self) -> list[Deployment]:
        """Return the deployments to change.

        Raises:
            DeploymentError: one of them cannot work.
        """
        problems = shape_problems(self.deployments)
        changed: list[Deployment] = []
        if not problems:
            problems = machine_problems(self.deployments, self.dry)
            changed = self.changed()
        if not problems:
            for one in changed:
                if python_of(one).exists():
                    problems += flag_problems(one, known_flags(python_of(one), self.dry))
        if problems:
            raise DeploymentError("nothing was changed:\n" + "\n".join(f"- {problem}" for problem in problems))
        return changed

    def apply(self) -> bool:
        """Change what differs and tell whether anything did.

        Raises:
            DeploymentError: a deployment did not come up; its former form, and what it displaced, runs again.
        """
        changed = self.check()
        stale = self.stale()
        self.restarted = [one.name for one in changed]
        self.removed = stale
        support = self.missing_support()
        unit_changed = text_of(TEMPLATE) != self.unit
        if not self.dry:
            self.wait([one for one in self.deployments if one not in changed])
            self.install_support()
            saved = self.save(changed)
            try:
                self.replace(changed, stale)
            except DeploymentError:
                for one in saved:
                    if self.former(one).exists() and not self.proved(one):
                        shutil.rmtree(self.former(one))
                raise
            for name in stale:
                remove(name)
            if unit_changed:
                write(TEMPLATE, self.unit, 0o644)
                systemctl("daemon-reload")
            shutil.rmtree(CONFIGS / ".before", ignore_errors=True)
        return bool(changed or stale or unit_changed or support)

    def stale(self) -> list[str]:
        """Return the names of installed deployments that are no longer wanted."""
        names = {one.name for one in self.deployments}
        return sorted(name for name in instances() if name not in names)

    def settled(self) -> bool:
        """Tell whether nothing is to be done or waited for.

        Raises:
            DeploymentError: a deployment cannot work.
        """
        starting = any(state(one.unit) != "active" for one in self.deployments)
        unit = not self.deployments or text_of(TEMPLATE) == self.unit
        return not (self.check() or self.stale() or starting or self.missing_support()) and unit

    def missing_support(self) -> list[Path]:
        """Return the shared programs and units that are not as they should be, and the timer where it does not run."""
        found = [path for path, text in self.support.items() if text_of(path) != text]
        timer = UNITS / TIMER
        if timer in self.support and timer not in found and not (state(TIMER) == "active" and enabled(TIMER)):
            found.append(timer)
        return found

    def install_support(self) -> None:
        """Bring the shared programs and units to their texts; the timer starts."""
        missing = self.missing_support()
        for path in missing:
            write(path, self.support[path], 0o644 if path.parent == UNITS else 0o755)
        if any(path.parent == UNITS for path in missing):
            systemctl("daemon-reload")
            systemctl("enable", TIMER)
            systemctl("restart", TIMER)

    def wait(self, unchanged: list[Deployment]) -> None:
        """Wait for servers that are right and still start.

        Raises:
            DeploymentError: one of them did not become healthy.
        """
        for one in unchanged:
            if state(one.unit) == "activating" and systemctl("start", one.unit).returncode:
                raise DeploymentError(f"{one.unit} did not become healthy. Its journal ends:\n{journal(one.unit)}")

    def save(self, changed: list[Deployment]) -> list[Deployment]:
        """Keep the present files of what is going to change, unless a killed run has kept older ones.

        Returns:
            the deployments whose files it kept.
        """
        saved = []
        for one in changed:
            if self.proved(one):
                shutil.rmtree(self.former(one))
            if not self.former(one).exists():
                partial = self.former(one).with_name(f".{one.name}")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(mode=0o700, parents=True)
                for path in (*self.wanted(one), TEMPLATE):
                    if path.exists():
                        shutil.copy2(path, partial / path.name)
                partial.rename(self.former(one))
                saved.append(one)
        return saved

    def replace(self, changed: list[Deployment], stale: list[str]) -> None:
        """Bring deployments to their definition one by one, or back to where they were.

        Raises:
            DeploymentError: one did not come up.
        """
        done: list[Deployment] = []
        waiting = [*(one.name for one in changed), *stale]
        stopped: list[str] = []
        for one in changed:
            waiting.remove(one.name)
            for name in conflicts(one.port, set(one.gpus), waiting):
                stopped.append(name)
                systemctl("stop", f"sglang@{name}.service")
            self.install(one, self.wanted(one), self.unit)
            if start(one.unit):
                systemctl("enable", one.unit)
                (self.former(one) / PROVED).touch()
                done.append(one)
                continue
            log = journal(one.unit)
            tally(one.name, "change_failed")
            outcome = self.put_back(one, done)
            if state(one.unit) == "active":
                tally(one.name, "put_back")
            for name in stopped:
                if name in waiting:
                    systemctl("start", f"sglang@{name}.service")
            raise DeploymentError(f"{one.unit} did not become healthy; {outcome}. Its journal ends:\n{log}")

    def put_back(self, one: Deployment, done: list[Deployment]) -> str:
        """Bring a deployment back to its former form and say what came of it.

        Args:
            one: the deployment.
            done: those that this run has changed before it; one that holds what its former form needs goes back too.
        """
        folder = self.former(one)
        former = {path: text_of(folder / path.name) for path in self.wanted(one)}
        unit = text_of(folder / TEMPLATE.name)
        if not former[one.dropin]:
            if unit and not done:
                write(TEMPLATE, unit, 0o644)
            remove(one.name)
            return "it had no former form and is taken away again"
        if all(text_of(path) == text for path, text in former.items()):
            shutil.rmtree(folder)
            return "its files are what they were before"
        port, gpus = resources(former[one.dropin])
        for other in [other for other in done if other.name in conflicts(port, gpus, [each.name for each in done])]:
            systemctl("stop", other.unit)
            self.put_back(other, [each for each in done if each != other])
        self.install(one, former, self.unit if done or not unit else unit)
        up = start(one.unit)
        shutil.rmtree(folder)
        return "its former form runs again" if up else "its former form did not come up either"

    def install(self, one: Deployment, files: dict[Path, str], unit: str) -> None:
        """Write the files of a deployment, and the unit that they belong to, and let systemd read them."""
        if text_of(TEMPLATE) != unit:
            write(TEMPLATE, unit, 0o644)
        for path, text in files.items():
            if path in (one.config, one.gate):
                write(path, text, 0o640, self.user)
            else:
                write(path, text, 0o600 if path == one.variables else 0o644)
        systemctl("daemon-reload")


def tally(name: str, event: str) -> None:
    """Count an event of a deployment where the watchdog counts its own."""
    if WATCHDOG.exists():
        subprocess.run([str(WATCHDOG), "count", name, event], capture_output=True, check=False)


def hidden(text: str) -> str:
    """Return a file of a deployment for a diff, without secrets."""
    if text.startswith("{"):
        return json.dumps(dict.fromkeys(json.loads(text), "(hidden)")) + "\n"
    return re.sub(
        r'(?m)^(\w+)="(.*)"$', lambda found: f"{found[1]}=(hidden)" if SECRET_NAME.search(found[1]) else found[0], text
    )


def start(unit: str) -> bool:
    """Restart a unit, whatever the count of its failures, and tell whether it became healthy."""
    systemctl("reset-failed", unit)
    return systemctl("restart", unit).returncode == 0


def resources(dropin: str) -> tuple[int, set[int]]:
    """Return port and GPUs of a deployment from its drop-in; port 0 where it names none."""
    port = re.search(r"--port (\d+)", dropin)
    gpus = re.search(r"CUDA_VISIBLE_DEVICES=([\d,]+)", dropin)
    return int(port[1]) if port else 0, {int(one) for one in gpus[1].split(",")} if gpus else set()


def installed(name: str) -> tuple[int, set[int]]:
    """Return port and GPUs of a deployment as it is installed now."""
    return resources(text_of(UNITS / f"sglang@{name}.service.d" / "deployment.conf"))


def conflicts(port: int, gpus: set[int], names: Iterable[str]) -> list[str]:
    """Return those of the installed deployments that hold a port or one of some GPUs."""
    found = []
    for name in names:
        its_port, its_gpus = installed(name)
        if its_port == port or its_gpus & gpus:
            found.append(name)
    return found


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
    for suffix in ("yml", "env", "gate"):
        (CONFIGS / f"{name}.{suffix}").unlink(missing_ok=True)
    shutil.rmtree(CONFIGS / ".before" / name, ignore_errors=True)
    systemctl("daemon-reload")
    systemctl("reset-failed", f"sglang@{name}.service")


def remove_all(dry: bool) -> list[str]:
    """Take away every deployment and the unit, and return what there was."""
    names = sorted(instances())
    shared = [TEMPLATE, UNITS / TIMER, UNITS / "sglang-watchdog.service", Path(GATE), WATCHDOG]
    left = [str(path) for path in (*shared, CONFIGS, CACHE, WATCHDOG_STATE) if path.exists()]
    if not dry:
        if (UNITS / TIMER).exists():
            systemctl("disable", "--now", TIMER)
        for name in names:
            remove(name)
        for path in shared:
            path.unlink(missing_ok=True)
        for folder in (CONFIGS, CACHE, WATCHDOG_STATE):
            shutil.rmtree(folder, ignore_errors=True)
        if names or left:
            systemctl("daemon-reload")
    return names + left


def secrets(deployments: list[dict[str, Any]]) -> set[str]:
    """Return the values that no output may show."""
    found = set()
    for one in deployments:
        named = {key: value for key, value in one["arguments"].items() if key.replace("_", "-") in SECRET_FLAGS}
        named |= {key: value for key, value in one["environment"].items() if SECRET_NAME.search(key)}
        found |= {str(value) for value in named.values() if value}
    return found


def main() -> None:
    """Run the module."""
    canary = {
        "prompt": {"type": "str", "required": True},
        "pattern": {"type": "str", "required": True},
        "tokens": {"type": "int", "default": 32},
    }
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
        "start_timeout_s": {"type": "int", "default": 0},
        "canaries": {"type": "list", "elements": "dict", "default": [], "options": canary},
        "min_acceptance_length": {"type": "float", "default": 0.0},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["checked", "present", "absent"]},
            "deployments": {"type": "list", "elements": "dict", "default": [], "options": deployment},
            "user": {"type": "str", "default": "sglang"},
            "venv": {"type": "path", "default": "/opt/venvs/sglang/current"},
            "unit": {"type": "str", "default": ""},
            "support": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    values = module.params
    dry = module.check_mode
    module.no_log_values |= secrets(values["deployments"])
    if values["state"] == "absent":
        try:
            with nullcontext() if dry else exclusive():
                removed = remove_all(dry)
        except (DeploymentError, OSError) as error:
            module.fail_json(msg=f"SGLang on {os.uname().nodename}: {error}")
        module.exit_json(changed=bool(removed), restarted=[], removed=removed)
    deployments = []
    for one in values["deployments"]:
        fields = {
            **one,
            "gpus": tuple(one["gpus"]),
            "canaries": tuple(one["canaries"]),
            "venv": one["venv"] or values["venv"],
        }
        fields["environment"] = {key: str(value) for key, value in one["environment"].items()}
        deployments.append(Deployment(**fields))
    checking = values["state"] == "checked"
    support = {Path(path): text for path, text in values["support"].items()}
    manager = Manager(deployments, values["user"], values["unit"], support, dry)
    try:
        settled = manager.settled() if checking else True
        with nullcontext() if dry or checking else exclusive():
            changed = False if checking else manager.apply()
    except (DeploymentError, OSError) as error:
        module.fail_json(msg=f"SGLang on {os.uname().nodename}: {error}")
    diff = {"before": "".join(manager.before), "after": "".join(manager.after)}
    module.exit_json(
        changed=changed,
        settled=settled,
        restarted=manager.restarted,
        removed=manager.removed,
        diff=diff if not checking else {},
    )


if __name__ == "__main__":
    main()
