"""Releases: what identifies one, what is refused, what a kill leaves, which ones stay."""

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail

from tests.unit.loading import ROOT, load

module = load("roles/uv_venv/library/uv_release.py")
action = load("roles/uv_venv/action_plugins/uv_release.py")

UV = str(Path(sys.executable).with_name("uv"))
HASH = "--hash=sha256:" + "0" * 64
LOCK = f"""\
six==1.16.0 \\
    {HASH} \\
    {HASH}
    # via labpkg
my_pkg[extra]==2.0 ; python_version < '3.12' \\
    {HASH}
"""


def environment(tmp_path: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "name": "sglang", "root": tmp_path / "venvs", "python": sys.executable, "interpreter": "cpython-3.11",
        "lock": LOCK, "packages": {}, "imports": (), "find_links": (), "index_url": "",
        "cache_dir": str(tmp_path / "cache"), "keep_releases": 2, "required_mib": 1,
    }  # fmt: skip
    return module.Environment(**values | changes)


def release(one: Any, name: str, made_at: float | None) -> Path:
    """Make the folder of a release, without the mark of a complete one where `made_at` is None."""
    folder = Path(one.folder) / "releases" / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "requirements.txt").write_text(LOCK)
    if made_at is not None:
        (folder / module.COMPLETE).write_text('{"packages": {"labpkg": "abc"}}')
        os.utime(folder / module.COMPLETE, (made_at, made_at))
    return folder


def test_pins_have_normal_names() -> None:
    assert module.pins(LOCK) == {"six": "1.16.0", "my-pkg": "2.0"}


@pytest.mark.parametrize(
    ("lock", "expected"),
    [
        (LOCK, []),
        ("six==1.16.0\n", ["six==1.16.0"]),
        (f"six>=1.16.0 {HASH}\n", ["six>=1.16.0"]),
        (f"--index-url https://192.0.2.1/simple\nsix==1.16.0 {HASH}\n", []),
        (f"six==1.16.0  # {HASH}\n", ["six==1.16.0"]),
        (f"wheel @ https://192.0.2.1/wheel-1.0-py3-none-any.whl {HASH}\n", []),
        (f"six==1.16.0 \\\n    {HASH}\npackaging==24.0\n", ["packaging==24.0"]),
    ],
)
def test_what_is_not_locked_is_found(lock: str, expected: list[str]) -> None:
    assert module.loose(lock) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"lock": LOCK + "#"},
        {"python": "/usr/bin/python3.12"},
        {"interpreter": "cpython-3.13"},
        {"packages": {"a": "1"}},
    ],
)
def test_identity_follows_from_lock_interpreter_and_local_packages(tmp_path: Path, change: dict[str, Any]) -> None:
    before = environment(tmp_path)
    assert dataclasses.replace(before, **change).release != before.release


def test_identity_does_not_follow_from_anything_else(tmp_path: Path) -> None:
    before = environment(tmp_path, packages={"a": "1", "b": "2"})
    after = environment(tmp_path, packages={"b": "2", "a": "1"}, index_url="https://192.0.2.1/simple", keep_releases=5)
    assert after.release == before.release


def test_interpreter_is_asked_for_its_version() -> None:
    assert module.interpreter(sys.executable) == f"cpython-{sys.version_info[0]}.{sys.version_info[1]}"
    assert module.interpreter("/nowhere/python") == ""
    assert module.interpreter("/bin/false") == ""
    assert module.interpreter("3.12") == ""


def test_all_problems_are_named_together(tmp_path: Path) -> None:
    bad = environment(
        tmp_path, name="a/b", keep_releases=0, lock=f"pip==24.0 {HASH}\nsix\n", interpreter="",
        python="/nowhere/python", find_links=("/nowhere/wheels",), required_mib=10**9,
    )  # fmt: skip
    said = module.problems(bad)
    beginnings = [
        "uv_venv_name: 'a/b'",
        "uv_venv_keep_releases: 0",
        "uv_venv_requirements: six: not a lock",
        "uv_venv_requirements: the lock brings pip",
        "uv_venv_python: /nowhere/python",
        "uv_venv_find_links: /nowhere/wheels",
        f"uv_venv_root: {tmp_path}/venvs has ",
    ]
    assert [one.startswith(start) for one, start in zip(said, beginnings, strict=True)] == [True] * len(beginnings)


def test_space_is_not_asked_for_when_the_release_is_there(tmp_path: Path) -> None:
    one = environment(tmp_path, required_mib=10**9)
    assert len(module.problems(one)) == 1
    release(one, one.release.name, 1)
    assert module.problems(one) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, _: place != tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (said,) = module.problems(environment(tmp_path))
    assert said.startswith(f"uv_venv_cache_dir: {tmp_path}/cache cannot be written")


def test_release_without_its_interpreter_is_not_complete(tmp_path: Path) -> None:
    one = environment(tmp_path)
    folder = release(one, one.release.name, 1)
    assert one.complete
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/nowhere/python")
    assert not one.complete


def test_link_turns_in_one_step_over_an_old_one(tmp_path: Path) -> None:
    one = environment(tmp_path)
    for name in ("a", "b"):
        module.point(one.current, release(one, name, 1))
    assert str(one.current.readlink()) == "releases/b"
    assert sorted(path.name for path in one.folder.iterdir()) == ["current", "releases"]


def test_prune_keeps_current_and_the_newest_and_nothing_half_made(tmp_path: Path) -> None:
    one = environment(tmp_path)
    for name, made_at in (("oldest", 1), ("old", 2), ("new", 3), ("half", None)):
        release(one, name, made_at)
    module.point(one.current, one.folder / "releases" / "oldest")
    module.prune(one)
    assert sorted(path.name for path in one.releases()) == ["new", "oldest"]


def test_prune_keeps_the_release_before_this_one_though_others_are_younger(tmp_path: Path) -> None:
    one = environment(tmp_path)
    for name, made_at in (("before", 1), ("younger", 2), (one.release.name, 3)):
        release(one, name, made_at)
    module.point(one.current, one.folder / "releases" / "before")
    module.turn(one)
    assert one.current.resolve() == one.release
    module.prune(one)
    assert sorted(path.name for path in one.releases()) == sorted(["before", one.release.name])


def unit(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a drop-in of a service and let the module find it."""
    file = tmp_path / "system/sglang@a.service.d/deployment.conf"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setattr(module, "UNITS", tmp_path / "system")
    return file


def test_prune_keeps_what_a_unit_runs_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = environment(tmp_path, keep_releases=1)
    used, unused = release(one, "used", 1), release(one, "unused", 2)
    module.point(one.current, release(one, "new", 3))
    unit(tmp_path, f"[Service]\nExecStart={used}/bin/python -m sglang\n", monkeypatch)
    module.prune(one)
    assert used.exists()
    assert not unused.exists()


def test_environment_that_a_unit_runs_from_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = environment(tmp_path)
    used = release(one, "used", 1)
    file = unit(tmp_path, f"[Service]\nExecStart={used}/bin/python -m sglang\n", monkeypatch)
    (problem,) = module.use_problems(one)
    assert problem.startswith(f"uv_venv_state: absent, but {file} runs from {one.folder}. Take the service away")
    file.unlink()
    assert module.use_problems(one) == []


@pytest.mark.parametrize("name", ["../victim", "..", ".", "", "a/b", ".python"])
def test_a_name_that_leaves_the_root_is_a_problem_of_its_place(tmp_path: Path, name: str) -> None:
    (said,) = module.place_problems(environment(tmp_path, name=name))
    assert said.startswith(f"uv_venv_name: {name!r} is not a folder name")


def test_root_that_is_a_link_is_the_folder_that_units_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real/a/releases").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr(module, "UNITS", tmp_path)
    arguments = {"state": "absent", "name": "a", "root": str(tmp_path / "link")}
    done = subprocess.run(
        [sys.executable, ROOT / "roles/uv_venv/library/uv_release.py"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["changed"], done.stdout
    assert not (tmp_path / "real").exists()


@pytest.mark.parametrize("name", ["../victim", "..", "."])
def test_absent_with_such_a_name_removes_nothing(tmp_path: Path, name: str) -> None:
    root = tmp_path / "victim"
    (root / "releases").mkdir(parents=True)
    (root / "venvs").mkdir()
    arguments = {"state": "absent", "name": name, "root": str(root / "venvs")}
    done = subprocess.run(
        [sys.executable, ROOT / "roles/uv_venv/library/uv_release.py"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "uv_venv_name" in json.loads(done.stdout)["msg"]
    assert sorted(path.name for path in root.iterdir()) == ["releases", "venvs"]


def test_removal_leaves_what_is_not_the_caches(tmp_path: Path) -> None:
    one = environment(tmp_path)
    release(one, "a", 1)
    cache = Path(one.cache_dir)
    for folder in ("wheels-v8", "archive-v0/x", "photos"):
        (cache / folder).mkdir(parents=True)
    (cache / "CACHEDIR.TAG").touch()
    module.remove(one)
    assert [path.name for path in cache.iterdir()] == ["photos"]


def test_release_whose_removal_was_killed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = environment(tmp_path)
    folder = release(one, one.release.name, 1)

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        module.discard(folder)
    assert folder.exists()
    assert not one.complete
    assert one.begun() == [folder]


def test_remove_takes_shared_folders_with_the_last_environment(tmp_path: Path) -> None:
    first, second = environment(tmp_path), environment(tmp_path, name="training")
    for one in (first, second):
        release(one, "a", 1)
    (tmp_path / "cache").mkdir()
    module.remove(first)
    assert [path.name for path in first.root.iterdir()] == ["training"]
    assert (tmp_path / "cache").exists()
    module.remove(second)
    assert list(tmp_path.iterdir()) == []


def test_second_run_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0)
    with (
        module.exclusive(tmp_path / "x"),
        pytest.raises(module.ReleaseError, match="another run"),
        module.exclusive(tmp_path / "x"),
    ):
        pass
    with module.exclusive(tmp_path / "x"):
        pass


def wheel(folder: Path, name: str, requires: str = "") -> Path:
    """Write a wheel with one module of the same name."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    requirement = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requirement}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Made:
    """A definition with a lock of one wheel, made offline by the controller's uv."""

    def __init__(self, tmp_path: Path) -> None:
        """Write the wheel and the definition."""
        links = tmp_path / "links"
        links.mkdir()
        locked = wheel(links, "locked")
        self.one = environment(
            tmp_path, lock=f"locked==1.0 --hash=sha256:{digest(locked)}\n", find_links=(str(links),),
            index_url=(tmp_path / "empty").as_uri(), imports=("locked",),
        )  # fmt: skip
        (tmp_path / "empty").mkdir()

    def make(self, **wheels: str) -> None:
        """Make the release, with local packages where given."""
        with module.exclusive(self.one.folder) as lock:
            module.Maker(self.one, UV, wheels, lock).make()


def test_release_holds_the_lock_and_no_pip(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.make()
    assert made.one.complete
    python = made.one.release / "bin" / "python"
    code = "import locked, importlib.util as u; print(locked.__file__, u.find_spec('pip'))"
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert Path(shown[0]).is_relative_to(made.one.release)
    assert shown[1] == "None"
    assert list(made.one.release.rglob("locked.*.pyc"))


def test_release_cannot_be_written_by_others(tmp_path: Path) -> None:
    made = Made(tmp_path)
    old = os.umask(0o022)
    try:
        made.make()
    finally:
        os.umask(old)
    loose = [path for path in made.one.release.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert loose == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"imports": ("absent",)}, "uv_venv_imports: absent cannot be imported"),
        ({"imports": ("json",)}, "uv_venv_imports: json comes from /"),
        ({"find_links": ()}, "`uv pip sync`"),
    ],
)
def test_failure_leaves_nothing(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    made = Made(tmp_path)
    made.one = dataclasses.replace(made.one, **change)
    with pytest.raises(module.ReleaseError) as error:
        made.make()
    assert said in str(error.value)
    assert made.one.releases() == []


def test_wheel_with_another_hash_than_the_lock_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.one = dataclasses.replace(made.one, lock=f"locked==1.0 {HASH}\n")
    with pytest.raises(module.ReleaseError, match=r"(?i)hash"):
        made.make()
    assert made.one.releases() == []


def test_local_package_whose_requirement_the_lock_lacks_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path)
    local = wheel(tmp_path, "local_one", "locked>=2")
    with pytest.raises(module.ReleaseError, match="uv_venv_local_packages: local-one requires `locked>=2`"):
        made.make(**{str(local): digest(local)})
    assert made.one.releases() == []


def test_changed_local_wheel_is_refused(tmp_path: Path) -> None:
    made = Made(tmp_path)
    with pytest.raises(module.ReleaseError, match="has changed on its way"):
        made.make(**{str(wheel(tmp_path, "local_one")): "0" * 64})


def test_listing_of_a_release_names_local_packages(tmp_path: Path) -> None:
    one = environment(tmp_path)
    assert module.listing_of(release(one, "a", 1)) == "labpkg from source abc\nmy-pkg==2.0\nsix==1.16.0\n"
    assert module.listing_of(release(one, "half", None)) == ""


def package(folder: Path) -> Path:
    (folder / "src" / "pkg").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "pkg"\nversion = "1"\n')
    (folder / "src" / "pkg" / "__init__.py").write_text("")
    return folder


def test_source_digest_follows_names_and_contents(tmp_path: Path) -> None:
    folder = package(tmp_path / "pkg")
    digests = [action.source_digest(folder)]
    (folder / "src" / "pkg" / "__init__.py").write_text("x = 1\n")
    digests.append(action.source_digest(folder))
    (folder / "src" / "pkg" / "__init__.py").rename(folder / "src" / "pkg" / "other.py")
    digests.append(action.source_digest(folder))
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    "left", ["src/pkg/__pycache__/x.pyc", "build/lib/x.py", "src/pkg.egg-info/PKG-INFO", ".git/HEAD"]
)
def test_source_digest_ignores_what_tools_leave(tmp_path: Path, left: str) -> None:
    folder = package(tmp_path / "pkg")
    before = action.source_digest(folder)
    (folder / left).parent.mkdir(parents=True, exist_ok=True)
    (folder / left).write_text("x")
    assert action.source_digest(folder) == before


def test_cache_is_filled_once_and_never_half(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("")
        raise AnsibleActionFail("no")

    calls = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()

    target = tmp_path / "cache" / "x"
    with pytest.raises(AnsibleActionFail):
        action.cached(target, fail)
    assert not target.exists()
    assert [action.cached(target, fill), action.cached(target, fill)] == [target, target]
    assert len(calls) == 1
    assert sorted(path.name for path in target.parent.iterdir()) == [".lock", "x"]


def test_controller_problems_are_named_together(tmp_path: Path) -> None:
    first, second = package(tmp_path / "a" / "pkg"), package(tmp_path / "b" / "pkg")
    said = action.problems(tmp_path / "lock.txt", [first, second, tmp_path])
    assert said == [
        f"uv_venv_requirements: {tmp_path}/lock.txt is not a file on the controller. Correct the path.",
        f"uv_venv_local_packages: {tmp_path} has no pyproject.toml on the controller. Correct the path.",
        "uv_venv_local_packages: two folders are called pkg. Name each of them once.",
    ]


def test_architecture_without_uv_is_refused() -> None:
    with pytest.raises(AnsibleActionFail, match="no build for riscv64; there are some for x86_64, aarch64"):
        action.uv_for("riscv64")


def test_uv_comes_in_one_exact_version() -> None:
    pins = module.pins((ROOT / "locks" / "uv.txt").read_text())
    assert list(pins) == ["uv"]
    assert module.loose((ROOT / "locks" / "uv.txt").read_text()) == []


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT])
def test_a_shared_folder_that_is_mounted_used_or_gone_is_let_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A bind mount from the same file system can be told from a folder only by what its removal says."""

    def rmdir(_: Path) -> None:
        raise OSError(code, "rmdir")

    monkeypatch.setattr(Path, "rmdir", rmdir)
    module.drop(tmp_path)


def test_a_shared_folder_that_may_not_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmdir(_: Path) -> None:
        raise OSError(errno.EROFS, "rmdir")

    monkeypatch.setattr(Path, "rmdir", rmdir)
    with pytest.raises(OSError, match="rmdir"):
        module.drop(tmp_path)
