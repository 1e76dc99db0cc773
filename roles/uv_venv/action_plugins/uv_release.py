"""Controller's part of uv_release: builds local packages, and brings lock, wheels and uv over when they are needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[3]
UV_LOCK = ROOT / "locks" / "uv.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpufleet"
PLATFORMS = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


def source_digest(folder: Path) -> str:
    """Return the digest of a package's source: names and contents of its files, without compiled ones."""
    state = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not {"__pycache__", "build", "dist"} & set(file.relative_to(folder).parts):
            state.update(f"{file.relative_to(folder)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()


def run_uv(*words: str | Path) -> None:
    """Run the controller's uv.

    Raises:
        AnsibleActionFail: it failed.
    """
    program = Path(sys.executable).with_name("uv")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise AnsibleActionFail(
            f"`uv {' '.join(map(str, words[:2]))}` on the controller: {done.stderr.strip()[-1500:]}"
        )


def wheel(folder: Path) -> Path:
    """Return the wheel of a package folder, built when its source has changed."""
    target = CACHE / "wheels" / source_digest(folder)
    if not list(target.glob("*.whl")):
        run_uv("build", "--quiet", "--wheel", "--out-dir", target, folder)
    (built,) = target.glob("*.whl")
    return built


def uv_for(machine: str) -> Path:
    """Return uv for an architecture, in the version and with the hash of locks/uv.txt.

    Raises:
        AnsibleActionFail: there is none for it.
    """
    if machine not in PLATFORMS:
        raise AnsibleActionFail(f"uv: no build for {machine}; there are some for {', '.join(PLATFORMS)}.")
    lock = hashlib.sha256(UV_LOCK.read_bytes()).hexdigest()[:16]
    target = CACHE / "uv" / f"{lock}-{machine}"
    program = target / "bin" / "uv"
    if not program.exists():
        options = ["--quiet", "--no-deps", "--require-hashes", "--python-platform", PLATFORMS[machine]]
        run_uv("pip", "install", *options, "--target", target, "-r", UV_LOCK)
    return program


class ActionModule(ActionBase):
    """Ask the machine what is missing, and bring it only that."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module, twice where a release has to be made."""
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        if args.get("state", "present") == "absent":
            return dict(self._execute_module(module_args=args, task_vars=task_vars))
        lock = self._file(args.get("requirements"), "uv_venv_requirements")
        packages = [self._file(folder, "uv_venv_local_packages") for folder in args.get("local_packages") or []]
        args |= {"lock": lock.read_text(), "package_digests": [source_digest(folder) for folder in packages]}
        first = self._execute_module(module_args={**args, "make": False}, task_vars=task_vars)
        if first.get("failed") or not first["changed"] or self._task.check_mode:
            return dict(first)
        if not first["missing"]:
            return dict(self._execute_module(module_args=args, task_vars=task_vars))
        folder = self._make_tmp_path()
        try:
            program = self._bring(uv_for(first["machine"]), folder)
            wheels = [self._bring(wheel(package), folder) for package in packages]
            self._fixup_perms2([folder, program, *wheels], execute=True)
            return dict(
                self._execute_module(module_args={**args, "uv": program, "wheels": wheels}, task_vars=task_vars)
            )
        finally:
            self._remove_tmp_path(folder)

    def _file(self, name: Any, variable: str) -> Path:
        """Return a path on the controller, relative ones from the project's folder.

        Raises:
            AnsibleActionFail: there is nothing.
        """
        path = ROOT / str(name or "")
        if not name or not path.exists():
            raise AnsibleActionFail(f"{variable}: {name!r} is not there on the controller. Correct the path.")
        return path

    def _bring(self, file: Path, folder: str) -> str:
        """Copy a file into the machine's temporary folder and return its path there."""
        remote = self._connection._shell.join_path(folder, file.name)
        return str(self._transfer_file(str(file), remote))
