#!/usr/bin/python3
"""Ansible module: exactly one version of the NVIDIA driver's packages, cached, pinned and held."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: nvidia_packages
short_description: Exactly one version of the NVIDIA driver's packages
description:
  - Installs packages and their dependencies from the same driver release at one exact version, in one transaction, from
    a cache of checksummed packages on the machine. What the cache lacks comes from the source.
  - A preferences file, holds and a block for unattended-upgrades keep every package of that release where it is.
  - All problems are found before anything is changed and are reported together. A failed transaction is undone from the
    cache; one that was killed is completed by the next run.
options:
  state:
    type: str
    default: present
    choices: [checked, present, absent]
    description: V(checked) only looks for problems that need no package lists.
  version: {type: str, description: Full version of the packages such as 580.126.09-1.}
  packages: {type: list, elements: str, default: [], description: Packages wanted; dependencies follow.}
  scope:
    type: str
    default: host
    choices: [host, container]
    description: A container gets user space only, in the version of its host.
  host_version: {type: str, default: "", description: Version of the host of a container.}
  source:
    type: dict
    default: {}
    description: Where packages come from.
    options:
      uris: {type: list, elements: str, default: [], description: The machine's own Debian mirror where empty.}
      suites: {type: list, elements: str, default: [], description: The machine's own release where empty.}
      components: {type: list, elements: str, default: [], description: Those with the driver on the own mirror.}
      signing_key: {type: str, default: "", description: ASCII-armoured key or path of a keyring on the machine.}
  cache_dir: {type: path, default: /var/cache/nvidia-driver, description: Folder of packages and their checksums.}
  cache_keep: {type: bool, default: true, description: Whether the cache outlives V(absent).}
  allow_busy: {type: bool, default: false, description: Change the version also while processes hold a GPU.}
  allow_module_mismatch: {type: bool, default: false, description: Accept another loaded kernel module until a reboot.}
  lock_timeout_s: {type: int, default: 120, description: Seconds to wait for another run of apt or dpkg.}
author: [maintainers]
"""

EXAMPLES = r"""
- name: The driver's libraries
  nvidia_packages:
    version: 580.126.09-1
    packages: [libcuda1, nvidia-smi]
    source:
      uris: [https://packages.example.org/nvidia/debian12]
      suites: [./]
      signing_key: /usr/share/keyrings/nvidia.gpg
"""

RETURN = r"""
changes: {type: list, elements: str, returned: always, description: What was done or would be done.}
ansible_facts:
  type: dict
  returned: always
  description: C(nvidia_driver) with C(version), C(module_version) and C(reboot_required).
"""

SOURCE_FILE = Path("/etc/apt/sources.list.d/nvidia-driver.sources")
PREFERENCES_FILE = Path("/etc/apt/preferences.d/nvidia-driver")
UNATTENDED_FILE = Path("/etc/apt/apt.conf.d/52nvidia-driver")
LISTS = Path("/var/lib/apt/lists")
MARK = "Managed by the Ansible role nvidia_driver."
MARGIN_BYTES = 32 * 2**20
"""Room left on a disk beside what packages need, for apt's and dpkg's own files."""
COMPONENTS = {"debian": ("contrib", "non-free", "non-free-firmware"), "ubuntu": ("restricted",)}
"""Where distributions keep the driver in their own archives."""
PERSISTENCE_UNIT = "nvidia-persistenced.service"
KERNEL_PART = re.compile(r"(^|-)dkms(-|$)|^linux-(modules|objects|signatures)-nvidia|^nvidia-kernel-(source|open)")
VERSION = re.compile(r"^[0-9][A-Za-z0-9.+~]*-[A-Za-z0-9.+~]+$")
KEEP_CONFIGURATION = ("--force-confdef", "--force-confold")
ENVIRONMENT = {
    "APT_LISTCHANGES_FRONTEND": "none",
    "DEBIAN_FRONTEND": "noninteractive",
    "LC_ALL": "C.UTF-8",
    "NEEDRESTART_SUSPEND": "1",
}


class DriverError(Exception):
    """Something that keeps the driver from its version; the text says what and how to mend it."""


def refuse(problems: list[str]) -> None:
    """Report problems together, where there are any.

    Raises:
        DriverError: there are.
    """
    if problems:
        raise DriverError("nothing was changed:\n" + "\n".join(f"- {line}" for line in problems))


def upstream(version: str) -> str:
    """Return NVIDIA's own number in a package version: 535.216.03 of 535.216.03-2~bpo12+1."""
    return version.rpartition("-")[0] or version


# ---------------------------------------------------------------------------------------------------------------------
# apt's files


@dataclass(frozen=True)
class Entry:
    """One archive in apt's source files."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str


def one_line_entries(text: str) -> Iterator[Entry]:
    """Yield the binary archives of a sources.list file."""
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)([^#]*)", line)
        if found:
            signed_by = re.search(r"signed-by=(\S+)", found[1] or "", re.IGNORECASE)
            yield Entry(found[2].rstrip("/"), found[3], tuple(found[4].split()), signed_by[1] if signed_by else "")


def deb822_entries(text: str) -> Iterator[Entry]:
    """Yield the enabled binary archives of a .sources file."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[name] = f"{fields.get(name, '')}\n{line}"
            else:
                name, _, value = line.partition(":")
                name = name.lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        key = "\n".join(
            "" if line.strip() == "." else line.strip() for line in fields.get("signed-by", "").splitlines()
        )
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                components = tuple(fields.get("components", "").split())
                yield Entry(uri.rstrip("/"), suite, components, key.strip())


def configured(etc_apt: Path) -> list[Entry]:
    """Return the archives that a machine uses, without the role's own."""
    found: list[Entry] = []
    for file in [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]:
        if file.name == SOURCE_FILE.name or not file.is_file():
            continue
        if file.suffix == ".sources":
            found += deb822_entries(file.read_text())
        elif file.suffix == ".list":
            found += one_line_entries(file.read_text())
    return found


def own_mirror(entries: list[Entry], codename: str) -> Entry:
    """Return the archive of the distribution itself among those that a machine uses.

    Vendors name their suites after the release as well, so an archive that also carries the release's updates goes
    before one that does not.

    Raises:
        DriverError: none or several could be meant.
    """
    releases = [entry for entry in entries if entry.suite == codename and "main" in entry.components]
    updated = {entry.uri for entry in entries if entry.suite == f"{codename}-updates"}
    best = [entry for entry in releases if entry.uri in updated] or releases
    if len({entry.uri for entry in best}) != 1:
        names = ", ".join(sorted({entry.uri for entry in best})) or "none"
        raise DriverError(
            f"nvidia_driver_source.uris is empty and the machine's own mirror of {codename} is not clear from its apt "
            f"sources (found: {names}). Set nvidia_driver_source.uris."
        )
    return best[0]


@dataclass(frozen=True)
class Source:
    """An archive of driver packages; the fields are described in DOCUMENTATION."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signing_key: str = ""

    def render(self) -> str:
        """Return its .sources file."""
        lines = [f"# {MARK}", "Types: deb", f"URIs: {' '.join(self.uris)}", f"Suites: {' '.join(self.suites)}"]
        if self.components:
            lines.append(f"Components: {' '.join(self.components)}")
        key = self.signing_key.strip()
        if key.startswith("-----BEGIN"):
            lines.append("Signed-By:")
            lines += [f" {line}" if line.strip() else " ." for line in key.splitlines()]
        elif key:
            lines.append(f"Signed-By: {key}")
        return "\n".join(lines) + "\n"

    def carries(self, site: str, component: str) -> bool:
        """Tell whether an index that apt reports is of this source."""
        sites = {urlparse(uri).hostname or "" for uri in self.uris}
        return site in sites and (not self.components or component in self.components)


def source_of(params: dict[str, Any], etc: Path) -> Source:
    """Return the source that the module's parameters mean on this machine.

    Raises:
        DriverError: the machine's own mirror is wanted and not clear, or components are missing.
    """
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', (etc / "os-release").read_text(), re.MULTILINE))
    codename = release.get("VERSION_CODENAME", "")
    uris, key = tuple(params["uris"]), params["signing_key"]
    suites, components = tuple(params["suites"]) or (codename,), tuple(params["components"])
    if not uris:
        mirror = own_mirror(configured(etc / "apt"), codename)
        uris, key = (mirror.uri,), key or mirror.signed_by
        components = components or COMPONENTS.get(release.get("ID", ""), COMPONENTS["debian"])
    if bool(components) == any(suite.endswith("/") for suite in suites):
        raise DriverError(
            f"nvidia_driver_source.suites is {list(suites)} with components {list(components)}. Give components for "
            f"suites by name; for a flat repository give a path that ends in / as suite, and no components."
        )
    return Source(uris, suites, components, key)


def preferences(family: Iterable[str], version: str) -> str:
    """Return apt preferences that let packages have one version and no other, downgrades included."""
    names = " ".join(f"{name}:any" for name in sorted(family))
    return (
        f"Explanation: {MARK}\nPackage: {names}\nPin: version {version}\nPin-Priority: 1001\n\n"
        f"Explanation: {MARK}\nPackage: {names}\nPin: version *\nPin-Priority: -1\n"
    )


def pinned(text: str) -> set[str]:
    """Return the packages that a file made by `preferences` names."""
    return {
        name.partition(":")[0] for line in re.findall(r"^Package: (.*)$", text, re.MULTILINE) for name in line.split()
    }


def unattended(family: Iterable[str]) -> str:
    """Return the configuration that keeps unattended-upgrades from packages."""
    patterns = [re.sub(r"[.+]", r"[\g<0>]", name) for name in sorted(family)]
    rows = "".join(f'    "^{pattern}$";\n' for pattern in patterns)
    return f"// {MARK}\nUnattended-Upgrade::Package-Blacklist {{\n{rows}}};\n"


# ---------------------------------------------------------------------------------------------------------------------
# what is on the machine


@dataclass(frozen=True)
class Installed:
    """A package as dpkg knows it."""

    version: str
    source: str
    want: str
    status: str

    @property
    def complete(self) -> bool:
        """Whether it is unpacked and configured."""
        return self.status == "installed"


DPKG_FORMAT = "${Package}\t${Architecture}\t${Version}\t${source:Package}\t${db:Status-Want}\t${db:Status-Status}\n"


def parse_dpkg(text: str, architecture: str) -> dict[str, Installed]:
    """Return the packages of an architecture from dpkg-query's answer to DPKG_FORMAT."""
    rows = (line.split("\t") for line in text.splitlines())
    return {
        name: Installed(version, source, want, status)
        for name, arch, version, source, want, status in rows
        if arch in (architecture, "all") and status not in ("not-installed", "config-files")
    }


def module_version(root: Path = Path("/")) -> str:
    """Return the version of the loaded NVIDIA kernel module, empty where none is loaded."""
    with contextlib.suppress(OSError):
        return (root / "sys/module/nvidia/version").read_text().strip()
    with contextlib.suppress(OSError):
        found = re.search(
            r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", (root / "proc/driver/nvidia/version").read_text()
        )
        return found[1] if found else ""
    return ""


def holders(proc: Path = Path("/proc")) -> list[str]:
    """Return the processes that hold an NVIDIA device, each with name, number, devices and container.

    NVIDIA's persistence daemon is left out: it is stopped for a change of version.
    """
    found = []
    for process in sorted((folder for folder in proc.iterdir() if folder.name.isdecimal()), key=lambda p: int(p.name)):
        devices = set()
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    devices.add(str(descriptor.readlink()))
        devices = {device for device in devices if device.startswith("/dev/nvidia")}
        if not devices:
            continue
        with contextlib.suppress(OSError):
            name = (process / "comm").read_text().strip()
            group = re.search(r"/lxc(?:\.payload\.|/)([^/\n]+)", (process / "cgroup").read_text())
            if name != PERSISTENCE_UNIT.removesuffix(".service")[:15]:
                where = f" of container {group[1]}" if group else ""
                found.append(f"{name} (pid {process.name}{where}) holds {', '.join(sorted(devices))}")
    return found


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    state = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            state.update(block)
    return state.hexdigest()


def write(file: Path, text: str | None) -> None:
    """Write a file in one step, or remove it where `text` is None."""
    if text is None:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    new.chmod(0o644)
    new.rename(file)


def read(file: Path) -> str | None:
    """Return the text of a file, None where there is none."""
    return file.read_text() if file.exists() else None


# ---------------------------------------------------------------------------------------------------------------------
# the cache


@dataclass(frozen=True)
class Package:
    """A package file in the cache.

    Attributes:
        version: its full version.
        file: name of the .deb in the cache folder.
        sha256: checksum in hexadecimal.
        size: bytes of the .deb.
        installed_size: bytes it takes once unpacked.
        depends: packages of the same manifest that it needs.
    """

    version: str
    file: str
    sha256: str
    size: int
    installed_size: int
    depends: list[str]


@dataclass
class Manifest:
    """What one driver version consists of.

    Attributes:
        version: full version of the driver packages.
        architecture: Debian's name of it.
        family: every package that exists in this version, wanted or not.
        sources: source packages that they are built from.
        packages: the wanted ones with what they need from the driver's source.
    """

    version: str
    architecture: str
    family: list[str]
    sources: list[str]
    packages: dict[str, Package] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: the file is not one.
        """
        raw = json.loads(file.read_text())
        try:
            packages = {name: Package(**package) for name, package in raw.pop("packages").items()}
            return cls(**raw, packages=packages)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from error

    def dump(self) -> str:
        """Return the text of its file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def closure(self, roots: Iterable[str]) -> set[str] | None:
        """Return roots with everything of the manifest that they need, None where one is not in the manifest."""
        done: set[str] = set()
        todo = list(roots)
        while todo:
            name = todo.pop()
            if name in done:
                continue
            if name not in self.packages:
                return None
            done.add(name)
            todo += self.packages[name].depends
        return done


def merged(old: Manifest | None, new: Manifest) -> Manifest:
    """Return `new` with what an older manifest of the same version knows besides."""
    if old is None:
        return new
    family, sources = sorted({*old.family, *new.family}), sorted({*old.sources, *new.sources})
    return Manifest(new.version, new.architecture, family, sources, {**old.packages, **new.packages})


def manifests(cache: Path) -> dict[str, Manifest]:
    """Return the readable manifests of a cache by version."""
    found = {}
    for file in sorted(cache.glob("*.json")):
        with contextlib.suppress(ValueError):
            manifest = Manifest.load(file)
            found[manifest.version] = manifest
    return found


def damaged(cache: Path, packages: Iterable[Package]) -> dict[str, str]:
    """Return the files that are missing or differ from their checksum, with the reason."""
    found = {}
    for package in packages:
        file = cache / package.file
        if not file.is_file():
            found[package.file] = "is missing"
        elif (size := file.stat().st_size) != package.size:
            found[package.file] = f"is damaged: it has {size} bytes, not the manifest's {package.size}"
        elif (actual := sha256(file)) != package.sha256:
            found[package.file] = f"is damaged: its SHA-256 is {actual}, not the manifest's {package.sha256}"
    return found


def too_full(needs: list[tuple[Path, int]]) -> list[str]:
    """Return what is wrong with the disks when each path is to take so many more bytes.

    Needs on one file system are added up; a path that does not exist yet counts for its nearest parent.
    """
    devices: dict[int, tuple[Path, int]] = {}
    for path, size in needs:
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        first, total = devices.get(place.stat().st_dev, (place, 0))
        devices[place.stat().st_dev] = (first, total + size)
    problems = []
    for place, size in devices.values():
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        if size and free < size + MARGIN_BYTES:
            problems.append(
                f"{place}: {free / 2**20:.0f} MiB are free, {(size + MARGIN_BYTES) / 2**20:.0f} MiB are needed for the "
                f"packages. Free space there, or set nvidia_driver_cache_dir to another disk."
            )
    return problems


# ---------------------------------------------------------------------------------------------------------------------
# apt and dpkg


def run(argv: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program and return its answer, output and errors together."""
    return subprocess.run(
        argv, env={**os.environ, **ENVIRONMENT}, cwd=cwd, text=True, errors="replace", check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_to_end(argv: list[str], log: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that goes on when this one is killed: it has a session of its own and writes to a file."""
    with log.open("w+", errors="replace") as stream:
        child = subprocess.Popen(
            argv, env={**os.environ, **ENVIRONMENT}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
        code = child.wait()
        stream.seek(0)
        return subprocess.CompletedProcess(argv, code, stream.read())


def configure_pending() -> None:
    """Configure what dpkg has unpacked, as far as dependencies allow."""
    run(["dpkg", *KEEP_CONFIGURATION, "--configure", "-a"])


def said(answer: subprocess.CompletedProcess[str]) -> str:
    """Return the errors in apt's output, or its end where it names none."""
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    errors = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if line.startswith(("E:", "Err:", "W: GPG error", "dpkg: error")) or before.startswith("dpkg: error")
    ]
    unmet = [line for line in lines if re.match(r"\S+ : (Pre)?-?Depends:", line)]
    return " ".join([*unmet, *errors] or lines[-5:])


def simulated(output: str) -> tuple[dict[str, str], set[str]]:
    """Return what `apt-get --simulate` would install (name to version) and remove."""
    install = re.findall(r"^Inst (\S+) (?:\[[^\]]*\] )?\((\S+)", output, re.MULTILINE)
    return dict(install), set(re.findall(r"^(?:Remv|Purg) (\S+)", output, re.MULTILINE))


def wait_for_lock(timeout_s: float, lock: Path = Path("/var/lib/dpkg/lock-frontend")) -> None:
    """Wait until no other program holds the package database, or the package lists.

    Raises:
        DriverError: one still did after `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    with lock.open("a") as stream:
        while True:
            try:
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() > end:
                    raise DriverError(
                        f"nothing was changed: another program has held {lock} for {timeout_s:.0f} s. Let it finish "
                        f"(`fuser -v {lock}` names it), or raise nvidia_driver_lock_timeout_s."
                    ) from error
                time.sleep(0.5)
            else:
                return


class Apt:
    """apt with the wanted source in the place of the configured one, before that is written."""

    def __init__(self, source: Source | None, dry: bool, lock_timeout_s: int, work: Path) -> None:
        """Prepare apt's folders.

        Args:
            source: archive of driver packages, None for only those that the machine uses.
            dry: keep package lists out of the machine's own folder.
            lock_timeout_s: seconds to wait for another run of apt.
            work: folder for this run.
        """
        parts = work / "sources"
        parts.mkdir()
        for file in SOURCE_FILE.parent.glob("*"):
            if file.name != SOURCE_FILE.name:
                (parts / file.name).symlink_to(file)
        if source:
            (parts / SOURCE_FILE.name).write_text(source.render())
        self.source = source
        self.options = {
            "Dir::Etc::sourceparts": str(parts),
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "DPkg::Lock::Timeout": str(lock_timeout_s),
            "APT::Install-Recommends": "false",
            "APT::Get::Fix-Broken": "true",
            "APT::Sandbox::User": "root",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "30",
            "Acquire::https::Timeout": "30",
        }
        self.lock_timeout_s = lock_timeout_s
        self.private_lists = work / "lists" if dry else None
        self.updated = False
        self.complaint = ""

    def argv(self, *words: str) -> list[str]:
        """Return the command line of apt-get."""
        return ["apt-get", *(f"-o{key}={value}" for key, value in self.options.items()), "-q", "-y", *words]

    def update(self) -> None:
        """Fetch package lists; an archive that fails is remembered for messages, as it may not be needed."""
        if not self.private_lists:
            wait_for_lock(self.lock_timeout_s, LISTS / "lock")
        else:
            shutil.copytree(LISTS, self.private_lists, ignore=shutil.ignore_patterns("lock", "partial"))
            self.options["Dir::State::lists"] = str(self.private_lists)
        answer = run(self.argv("update"))
        self.updated = True
        self.complaint = f"apt says: {said(answer)}" if re.search(r"^(E|W|Err):?", answer.stdout, re.MULTILINE) else ""

    def resolve(
        self, version: str, wanted: Iterable[str], installed: set[str], architecture: str
    ) -> tuple[Manifest, dict[str, list[str]]]:
        """Find what a driver version consists of.

        Args:
            version: full version of the driver packages.
            wanted: packages that the operator names.
            installed: all packages on the machine; those of the driver follow the version too.
            architecture: Debian's name of it.

        Returns:
            The manifest, and the versions there are of each wanted package that the source does not have in `version`.
        """
        import apt_pkg

        apt_pkg.init_config()
        for key, value in self.options.items():
            apt_pkg.config.set(key, value)
        apt_pkg.init_system()
        cache = apt_pkg.Cache(None)
        depcache, records = apt_pkg.DepCache(cache), apt_pkg.PackageRecords(cache)
        exact = {
            package.name: one
            for package in cache.packages
            if package.architecture == architecture
            for one in package.version_list
            if one.ver_str == version and one.downloadable
        }

        def look(one: Any) -> Any:
            place = next(place for place in one.file_list if not place[0].not_source)
            records.lookup(place)
            return place[0]

        def chosen(package: Any) -> Any:
            return exact.get(package.name) or depcache.get_candidate_ver(package)

        def member(one: Any) -> bool:
            if one is None or not one.downloadable:
                return False
            index = look(one)
            return one.parent_pkg.name in exact or bool(
                self.source and self.source.carries(index.site, index.component)
            )

        sources = set()
        for name, one in exact.items():
            look(one)
            sources.add(records.source_pkg or name)
        manifest = Manifest(version, architecture, sorted(exact), sorted(sources))
        missing: dict[str, list[str]] = {}
        todo = [exact[name] for name in exact if name in installed]
        for name in wanted:
            if name in exact:
                todo.append(exact[name])
            else:
                known = cache[name].version_list if (name, architecture) in cache else []
                missing[name] = [one.ver_str for one in known if one.downloadable]
        while todo:
            one = todo.pop()
            name = one.parent_pkg.name
            if name in manifest.packages:
                continue
            needs = []
            for group in (*one.depends_list.get("PreDepends", []), *one.depends_list.get("Depends", [])):
                targets = [target for dependency in group for target in dependency.all_targets()]
                fits = [target for target in targets if (best := chosen(target.parent_pkg)) and best.id == target.id]
                fits.sort(key=lambda target: target.parent_pkg.current_ver is None)
                if fits and member(fits[0]):
                    needs.append(fits[0])
            look(one)
            file = f"{name}_{one.ver_str.replace(':', '%3a')}_{one.arch}.deb"
            manifest.packages[name] = Package(
                one.ver_str, file, records.sha256_hash, one.size, one.installed_size,
                sorted({need.parent_pkg.name for need in needs}),
            )  # fmt: skip
            todo += needs
        return manifest, missing

    def download(self, packages: dict[str, Package], cache: Path) -> None:
        """Fetch packages into the cache; each appears there only once its checksum is right.

        Raises:
            DriverError: one could not be fetched or is not what the package lists say.
        """
        partial = cache / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        answer = run(self.argv("download", *(f"{name}={one.version}" for name, one in packages.items())), cwd=partial)
        wrong = damaged(partial, packages.values())
        if answer.returncode or wrong:
            texts = [f"{file} {reason}" for file, reason in wrong.items()]
            raise DriverError(
                f"nothing was changed, packages could not be fetched: {'; '.join(texts)}. apt says: {said(answer)} "
                f"Mend the way to the source, or name another in nvidia_driver_source."
            )
        for one in packages.values():
            (partial / one.file).rename(cache / one.file)
        partial.rmdir()

    def change(self, *words: str, simulate: bool = False, log: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Install, remove or purge packages in one transaction, or see what that would do."""
        argv = self.argv(
            *(f"-oDpkg::Options::={option}" for option in KEEP_CONFIGURATION),
            "--allow-downgrades",
            "--allow-change-held-packages",
            *(["--simulate"] if simulate else []),
            *words,
        )
        return run_to_end(argv, log) if log else run(argv)


# ---------------------------------------------------------------------------------------------------------------------
# the driver


@dataclass
class Plan:
    """What makes the machine as wanted.

    Attributes:
        manifest: the wanted version.
        closure: names of the wanted packages and what they need from the driver's source.
        install: packages that are not there, not complete, or in another version.
        obsolete: packages of another version that the wanted one does not have.
        fetch: packages of the closure that the cache lacks.
        unheld: packages that are not held.
        files: apt's files that differ, with their new text.
    """

    manifest: Manifest
    closure: set[str]
    install: dict[str, Package]
    obsolete: set[str]
    fetch: dict[str, Package]
    unheld: set[str]
    files: dict[Path, str]


class Driver:
    """One version of the driver on this machine."""

    def __init__(self, params: dict[str, Any], dry: bool, work: Path) -> None:
        """Read what is there.

        Args:
            params: the module's parameters.
            dry: change nothing.
            work: folder for this run.
        """
        self.params, self.dry, self.work = params, dry, work
        self.version: str = params["version"] or ""
        self.cache = Path(params["cache_dir"])
        self.architecture = run(["dpkg", "--print-architecture"]).stdout.strip()
        self.known = manifests(self.cache)
        self.module = module_version()
        self.installed = self.dpkg()
        self.changes: list[str] = []
        self.warnings: list[str] = []
        self.diff: list[dict[str, str]] = []

    def dpkg(self) -> dict[str, Installed]:
        """Return the packages on the machine."""
        return parse_dpkg(run(["dpkg-query", "--show", f"--showformat={DPKG_FORMAT}"]).stdout, self.architecture)

    @property
    def facts(self) -> dict[str, Any]:
        """What later roles and the operator need to know."""
        reboot = bool(self.module and self.version and self.module != upstream(self.version))
        there = {name for name, one in self.installed.items() if one.version == self.version and one.complete}
        version = self.version if self.version and there >= set(self.params["packages"]) else ""
        return {"nvidia_driver": {"version": version, "module_version": self.module, "reboot_required": reboot}}

    def problems(self) -> list[str]:
        """Return what is wrong with the wanted state, as far as no package list is needed."""
        found = []
        version, host, scope = self.version, self.params["host_version"], self.params["scope"]
        if not VERSION.match(version):
            found.append(
                f"nvidia_driver_version is {version!r}. Set the full version of the packages, with the revision after "
                f"the hyphen, such as 580.126.09-1 (`apt-cache madison libcuda1` lists them)."
            )
        try:
            source_of(self.params["source"], Path("/etc"))
        except DriverError as error:
            found.append(str(error))
        if not self.params["packages"]:
            found.append("nvidia_driver_packages is empty. Name at least one package, such as libcuda1.")
        if scope == "container" and not host:
            found.append(
                "nvidia_driver_host_version is empty, but nvidia_driver_scope is container. Set it to "
                "nvidia_driver_version of the container's host."
            )
        if host and upstream(host) != upstream(version):
            found.append(
                f"nvidia_driver_version is {version}, but the host has {host} (nvidia_driver_host_version). A "
                f"container needs exactly its host's driver: set nvidia_driver_version to the host's."
            )
        if self.module and self.module != upstream(version) and not self.params["allow_module_mismatch"]:
            found.append(
                f"nvidia_driver_version is {version}, but the loaded kernel module is {self.module} "
                f"(/sys/module/nvidia/version). Set nvidia_driver_version to a package of {self.module}, or load the "
                f"module of {upstream(version)} on the host; nvidia_driver_allow_module_mismatch: true accepts the "
                f"difference until the host's next reboot."
            )
        elif self.module and self.module != upstream(version):
            self.warnings.append(
                f"The loaded kernel module is {self.module}: reload it or reboot the host before {version} can work."
            )
        return found

    def repair(self) -> None:
        """Complete what an interrupted run of dpkg left behind."""
        journal = [file for file in Path("/var/lib/dpkg/updates").glob("*") if file.name.isdecimal()]
        broken = sorted(name for name, one in self.installed.items() if not one.complete)
        if not journal and not broken:
            return
        self.changes.append(f"dpkg: complete an interrupted run ({', '.join(broken) or 'its journal'})")
        if not self.dry:
            configure_pending()
            self.installed = self.dpkg()

    def related(self, manifest: Manifest) -> tuple[set[str], set[str]]:
        """Return installed packages of any driver version: those that the manifest's version has, and the others."""
        old = {(name, one.version) for one in self.known.values() for name in one.family}
        related = {
            name
            for name, one in self.installed.items()
            if name in manifest.family or one.source in manifest.sources or (name, one.version) in old
        }
        return related & set(manifest.family), related - set(manifest.family)

    def prepare(self, apt: Apt) -> Plan:
        """Find out what is to be done, from the cache alone where it has all.

        Raises:
            DriverError: the version is not to be had.
        """
        manifest = self.known.get(self.version)
        closure, bad = None, {}
        if manifest:
            closure = manifest.closure({*self.params["packages"], *self.related(manifest)[0]})
            bad = damaged(self.cache, [manifest.packages[name] for name in closure or ()])
        if not manifest or closure is None or bad:
            manifest = self.resolve(apt, bad)
            closure = manifest.closure({*self.params["packages"], *self.related(manifest)[0]}) or set()
            bad = damaged(self.cache, [manifest.packages[name] for name in closure])
        install = {}
        for name in sorted(closure):
            one, there = manifest.packages[name], self.installed.get(name)
            same = there is not None and (there.version == one.version or name not in manifest.family)
            if there is None or not there.complete or not same:
                install[name] = one
        held = closure & set(manifest.family)
        wanted = {
            SOURCE_FILE: apt.source.render() if apt.source else "",
            PREFERENCES_FILE: preferences(manifest.family, self.version),
            UNATTENDED_FILE: unattended(manifest.family),
        }
        return Plan(
            manifest=manifest,
            closure=closure,
            install=install,
            obsolete=self.related(manifest)[1],
            fetch={name: manifest.packages[name] for name in closure if manifest.packages[name].file in bad},
            unheld={name for name in held if name in install or self.installed[name].want != "hold"},
            files={file: text for file, text in wanted.items() if read(file) != text},
        )

    def resolve(self, apt: Apt, bad: dict[str, str]) -> Manifest:
        """Ask the source what the version consists of.

        Raises:
            DriverError: the source does not have the version of a package.
        """
        apt.update()
        new, missing = apt.resolve(self.version, self.params["packages"], set(self.installed), self.architecture)
        if not missing:
            self.warnings += [f"{self.cache / file} {reason}. It is fetched again." for file, reason in bad.items()]
            if apt.complaint:
                self.warnings.append(f"Package lists are not all up to date: {apt.complaint}")
            return merged(self.known.get(self.version), new)
        where = ", ".join(apt.source.uris) if apt.source else ""
        texts = [f"{self.cache / file} {reason}." for file, reason in bad.items()]
        offers = [f"{name} in {', '.join(versions) or 'no version'}" for name, versions in missing.items()]
        texts.append(f"The source ({where}) has {'; '.join(offers)}.")
        cached = ", ".join(sorted(self.known)) or "no version"
        raise DriverError(
            f"nvidia_driver_version is {self.version}, which neither the source nor the cache ({self.cache}: {cached}) "
            f"has whole for nvidia_driver_packages. {' '.join(texts)} Choose one of these versions, correct "
            f"nvidia_driver_packages, or name another archive in nvidia_driver_source. {apt.complaint}".strip()
        )

    def obstacles(self, plan: Plan) -> list[str]:
        """Return what keeps a plan from being carried out."""
        found = []
        kernel = sorted(name for name in plan.closure if KERNEL_PART.search(name))
        if self.params["scope"] == "container" and kernel:
            found.append(
                f"nvidia_driver_packages brings parts of the kernel module ({', '.join(kernel)}), but "
                f"nvidia_driver_scope is container: the module belongs on the host. Leave them out."
            )
        if self.swaps(plan):
            found += self.busy()
        sizes = sum(one.size for one in plan.fetch.values()), sum(one.installed_size for one in plan.install.values())
        return found + too_full([(self.cache, sizes[0]), (Path("/usr"), sizes[1])])

    def busy(self) -> list[str]:
        """Return that the GPUs are in use, unless that is allowed."""
        using = [] if self.params["allow_busy"] else holders()
        if not using:
            return []
        return [
            f"the GPUs are in use: {'; '.join(using)}. Stop these first, or set nvidia_driver_allow_busy: true to "
            f"change the driver beneath them."
        ]

    def swaps(self, plan: Plan) -> bool:
        """Tell whether a driver that is there is replaced."""
        others = {name for name in plan.install if name in plan.manifest.family and name in self.installed}
        return bool(plan.obsolete or any(self.installed[name].version != self.version for name in others))

    def words(self, plan: Plan) -> list[str]:
        """Return what apt-get is to install, from the cache where it has it, and to remove."""
        return [
            *(
                f"{name}={one.version}" if name in plan.fetch else str(self.cache / one.file)
                for name, one in plan.install.items()
            ),
            *(f"{name}-" for name in sorted(plan.obsolete)),
        ]

    def rehearse(self, apt: Apt, plan: Plan) -> None:
        """Let apt simulate the transaction.

        Raises:
            DriverError: apt refuses, or it would remove more than obsolete packages of the driver.
        """
        if not plan.install and not plan.obsolete:
            return
        answer = apt.change("install", *self.words(plan), simulate=True)
        if answer.returncode and not apt.updated:
            apt.update()
            answer = apt.change("install", *self.words(plan), simulate=True)
        install, remove = simulated(answer.stdout)
        if answer.returncode:
            raise DriverError(
                f"apt cannot install {self.version} of nvidia_driver_packages: {said(answer)} {apt.complaint}".strip()
            )
        if more := sorted(remove - plan.obsolete):
            raise DriverError(
                f"nvidia_driver_version {self.version} would remove {', '.join(more)}. Remove these by hand first, or "
                f"add what they need to nvidia_driver_packages."
            )
        for name in sorted({*install, *plan.obsolete}):
            there = self.installed.get(name)
            self.note_package(name, there.version if there else "", install.get(name, ""))

    def note_package(self, name: str, before: str, after: str) -> None:
        """Note that a package changes."""
        self.changes.append(f"{name}: {before or 'absent'} -> {after or 'absent'}")
        texts = [f"{version}\n" if version else "" for version in (before, after)]
        self.diff.append({"before_header": name, "after_header": name, "before": texts[0], "after": texts[1]})

    def note_file(self, file: Path, after: str) -> None:
        """Note that a file changes."""
        self.changes.append(str(file))
        header = str(file)
        self.diff.append({"before_header": header, "after_header": header, "before": read(file) or "", "after": after})

    def present(self) -> None:
        """Make the machine have the version, and only it.

        Raises:
            DriverError: it cannot be made so; nothing was changed, or the former version is back, as the text says.
        """
        refuse(self.problems())
        source = source_of(self.params["source"], Path("/etc"))
        self.repair()
        apt = Apt(source, self.dry, self.params["lock_timeout_s"], self.work)
        plan = self.prepare(apt)
        refuse(self.obstacles(plan))
        if plan.fetch:
            self.changes.append(f"{self.cache}: fetch {', '.join(sorted(plan.fetch))}")
        if not self.dry:
            self.fill(apt, plan)
        if broken := sorted(
            name for name in plan.install if name in self.installed and not self.installed[name].complete
        ):
            self.changes.append(
                f"{self.version}: unpack again, as an interrupted run left {', '.join(broken)} in pieces"
            )
            if not self.dry:
                plan = self.unpack(apt, plan)
        if not (broken and self.dry):
            self.rehearse(apt, plan)
        for file, text in sorted(plan.files.items()):
            self.note_file(file, text)
        if plan.unheld:
            self.changes.append(f"hold {', '.join(sorted(plan.unheld))}")
        if not self.dry and (plan.files or plan.install or plan.obsolete or plan.unheld):
            self.apply(apt, plan)

    def unpack(self, apt: Apt, plan: Plan) -> Plan:
        """Bring packages that a killed run left in pieces to one version, which apt alone cannot; returns what is left.

        Raises:
            DriverError: dpkg could not.
        """
        log = self.cache / "transaction.log"
        debs = [str(self.cache / one.file) for one in plan.install.values()]
        answer = run_to_end(["dpkg", *KEEP_CONFIGURATION, "--unpack", *debs], log)
        if answer.returncode:
            raise DriverError(
                f"packages in pieces could not be unpacked again: {said(answer)} Mend what {log} shows and run the "
                f"role again."
            )
        configure_pending()
        if dependencies := sorted(plan.closure - set(plan.manifest.family) - set(self.params["packages"])):
            run(["apt-mark", "auto", *dependencies])
        self.installed = self.dpkg()
        return self.prepare(apt)

    def fill(self, apt: Apt, plan: Plan) -> None:
        """Bring the cache up to date."""
        if plan.fetch:
            apt.download(plan.fetch, self.cache)
            plan.fetch = {}
        manifest = self.cache / f"{self.version}.json"
        if read(manifest) != plan.manifest.dump():
            write(manifest, plan.manifest.dump())

    def apply(self, apt: Apt, plan: Plan) -> None:
        """Carry out a plan; when the transaction fails, undo it.

        The pin is written first: whatever runs apt after a crash then completes this version and no other.
        """
        former = {file: read(file) for file in plan.files}
        for file, text in plan.files.items():
            write(file, text)
        if plan.install or plan.obsolete:
            with self.persistence_daemon_stopped(self.swaps(plan)):
                log = self.cache / "transaction.log"
                answer = apt.change("install", *self.words(plan), log=log)
                if answer.returncode or not self.carried_out(plan):
                    outcome = self.undo(plan, former, log)
                    raise DriverError(f"apt could not change the driver to {self.version}: {said(answer)} {outcome}")
            if dependencies := sorted(name for name in plan.install if self.automatic(name)):
                run(["apt-mark", "auto", *dependencies])
        self.hold(sorted(plan.closure & set(plan.manifest.family)))
        self.installed = self.dpkg()

    def carried_out(self, plan: Plan) -> bool:
        """Tell whether dpkg has the packages as planned."""
        there = self.dpkg()
        states = {name: (there[name].complete, there[name].version) for name in plan.install if name in there}
        return plan.obsolete.isdisjoint(there) and all(
            states.get(name) == (True, one.version) for name, one in plan.install.items()
        )

    def automatic(self, name: str) -> bool:
        """Tell whether a package is on the machine only because another needs it."""
        return name not in self.params["packages"] and name not in self.installed

    def hold(self, names: list[str]) -> None:
        """Hold packages.

        Raises:
            DriverError: dpkg refused.
        """
        answer = run(["apt-mark", "hold", *names])
        if answer.returncode:
            raise DriverError(f"the driver's packages could not be held: {said(answer)}")

    def undo(self, plan: Plan, former: dict[Path, str | None], log: Path) -> str:
        """Go back to the packages and files before a failed transaction; returns a sentence about the outcome."""
        for file, text in former.items():
            write(file, text)
        before = {
            name: self.installed[name].version for name in {*plan.install, *plan.obsolete} if name in self.installed
        }
        debs = {}
        for manifest in self.known.values():
            for name, one in manifest.packages.items():
                if before.get(name) == one.version and not damaged(self.cache, [one]):
                    debs[name] = str(self.cache / one.file)
        lacking = sorted(set(before) - set(debs))
        failed_log = log.with_suffix(".failed.log")
        log.replace(failed_log)
        run_to_end(["dpkg", *KEEP_CONFIGURATION, "--unpack", *debs.values()], log)
        configure_pending()
        if new := [name for name in plan.install if name not in before and name in self.dpkg()]:
            run(["dpkg", "--purge", *new])
        there = self.dpkg()
        if names := sorted(self.related(plan.manifest)[0]):
            self.hold(names)
        if not all(
            name in there and (there[name].complete, there[name].version) == (True, before[name]) for name in before
        ):
            return (
                f"The former packages are NOT all back (not in the cache: {', '.join(lacking) or 'none'}). Mend what "
                f"{failed_log} shows and run the role again: it completes the change."
            )
        return f"The former packages are back. Mend what {failed_log} shows and run the role again."

    @contextlib.contextmanager
    def persistence_daemon_stopped(self, swap: bool) -> Iterator[None]:
        """Keep NVIDIA's persistence daemon from the GPUs while the driver is replaced."""
        if not swap or not shutil.which("systemctl"):
            yield
            return
        run(["systemctl", "stop", PERSISTENCE_UNIT])
        try:
            yield
        finally:
            if run(["systemctl", "is-enabled", "--quiet", PERSISTENCE_UNIT]).returncode == 0:
                run(["systemctl", "start", PERSISTENCE_UNIT])

    def absent(self) -> None:
        """Take away the packages, the pin, the holds, the source, and the cache where it is not to be kept.

        Raises:
            DriverError: something else needs the packages or holds a GPU.
        """
        apt = Apt(None, self.dry, self.params["lock_timeout_s"], self.work)
        family = {name for one in self.known.values() for name in one.family} | pinned(read(PREFERENCES_FILE) or "")
        self.repair()
        there = sorted(family & set(self.installed))
        if there:
            refuse(self.busy())
            brought = {name for one in self.known.values() for name in one.packages} - family
            _, unneeded = simulated(apt.change("purge", "--auto-remove", *there, simulate=True).stdout)
            there += sorted(unneeded & brought)
            answer = apt.change("purge", *there, simulate=True)
            if answer.returncode:
                raise DriverError(f"apt cannot remove the driver: {said(answer)}")
            if more := sorted(simulated(answer.stdout)[1] - set(there)):
                raise DriverError(
                    f"nothing was changed: nvidia_driver_state is absent, but {', '.join(more)} would go with the "
                    f"driver. Remove by hand what is no longer needed, then run the role again."
                )
        for name in there:
            self.note_package(name, self.installed[name].version, "")
        files = [file for file in (SOURCE_FILE, PREFERENCES_FILE, UNATTENDED_FILE) if file.exists()]
        for file in files:
            self.note_file(file, "")
        drop = self.cache.exists() and not self.params["cache_keep"]
        if drop:
            self.changes.append(f"{self.cache}: remove")
        if self.dry:
            return
        if there:
            self.cache.mkdir(parents=True, exist_ok=True)
            with self.persistence_daemon_stopped(True):
                answer = apt.change("purge", *there, log=self.cache / "transaction.log")
            if answer.returncode:
                raise DriverError(f"apt could not remove the driver: {said(answer)}")
        for file in files:
            write(file, None)
        if drop:
            shutil.rmtree(self.cache)
        self.installed = self.dpkg()


def ensure_python_apt(dry: bool) -> bool:
    """Install apt's Python library where it is missing; tells whether it is there now.

    Raises:
        DriverError: it could not be installed.
    """
    if importlib.util.find_spec("apt_pkg"):
        return True
    if dry:
        return False
    run(["apt-get", "-q", "update"])
    answer = run(["apt-get", "-q", "-y", "--no-install-recommends", "install", "python3-apt"])
    importlib.invalidate_caches()
    if answer.returncode or not importlib.util.find_spec("apt_pkg"):
        raise DriverError(f"python3-apt is missing and could not be installed: {said(answer)} Install it by hand.")
    return True


def main() -> None:
    """Run the module."""
    source = {
        "uris": {"type": "list", "elements": "str", "default": []},
        "suites": {"type": "list", "elements": "str", "default": []},
        "components": {"type": "list", "elements": "str", "default": []},
        "signing_key": {"type": "str", "default": "", "no_log": False},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "present", "choices": ["checked", "present", "absent"]},
            "version": {"type": "str"},
            "packages": {"type": "list", "elements": "str", "default": []},
            "scope": {"type": "str", "default": "host", "choices": ["host", "container"]},
            "host_version": {"type": "str", "default": ""},
            "source": {"type": "dict", "default": {}, "apply_defaults": True, "options": source},
            "cache_dir": {"type": "path", "default": "/var/cache/nvidia-driver"},
            "cache_keep": {"type": "bool", "default": True},
            "allow_busy": {"type": "bool", "default": False},
            "allow_module_mismatch": {"type": "bool", "default": False},
            "lock_timeout_s": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    error, driver = "", None
    try:
        with tempfile.TemporaryDirectory(prefix="nvidia-driver-") as work:
            wait_for_lock(module.params["lock_timeout_s"])
            driver = Driver(module.params, module.check_mode, Path(work))
            if module.params["state"] == "checked":
                refuse(driver.problems())
            elif module.params["state"] == "absent":
                driver.absent()
            elif ensure_python_apt(module.check_mode):
                driver.present()
            else:
                driver.changes.append("python3-apt: absent -> present; without it the packages cannot be named yet")
    except (DriverError, OSError) as problem:
        error = str(problem)
    for warning in driver.warnings if driver else []:
        module.warn(warning)
    if error or driver is None:
        module.fail_json(msg=error)
        return
    changes = driver.changes
    module.exit_json(changed=bool(changes), changes=changes, diff=driver.diff, ansible_facts=driver.facts)


if __name__ == "__main__":
    main()
