#!/usr/bin/python3
"""Ansible module: one locked Python environment as an immutable release, with `current` pointing to it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: uv_release
short_description: One locked Python environment as an immutable release
description:
  - Makes C(ROOT/NAME/releases/ID), where ID follows from the lock, the local packages and the interpreter, and lets
    C(ROOT/NAME/current) point to it once it is complete and its imports work. A run that ends half-way leaves
    C(current) as it was, and the next run makes the release anew.
  - The action plugin of this name runs on the controller. It builds local packages as wheels, and brings lock, wheels
    and uv to the machine when a release has to be made.
options:
  state: {type: str, default: present, choices: [present, absent], description: Whether the environment is there.}
  name: {type: str, required: true, description: Name of the environment.}
  root: {type: path, default: /opt/venvs, description: Folder of all environments.}
  python: {type: str, default: /usr/bin/python3, description: Interpreter, as a path or a version that uv installs.}
  requirements: {type: path, description: Lock file on the controller with a hash for each package.}
  local_packages: {type: list, elements: path, default: [], description: Package folders on the controller.}
  imports: {type: list, elements: str, default: [], description: Modules that must import from the release.}
  find_links: {type: list, elements: path, default: [], description: Folders with wheels on the machine.}
  index_url: {type: str, default: "", description: Package index; uv's own where empty.}
  cache_dir: {type: path, default: /var/cache/uv, description: Cache of uv on the machine.}
  keep_releases: {type: int, default: 2, description: Complete releases that stay, the current one included.}
  required_mib: {type: int, default: 1024, description: Free space in MiB without which no release is begun.}
  lock: {type: str, default: "", description: Text of the lock; set by the action plugin.}
  package_digests: {type: list, elements: str, default: [], description: Their digests; set by the action plugin.}
  wheels: {type: list, elements: path, default: [], description: Wheels on the machine; set by the action plugin.}
  uv: {type: path, default: "", description: Program on the machine; set by the action plugin.}
  make: {type: bool, default: true, description: Whether a missing release is made; set by the action plugin.}
author: [maintainers]
"""

EXAMPLES = r"""
- name: The serving environment
  uv_release:
    name: sglang
    requirements: images/locks/cu130-serve.txt
    python: "3.12"
    imports: [sglang, torch]
"""

RETURN = r"""
release: {type: str, returned: when present, description: Folder of the release.}
machine: {type: str, returned: always, description: Architecture of the machine.}
missing: {type: bool, returned: when present, description: Whether the release still has to be made.}
"""

COMPLETE = ".complete"
PROBE = """
import importlib, importlib.util, json, sys
places = {name: importlib.import_module(name).__file__ for name in sys.argv[1:]}
print(json.dumps({"places": places, "pip": importlib.util.find_spec("pip") is not None}))
"""


class ReleaseError(Exception):
    """A release that cannot be made; the text says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """One environment; the fields are described in DOCUMENTATION."""

    name: str
    root: Path
    python: str
    lock: str
    package_digests: tuple[str, ...]
    imports: tuple[str, ...]
    find_links: tuple[str, ...]
    index_url: str
    cache_dir: str
    keep_releases: int
    required_mib: int

    @property
    def folder(self) -> Path:
        """Where its releases are."""
        return self.root / self.name

    @property
    def current(self) -> Path:
        """The link to the release in use."""
        return self.folder / "current"

    @property
    def release(self) -> Path:
        """Folder of the release that this definition asks for."""
        state = hashlib.sha256()
        for part in (self.lock, self.python, *self.package_digests):
            state.update(part.encode() + b"\0")
        return self.folder / "releases" / state.hexdigest()[:16]


def pins(lock: str) -> dict[str, str]:
    """Return versions by package name from a lock."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?==([^\s;\\]+)", lock, re.M)
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in found}


def listing(lock: str) -> str:
    """Return a lock's packages, one a line, for a diff."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins(lock).items()))


def problems(environment: Environment) -> list[str]:
    """Return what is wrong with a definition."""
    found = []
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", environment.name):
        found.append(f"uv_venv_name: {environment.name!r} is not a folder name of letters, digits, '.', '_' and '-'.")
    if environment.keep_releases < 1:
        found.append(
            f"uv_venv_keep_releases: {environment.keep_releases} would not keep the current one. Give 1 or more."
        )
    hashed = re.findall(r"==[^\n]*(?:\\\n\s*)?--hash=", environment.lock)
    if not pins(environment.lock) or len(hashed) < len(pins(environment.lock)):
        found.append(
            "uv_venv_requirements: not a lock with a hash for each package. Write it with "
            "`uv pip compile --generate-hashes`."
        )
    if environment.python.startswith("/") and not Path(environment.python).exists():
        found.append(
            f"uv_venv_python: {environment.python} is not on this machine. Install it, or give a version such as 3.12."
        )
    for folder in environment.find_links:
        if not Path(folder).is_dir():
            found.append(f"uv_venv_find_links: {folder} is not a folder on this machine. Mount it, or take it out.")
    return found


def free_mib(folder: Path) -> int:
    """Return the free space in MiB where a folder is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free // 2**20


def point(link: Path, target: Path) -> None:
    """Let a link point to a target, in one step."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.relative_to(link.parent))
    new.rename(link)


class Maker:
    """Makes a release with uv."""

    def __init__(self, environment: Environment, uv: str, wheels: list[str]) -> None:
        """Use this uv and these wheels of local packages."""
        self.environment, self.uv, self.wheels = environment, uv, wheels
        self.python = environment.release / "bin" / "python"

    def run(self, *words: str) -> str:
        """Run uv and return what it printed.

        Raises:
            ReleaseError: it failed.
        """
        environment = {
            **os.environ,
            "UV_CACHE_DIR": self.environment.cache_dir,
            "UV_NO_CONFIG": "1",
            "UV_SYSTEM_CERTS": "1",
            "UV_PYTHON_INSTALL_DIR": str(self.environment.root / ".python"),
        }
        if self.environment.index_url:
            environment["UV_DEFAULT_INDEX"] = self.environment.index_url
        done = subprocess.run(
            [self.uv, *words], capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            text = done.stderr.strip()[-1500:]
            if "No space left on device" in done.stderr:
                root, cache = self.environment.root, self.environment.cache_dir
                text = (
                    f"the disk is full: uv_venv_root {root} has {free_mib(root)} MiB free, uv_venv_cache_dir {cache} "
                    f"has {free_mib(Path(cache))}. Make room, or name other folders.\n{text}"
                )
            raise ReleaseError(f"`uv {' '.join(words[:2])}`: {text}")
        return done.stdout

    def make(self) -> None:
        """Make the release at its place and mark it complete.

        Raises:
            ReleaseError: a step failed; what was begun is gone.
        """
        one = self.environment
        free = free_mib(one.folder)
        if free < one.required_mib:
            raise ReleaseError(
                f"uv_venv_root: {one.root} has {free} MiB free, uv_venv_required_mib asks for {one.required_mib}. "
                "Make room there, name another folder, or lower uv_venv_required_mib."
            )
        shutil.rmtree(one.release, ignore_errors=True)
        one.release.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.run("venv", "--quiet", "--python", one.python, "--no-project", str(one.release))
            lock = one.release / "requirements.txt"
            lock.write_text(one.lock)
            links = [word for folder in one.find_links for word in ("--find-links", folder)]
            target = ["--python", str(self.python)]
            self.run("pip", "sync", "--quiet", "--require-hashes", "--compile-bytecode", *target, *links, str(lock))
            if self.wheels:
                local = ["--no-deps", "--no-index", "--compile-bytecode"]
                self.run("pip", "install", "--quiet", *local, *target, *self.wheels)
            self.prove()
        except BaseException:
            shutil.rmtree(one.release, ignore_errors=True)
            raise
        (one.release / COMPLETE).write_text(json.dumps({"made_at": int(time.time())}) + "\n")

    def prove(self) -> None:
        """Check that the release is what the lock says and imports from itself.

        Raises:
            ReleaseError: it is not, or does not.
        """
        one = self.environment
        frozen = pins(self.run("pip", "freeze", "--python", str(self.python)))
        wrong = {name: version for name, version in pins(one.lock).items() if frozen.get(name, version) != version}
        if wrong:
            raise ReleaseError(f"the release differs from the lock in {wrong}")
        words = [str(self.python), "-B", "-c", PROBE, *one.imports]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
        if done.returncode:
            raise ReleaseError(f"uv_venv_imports: {', '.join(one.imports)}: {done.stderr.strip()[-800:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        for name, place in answer["places"].items():
            if not Path(str(place)).is_relative_to(one.release):
                raise ReleaseError(f"uv_venv_imports: {name} comes from {place}, not from {one.release}")
        if answer["pip"]:
            raise ReleaseError("uv_venv_requirements: the lock brings pip into the environment. Take it out.")


def prune(environment: Environment) -> None:
    """Remove half-made releases, and complete ones beyond those to keep; the newest stay."""
    current = environment.current.resolve()
    releases = [folder for folder in (environment.folder / "releases").iterdir() if folder.is_dir()]
    complete = [folder for folder in releases if (folder / COMPLETE).exists() and folder != current]
    complete.sort(key=lambda folder: (folder / COMPLETE).stat().st_mtime, reverse=True)
    kept = {current, *complete[: environment.keep_releases - 1]}
    for folder in releases:
        if folder not in kept:
            shutil.rmtree(folder)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
            "name": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/opt/venvs"},
            "python": {"type": "str", "default": "/usr/bin/python3"},
            "requirements": {"type": "path"},
            "local_packages": {"type": "list", "elements": "path", "default": []},
            "imports": {"type": "list", "elements": "str", "default": []},
            "find_links": {"type": "list", "elements": "path", "default": []},
            "index_url": {"type": "str", "default": ""},
            "cache_dir": {"type": "path", "default": "/var/cache/uv"},
            "keep_releases": {"type": "int", "default": 2},
            "required_mib": {"type": "int", "default": 1024},
            "lock": {"type": "str", "default": ""},
            "package_digests": {"type": "list", "elements": "str", "default": []},
            "wheels": {"type": "list", "elements": "path", "default": []},
            "uv": {"type": "path", "default": ""},
            "make": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    values = module.params
    environment = Environment(
        name=values["name"],
        root=Path(values["root"]),
        python=values["python"],
        lock=values["lock"],
        package_digests=tuple(values["package_digests"]),
        imports=tuple(values["imports"]),
        find_links=tuple(values["find_links"]),
        index_url=values["index_url"],
        cache_dir=values["cache_dir"],
        keep_releases=values["keep_releases"],
        required_mib=values["required_mib"],
    )
    machine = platform.machine()
    if values["state"] == "absent":
        present = environment.folder.exists()
        if present and not module.check_mode:
            environment.current.unlink(missing_ok=True)
            shutil.rmtree(environment.folder)
        module.exit_json(changed=present, machine=machine)
    found = problems(environment)
    if found:
        module.fail_json(msg="nothing was changed:\n" + "\n".join(f"- {line}" for line in found))
    release, former = environment.release, environment.current / "requirements.txt"
    missing = not (release / COMPLETE).exists()
    turned = missing or environment.current.resolve() != release
    result: dict[str, Any] = {"changed": turned, "machine": machine, "release": str(release), "missing": missing}
    if turned:
        before = listing(former.read_text()) if former.exists() else ""
        result["diff"] = {"before": before, "after": listing(environment.lock)}
    if turned and values["make"] and not module.check_mode:
        try:
            if missing:
                Maker(environment, values["uv"], values["wheels"]).make()
            point(environment.current, release)
            prune(environment)
        except (ReleaseError, OSError) as error:
            module.fail_json(msg=f"environment {environment.name}: {error}", **{**result, "changed": False})
        result["missing"] = False
    module.exit_json(**result)


if __name__ == "__main__":
    main()
