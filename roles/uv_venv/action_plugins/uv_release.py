"""Controller's part of uv_release: builds local packages, and brings wheels and uv over when they are needed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[3]
UV_LOCK = ROOT / "locks" / "uv.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpufleet"
PLATFORMS = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
NOT_SOURCE = {"__pycache__", "build", "dist"}


def source_digest(folder: Path) -> str:
    """Return the digest of a package's source: names and contents of its files, without what tools leave there."""
    state = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        left = any(part in NOT_SOURCE or part.startswith(".") or part.endswith(".egg-info") for part in parts)
        if file.is_file() and not left:
            state.update(f"{file.relative_to(folder)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()


def run_uv(*words: str | Path) -> None:
    """Run the controller's uv.

    Raises:
        AnsibleActionFail: it failed, or there is none.
    """
    beside = Path(sys.executable).with_name("uv")
    program = str(beside) if beside.exists() else shutil.which("uv")
    if program is None:
        raise AnsibleActionFail("uv is not in the controller's environment. Make it anew with `make env`.")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise AnsibleActionFail(
            f"`uv {' '.join(map(str, words[:2]))}` on the controller: {done.stderr.strip()[-1500:]}"
        )


def cached(target: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, made once even when several hosts ask for it, and never half.

    Args:
        target: its place.
        make: fills the folder it is given.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as work:
                make(Path(work) / "made")
                (Path(work) / "made").rename(target)
    return target


def wheel(folder: Path) -> Path:
    """Return the wheel of a package folder, built when its source has changed."""
    options = ["--quiet", "--wheel", "--no-create-gitignore"]
    made = cached(CACHE / "wheels" / source_digest(folder), lambda out: run_uv("build", *options, "-o", out, folder))
    (built,) = made.glob("*.whl")
    return built


def uv_for(machine: str) -> Path:
    """Return uv for an architecture, in the version and with the hash of locks/uv.txt.

    Raises:
        AnsibleActionFail: there is none for it.
    """
    if machine not in PLATFORMS:
        raise AnsibleActionFail(f"uv: no build for {machine}; there are some for {', '.join(PLATFORMS)}.")
    lock = hashlib.sha256(UV_LOCK.read_bytes()).hexdigest()[:16]
    options = ["--quiet", "--no-deps", "--require-hashes", "--python-platform", PLATFORMS[machine]]
    made = cached(
        CACHE / "uv" / f"{lock}-{machine}",
        lambda out: run_uv("pip", "install", *options, "--target", out, "-r", UV_LOCK),
    )
    return made / "bin" / "uv"


def problems(lock: Path, packages: list[Path]) -> list[str]:
    """Return what is wrong with files of the controller, each with variable, value and remedy."""
    found = []
    if not lock.is_file():
        found.append(f"uv_venv_requirements: {lock} is not a file on the controller. Correct the path.")
    for folder in packages:
        if not (folder / "pyproject.toml").is_file():
            found.append(f"uv_venv_local_packages: {folder} has no pyproject.toml on the controller. Correct the path.")
    names = [folder.name for folder in packages]
    found += [
        f"uv_venv_local_packages: two folders are called {name}. Name each of them once."
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    return found


class ActionModule(ActionBase):
    """Ask the machine what is missing, and bring it only that."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module, twice where a release has to be made."""
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        if args.get("state", "present") == "absent":
            return dict(self._execute_module(module_args=args, task_vars=task_vars))
        lock = ROOT / str(args.get("requirements") or "")
        packages = [ROOT / str(folder) for folder in args.get("local_packages") or []]
        found = problems(lock, packages)
        if found:
            raise AnsibleActionFail("nothing was changed:\n" + "\n".join(f"- {line}" for line in found))
        args |= {"lock": lock.read_text(), "packages": {folder.name: source_digest(folder) for folder in packages}}
        first = self._execute_module(module_args={**args, "make": False}, task_vars=task_vars)
        if first.get("failed") or not first["changed"] or self._task.check_mode:
            return dict(first)
        if not first["missing"]:
            return dict(self._execute_module(module_args=args, task_vars=task_vars))
        folder = self._make_tmp_path()
        try:
            program = self._bring(uv_for(first["machine"]), folder)
            wheels = {}
            for built in map(wheel, packages):
                wheels[self._bring(built, folder)] = hashlib.sha256(built.read_bytes()).hexdigest()
            self._fixup_perms2([folder, program, *wheels], execute=True)
            return dict(
                self._execute_module(module_args={**args, "uv": program, "wheels": wheels}, task_vars=task_vars)
            )
        finally:
            self._remove_tmp_path(folder)

    def _bring(self, file: Path, folder: str) -> str:
        """Copy a file into the machine's temporary folder and return its path there.

        Raises:
            AnsibleActionFail: it did not arrive.
        """
        remote = self._connection._shell.join_path(folder, file.name)
        try:
            return str(self._transfer_file(str(file), remote))
        except AnsibleError as error:
            size = file.stat().st_size // 2**20
            raise AnsibleActionFail(
                f"{file.name} ({size} MiB) did not reach {folder} on the machine: {error}. Make room there, or name "
                "another folder with ansible_remote_tmp."
            ) from error
