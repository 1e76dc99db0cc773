#!/usr/bin/python3
"""Ansible module: one locked Python environment as an immutable release, with `current` pointing to it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: uv_release
short_description: One locked Python environment as an immutable release
description:
  - Makes C(ROOT/NAME/releases/ID), where ID follows from the lock, the local packages and the interpreter, and lets
    C(ROOT/NAME/current) point to it once it is complete and its imports work. A run that ends half-way leaves
    C(current) as it was, and the next run takes away what was begun and makes the release anew.
  - All problems are found before anything is changed and reported together, each with variable, value and remedy.
  - The action plugin of this name runs on the controller. It builds local packages as wheels, and brings lock, wheels
    and uv to the machine when a release has to be made.
options:
  state:
    type: str
    default: present
    choices: [checked, present, absent]
    description: Whether the environment is there. V(checked) only looks for problems.
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
  packages: {type: dict, default: {}, description: Digests of local packages by name; set by the action plugin.}
  wheels: {type: dict, default: {}, description: SHA-256 of wheels on the machine by path; set by the action plugin.}
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
settled: {type: bool, returned: when checked, description: Whether V(present) would change nothing.}
missing: {type: bool, returned: when present, description: Whether the release still has to be made.}
"""

COMPLETE = ".complete"
PYTHONS = ".python"
UNITS = Path("/etc/systemd/system")
CACHE_BUCKET = re.compile(
    r"(archive|binaries|builds|built-wheels|environments|flat-index|git|interpreter|python|sdists|simple|wheels)-v\d+"
)
"""Folders of uv's cache."""
CACHE_FILES = {".gitignore", ".lock", "CACHEDIR.TAG"}
LOCK_TIMEOUT_S = 300.0
INTERPRETER = "import sys; print('{}-{}.{}'.format(sys.implementation.name, *sys.version_info[:2]))"
PROBE = """
import importlib, importlib.util, json, sys
modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
places = {name: getattr(one, "__file__", None) or list(one.__path__)[0] for name, one in modules.items()}
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
    interpreter: str
    lock: str
    packages: dict[str, str]
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
        parts = [self.lock, self.python, self.interpreter, sorted(self.packages.items())]
        return self.folder / "releases" / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def complete(self) -> bool:
        """Whether the release is there, whole, with its interpreter."""
        return (self.release / COMPLETE).exists() and (self.release / "bin" / "python").exists()

    def releases(self) -> list[Path]:
        """Return the folders of all releases, complete and not."""
        folder = self.folder / "releases"
        return [one for one in folder.iterdir() if one.is_dir()] if folder.is_dir() else []

    def begun(self) -> list[Path]:
        """Return the releases that a run began and did not complete."""
        return [one for one in self.releases() if not (one / COMPLETE).exists()]


def normalized(name: str) -> str:
    """Return a distribution's name as the packaging specifications compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: str) -> dict[str, str]:
    """Return versions by package name from a lock."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?==([^\s;\\]+)", lock, re.M)
    return {normalized(name): version for name, version in found}


def listing(lock: str, packages: dict[str, str]) -> str:
    """Return what a release holds, one package a line, for a diff."""
    lines = [f"{name}=={version}" for name, version in pins(lock).items()]
    lines += [f"{name} from source {digest[:16]}" for name, digest in packages.items()]
    return "".join(f"{line}\n" for line in sorted(lines))


def listing_of(release: Path) -> str:
    """Return what a complete release holds; nothing where there is none."""
    if not (release / COMPLETE).exists():
        return ""
    packages = json.loads((release / COMPLETE).read_text()).get("packages", {})
    return listing((release / "requirements.txt").read_text(), packages)


def interpreter(python: str) -> str:
    """Return implementation and minor version of an interpreter; empty where it is for uv to find.

    A release does not outlive a change of either: its packages lie in a folder of that version.
    """
    if not python.startswith("/"):
        return ""
    try:
        done = subprocess.run([python, "-I", "-c", INTERPRETER], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def place_problems(environment: Environment) -> list[str]:
    """Return what is wrong with the place of an environment, without which nothing is read or removed there."""
    found = []
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", environment.name):
        found.append(
            f"uv_venv_name: {environment.name!r} is not a folder name: a letter or digit, then letters, digits, '.', "
            "'_' and '-'."
        )
    if not environment.root.is_absolute():
        found.append(f"uv_venv_root: {str(environment.root)!r} is not an absolute path. Write it from / on.")
    return found


def problems(environment: Environment) -> list[str]:
    """Return what is wrong with a definition."""
    found = place_problems(environment)
    if environment.keep_releases < 1:
        found.append(
            f"uv_venv_keep_releases: {environment.keep_releases} would not keep the current one. Give 1 or more."
        )
    unpinned = loose(environment.lock)
    if unpinned or not pins(environment.lock):
        found.append(
            f"uv_venv_requirements: {', '.join(unpinned[:5]) or 'no package'}: not a lock with an exact version and a "
            "hash for each package. Write it with `uv pip compile --generate-hashes`."
        )
    if "pip" in pins(environment.lock):
        found.append("uv_venv_requirements: the lock brings pip into the environment. Take it out.")
    if environment.python.startswith("/") and not environment.interpreter:
        found.append(
            f"uv_venv_python: {environment.python} is no Python on this machine. Install it, or give a version such as "
            "3.12."
        )
    for folder in environment.find_links:
        if not Path(folder).is_dir():
            found.append(f"uv_venv_find_links: {folder} is not a folder on this machine. Mount it, or take it out.")
    if not environment.complete:
        found += space_problems(environment)
    return found


def loose(lock: str) -> list[str]:
    """Return the requirements of a lock that lack an exact version or a hash."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", lock)).splitlines()
    wanted = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("-")]
    return [line.split()[0] for line in wanted if "--hash=" not in line or not ("==" in line or " @ " in line)]


def space_problems(environment: Environment) -> list[str]:
    """Return what is wrong with the places that a new release is written to."""
    found, seen = [], set()
    for variable, folder in (("root", str(environment.root)), ("cache_dir", environment.cache_dir)):
        place = nearest(Path(folder))
        free, device = shutil.disk_usage(place).free // 2**20, place.stat().st_dev
        if not os.access(place, os.W_OK):
            found.append(
                f"uv_venv_{variable}: {folder} cannot be written: {place} belongs to another user or is read-only. "
                "Mount it so that root of this machine can write, or name another folder."
            )
        elif free < environment.required_mib and device not in seen:
            found.append(
                f"uv_venv_{variable}: {folder} has {free} MiB free, uv_venv_required_mib asks for "
                f"{environment.required_mib}. Make room there, name another folder, or lower uv_venv_required_mib."
            )
        seen.add(device)
    return found


def nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def disk_full(environment: Environment) -> str:
    """Return what to say when a disk has filled up."""
    root, cache = environment.root, Path(environment.cache_dir)
    free = {folder: shutil.disk_usage(nearest(folder)).free // 2**20 for folder in (root, cache)}
    return (
        f"the disk is full: uv_venv_root {root} has {free[root]} MiB free, uv_venv_cache_dir {cache} has {free[cache]}"
        ". Make room there or name other folders; `current` is as it was, and the next run begins anew."
    )


def point(link: Path, target: Path) -> None:
    """Let a link point to a target, in one step."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.relative_to(link.parent))
    new.rename(link)


def turn(environment: Environment) -> None:
    """Let `current` be the release; the one before it counts as the newest of the others from now on."""
    former = environment.current.resolve() / COMPLETE
    if former.exists():
        former.touch()
    point(environment.current, environment.release)


def discard(release: Path) -> None:
    """Remove a release; from the first moment on it does not count as complete."""
    (release / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(release)


@contextmanager
def exclusive(folder: Path) -> Iterator[int]:
    """Keep other runs, and a uv that outlived its run, away from an environment; give the descriptor of the lock.

    Raises:
        ReleaseError: one of them is still at work after LOCK_TIMEOUT_S.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ReleaseError(
                        f"another run has been at work in {folder} for {LOCK_TIMEOUT_S:.0f} s. Wait for its end and "
                        "run again."
                    ) from None
                time.sleep(0.5)
        yield descriptor
    finally:
        os.close(descriptor)


class Maker:
    """Makes a release with uv."""

    def __init__(self, environment: Environment, uv: str, wheels: dict[str, str], lock: int) -> None:
        """Use this uv and these wheels of local packages.

        Args:
            environment: the definition.
            uv: path of the program.
            wheels: SHA-256 of each wheel by path.
            lock: descriptor of the lock, which uv holds too as long as it runs.
        """
        self.environment, self.uv, self.wheels, self.lock = environment, uv, wheels, lock
        self.python = environment.release / "bin" / "python"

    def run(self, *words: str) -> str:
        """Run uv and return what it printed.

        Raises:
            ReleaseError: it failed.
        """
        done = self.spawn([self.uv, *words], self.settings())
        if done.returncode:
            full = "No space left on device" in done.stderr
            text = f"{disk_full(self.environment)}\n" if full else ""
            raise ReleaseError(f"`uv {' '.join(words[:2])}`: {text}{done.stderr.strip()[-1500:]}")
        return done.stdout

    def settings(self) -> dict[str, str]:
        """Return the environment variables of uv: this machine's, and no settings of uv but these."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")} | {
            "UV_CACHE_DIR": self.environment.cache_dir,
            "UV_NO_CONFIG": "1",
            "UV_SYSTEM_CERTS": "1",
            "UV_PYTHON_INSTALL_DIR": str(self.environment.root / PYTHONS),
        }
        if self.environment.index_url:
            environment["UV_DEFAULT_INDEX"] = self.environment.index_url
        return environment

    def spawn(self, words: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program that ends with this one and holds the lock until then."""
        return subprocess.run(
            ["setpriv", "--pdeathsig", "KILL", *words],
            capture_output=True, text=True, check=False, env=environment, cwd="/",
            stdin=subprocess.DEVNULL, pass_fds=[self.lock],
        )  # fmt: skip

    def make(self) -> None:
        """Make the release at its place and mark it complete.

        Raises:
            ReleaseError: a step failed; what was begun is gone.
        """
        one = self.environment
        for wheel, digest in self.wheels.items():
            if hashlib.sha256(Path(wheel).read_bytes()).hexdigest() != digest:
                raise ReleaseError(f"{Path(wheel).name} has changed on its way to this machine. Run again.")
        if one.release.exists():
            discard(one.release)
        one.release.parent.mkdir(exist_ok=True)
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
            (one.release / ".lock").unlink(missing_ok=True)  # uv's own, which everyone could write
            os.sync()
            (one.release / COMPLETE).write_text(
                json.dumps({"made_at": int(time.time()), "packages": one.packages}) + "\n"
            )
        except BaseException:
            shutil.rmtree(one.release, ignore_errors=True)
            raise

    def unmet_by_local_packages(self) -> list[str]:
        """Return what local packages, installed without their dependencies, miss; a lock may break its own rules."""
        words = ["pip", "check", "--python", str(self.python)]
        done = self.spawn([self.uv, *words], self.settings())
        names = {normalized(Path(wheel).name.split("-")[0]) for wheel in self.wheels}
        lines = re.findall(r"^The package `([^`]+)` (requires .*)$", done.stderr + done.stdout, re.M)
        return [f"{name} {rest}" for name, rest in lines if normalized(name) in names]

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
        unmet = self.unmet_by_local_packages()
        if unmet:
            raise ReleaseError(
                f"uv_venv_local_packages: {'; '.join(unmet)}. Add what is missing to the lock, or correct the package."
            )
        done = self.spawn([str(self.python), "-I", "-B", "-c", PROBE, *one.imports])
        if done.returncode:
            raise ReleaseError(
                f"uv_venv_imports: {', '.join(one.imports)} cannot be imported. Add what is missing to the lock, or "
                f"take the module out of the list.\n{done.stderr.strip()[-800:]}"
            )
        answer = json.loads(done.stdout.splitlines()[-1])
        for name, place in answer["places"].items():
            if not Path(str(place)).is_relative_to(one.release):
                raise ReleaseError(
                    f"uv_venv_imports: {name} comes from {place}, not from {one.release}. Add its package to the lock."
                )
        if answer["pip"]:
            raise ReleaseError("uv_venv_requirements: the lock brings pip into the environment. Take it out.")


def users(folder: Path) -> list[Path]:
    """Return the files of systemd's units on this machine that name something in a folder."""
    files = [*UNITS.glob("*.service"), *UNITS.glob("*.service.d/*.conf")]
    return sorted(file for file in files if f"{folder}/" in file.read_text(errors="replace"))


def prune(environment: Environment) -> None:
    """Remove half-made releases, and complete ones beyond those to keep; the last used stay, and what a unit names."""
    current = environment.current.resolve()
    complete = [one for one in environment.releases() if (one / COMPLETE).exists() and one != current]
    complete.sort(key=lambda folder: (folder / COMPLETE).stat().st_mtime, reverse=True)
    for folder in [*environment.begun(), *complete[environment.keep_releases - 1 :]]:
        if folder != current and not users(folder):
            discard(folder)


def use_problems(environment: Environment) -> list[str]:
    """Return why an environment cannot be removed: a unit runs from it."""
    found = users(environment.folder)
    if not found:
        return []
    return [
        f"uv_venv_state: absent, but {', '.join(map(str, found))} runs from {environment.folder}. Take the service "
        "away first (sglang_state: absent)."
    ]


def remove(environment: Environment) -> None:
    """Remove an environment, and with the last one what all of them share."""
    environment.current.unlink(missing_ok=True)
    for release in environment.releases():
        discard(release)
    shutil.rmtree(environment.folder)
    if {one.name for one in environment.root.iterdir()} <= {PYTHONS}:
        shutil.rmtree(environment.root / PYTHONS, ignore_errors=True)
        clear_cache(Path(environment.cache_dir))
        drop(environment.root)


def clear_cache(folder: Path) -> None:
    """Remove what uv keeps in its cache, and nothing else that lies in the same folder."""
    for one in folder.iterdir() if folder.is_dir() else []:
        if CACHE_BUCKET.fullmatch(one.name):
            shutil.rmtree(one)
        elif one.name in CACHE_FILES:
            one.unlink()
    drop(folder)


def drop(folder: Path) -> None:
    """Remove a folder that is empty; one that is mounted stays."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY}:
            raise


def refuse(module: AnsibleModule, found: list[str]) -> None:
    """End the module where there are problems."""
    if found:
        module.fail_json(msg="nothing was changed:\n" + "\n".join(f"- {line}" for line in found))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["checked", "present", "absent"]},
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
            "packages": {"type": "dict", "default": {}},
            "wheels": {"type": "dict", "default": {}},
            "uv": {"type": "path", "default": ""},
            "make": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    values = module.params
    module.no_log_values |= {word for word in [urlsplit(values["index_url"]).password] if word}
    os.umask(0o022)
    root = Path(values["root"])
    environment = Environment(
        name=values["name"],
        root=root.resolve() if root.is_absolute() else root,
        python=values["python"],
        interpreter=interpreter(values["python"]),
        lock=values["lock"],
        packages=values["packages"],
        imports=tuple(values["imports"]),
        find_links=tuple(values["find_links"]),
        index_url=values["index_url"],
        cache_dir=values["cache_dir"],
        keep_releases=values["keep_releases"],
        required_mib=values["required_mib"],
    )
    machine = platform.machine()
    if values["state"] == "absent":
        refuse(module, place_problems(environment) or use_problems(environment))
        present = environment.folder.exists()
        if present and not module.check_mode:
            try:
                with exclusive(environment.folder):
                    remove(environment)
            except (ReleaseError, OSError) as error:
                module.fail_json(msg=f"environment {environment.name}: {error}")
        module.exit_json(changed=present, machine=machine)
    refuse(module, problems(environment))
    release, missing = environment.release, not environment.complete
    former = environment.current.resolve()
    turned = missing or former != release
    result: dict[str, Any] = {"machine": machine, "release": str(release), "missing": missing}
    changed = turned or bool(environment.begun())
    if values["state"] == "checked":
        module.exit_json(changed=False, settled=not changed, **result)
    result["changed"] = changed
    if turned:
        result["diff"] = {"before": listing_of(former), "after": listing(environment.lock, environment.packages)}
    if result["changed"] and values["make"] and not module.check_mode:
        try:
            with exclusive(environment.folder) as lock:
                if not environment.complete:
                    Maker(environment, values["uv"], values["wheels"], lock).make()
                turn(environment)
                prune(environment)
        except (ReleaseError, OSError) as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            text = f"{disk_full(environment)} {error}" if full else str(error)
            module.fail_json(msg=f"environment {environment.name}: {text}", **{**result, "changed": False})
        result["missing"] = False
    module.exit_json(**result)


if __name__ == "__main__":
    main()
