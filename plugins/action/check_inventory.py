"""Action plugin: the whole inventory is checked on the controller, before any machine is touched."""

from __future__ import annotations

import difflib
import importlib.util
import ipaddress
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import lookup_loader

DOCUMENTATION = """
action: check_inventory
short_description: The inventory can become true, as far as the controller can tell
description:
  - Reads which roles the plays of a playbook run on which hosts, resolves each host's variables, holds them against the
    roles' argument_specs, and compares hosts with each other. All problems are reported together, each with host,
    variable, value and remedy.
  - Connects to no machine. A variable made from facts is left to the role that uses it.
  - In a run with a limit, problems that concern no host of the run are left out.
options:
  playbook: {type: path, required: true, description: The playbook whose plays say which role runs where.}
"""

FLEET_OPTIONS: dict[str, dict[str, Any]] = {
    "lxc_host": {"type": "str", "description": "Of a container: the inventory name of the host that carries it."},
    "lxc_vmid": {"type": "int", "description": "Of a container: its number on the host, as Proxmox VE counts."},
    "lxc_cluster": {
        "type": "str",
        "description": "Of a host: the Proxmox cluster it belongs to. A vmid is unique in a cluster.",
    },
    "lxc_shared_gpus": {
        "type": "list",
        "elements": "path",
        "default": [],
        "description": "Of a host: device nodes of GPUs that several of its containers may use at once.",
    },
}
"""Variables of the plays themselves, in the form of argument_specs."""

MATRIX = Path(__file__).resolve().parents[2] / "images" / "matrix.py"
DRIVER = re.compile(r"\d+(\.\d+)+-[\w.+~]+")
GPU = re.compile(r"/dev/nvidia\d+")
CLOSE = 0.7
"""Similarity from which a word that should be known is called a misspelling."""
VERY_CLOSE = 0.9
"""The same for the name of a variable that may be the user's own."""
KINDS = {
    "bool": "true or false",
    "dict": "a mapping",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "path": "a path",
    "raw": "a value",
    "str": "a text",
}
"""Types of argument_specs in words."""
SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
"""Names of keys whose values are not shown."""
SHOWN = 80
"""Characters of a wrong value in a message."""
FACTS = re.compile(r"\b(ansible_facts|ansible_local)\b")


@dataclass(frozen=True)
class Problem:
    """What is wrong with a variable of these hosts, and the remedy."""

    hosts: frozenset[str]
    variable: str
    text: str

    def __str__(self) -> str:
        """Return it as one line."""
        return ": ".join(part for part in (", ".join(sorted(self.hosts)), self.variable, self.text) if part)


@dataclass(frozen=True)
class Unresolved:
    """Why a variable has no value; `late` where it is made from facts, so that only the run can know it."""

    reason: str
    late: bool


@dataclass(frozen=True)
class Play:
    """What a play runs, and where.

    Attributes:
        pattern: its hosts.
        roles: role and entry point, such as ("lxc_container", "main").
        variables: variables that the play and its role entries set.
    """

    pattern: str
    roles: tuple[tuple[str, str], ...]
    variables: dict[str, Any]


class Host:
    """A host of the inventory with its variables."""

    def __init__(
        self,
        name: str,
        roles: Iterable[tuple[str, str]],
        given: Iterable[str],
        values: Mapping[str, Any],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Describe a host.

        Args:
            name: its name in the inventory.
            roles: roles that the plays run on it, with entry points.
            given: names of the variables that the inventory sets for it.
            values: its variables with the roles' defaults, resolved; one may be an Unresolved.
            options: argument_specs of every known variable.
        """
        self.name = name
        self.roles = frozenset(roles)
        self.given = frozenset(given)
        self._values = values
        self._options = options
        self._looked: dict[str, tuple[Any, list[tuple[str, str]]]] = {}

    def __contains__(self, name: object) -> bool:
        """Tell whether a variable is set or has a default."""
        return name in self._values

    def look(self, name: str) -> tuple[Any, list[tuple[str, str]]]:
        """Return a variable as its role sees it, None where it has no usable value, and its faults by place."""
        if name not in self._looked:
            self._looked[name] = self._validated(name)
        return self._looked[name]

    def get(self, name: str) -> Any:
        """Return a variable as its role will see it, None where it has no usable value."""
        return self.look(name)[0]

    def _validated(self, name: str) -> tuple[Any, list[tuple[str, str]]]:
        if name not in self._values:
            return None, []
        value, option = self._values[name], self._options.get(name)
        if isinstance(value, Unresolved):
            mend = (
                "Set ANSIBLE_VAULT_PASSWORD_FILE to the file with the vault's password."
                if "decrypt" in value.reason.lower()
                else "Correct it, or make what it refers to."
            )
            return None, [] if value.late else [(name, f"has no value: {value.reason} {mend}")]
        if option is None:
            return value, []
        checked = ArgumentSpecValidator({name: dict(option)}).validate({name: value})
        if not checked.error_messages:
            return checked.validated_parameters[name], []
        found = list(value_errors(name, value, option))
        return None, found or [(name, f"cannot be used. {remedy(option)}")]


Fleet = Mapping[str, Host]


def plain(description: str | list[str]) -> str:
    """Return a description of argument_specs without Ansible's markup."""
    text = " ".join([description] if isinstance(description, str) else description)
    return re.sub(r"\b[BCEIMOPRUV]{1,2}\(([^()]*)\)", r"\1", text)


def remedy(option: Mapping[str, Any]) -> str:
    """Say what a variable may be."""
    if "choices" in option:
        return f"Set it to one of {', '.join(map(str, option['choices']))}."
    kind = KINDS[option.get("type", "str")]
    if "elements" in option:
        kind += f", each of them {KINDS[option['elements']]}"
    if "options" in option:
        kind += f" with the keys {', '.join(sorted(option['options']))}"
    return f"Set it to {kind}: {plain(option.get('description', ''))}"


def shown(value: Any, secret: bool) -> str:
    """Return a wrong value for a message, in a few words and never a secret one."""
    if value is None:
        return "empty"
    if secret:
        return "a value that is not shown"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = str(value) if isinstance(value, (bool, int, float)) else repr(str(value))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def value_errors(path: str, value: Any, option: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the place of each fault in a value, and what is wrong there with the remedy.

    Args:
        path: where the value is, such as sglang_deployments[0].port.
        value: the value.
        option: its argument spec.
    """
    suboptions = option.get("options")
    if suboptions is None:
        secret = bool(option.get("no_log")) or bool(SECRET.search(path.rpartition(".")[2]))
        if ArgumentSpecValidator({"value": {**option, "no_log": False}}).validate({"value": value}).error_messages:
            yield path, f"is {shown(value, secret)}. {remedy(option)}"
        return
    if option.get("type") != "list":
        yield from mapping_errors(path, value, option)
    elif not isinstance(value, (list, tuple)):
        yield path, f"is {shown(value, False)}. {remedy(option)}"
    else:
        for index, element in enumerate(value):
            name = element.get("name") if isinstance(element, Mapping) else None
            label = f"{path}[{index}]" + (f" ({name})" if isinstance(name, str) else "")
            yield from mapping_errors(label, element, option)


def mapping_errors(path: str, value: Any, option: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the faults of a mapping with known keys, as value_errors does."""
    known = option["options"]
    if not isinstance(value, Mapping):
        yield path, f"is {shown(value, True)}. Set it to a mapping with the keys {', '.join(sorted(known))}."
        return
    for key in sorted(map(str, value.keys() - known.keys())):
        meant = closest(key, known, CLOSE)
        advice = f"Write {meant}" if meant else f"Take it out, or use one of {', '.join(sorted(known))}"
        yield path, f"has the unknown key {key}. {advice}."
    for key, sub in known.items():
        if key in value:
            yield from value_errors(f"{path}.{key}", value[key], sub)
        elif sub.get("required"):
            yield path, f"has no {key}. {remedy(sub)}"


def closest(name: str, known: Iterable[str], similarity: float) -> str | None:
    """Return the known name that `name` is probably meant to be."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=similarity)
    return found[0] if found else None


def one(host: Host, variable: str, text: str) -> Problem:
    """Return a problem of one host."""
    return Problem(frozenset([host.name]), variable, text)


def argument_problems(
    fleet: Fleet, specs: Mapping[tuple[str, str], Mapping[str, Any]], misplaced: Collection[str] = ()
) -> Iterator[Problem]:
    """Hold each host's variables against the argument_specs of the roles that run on it.

    Args:
        fleet: the inventory.
        specs: options by role and entry point.
        misplaced: hosts whose lxc_host is wrong; what they would take from its variables says nothing new.
    """
    for host in fleet.values():
        names = {name: role for role, entry in host.roles for name in specs.get((role, entry), {})}
        for name in sorted(names.keys() | (FLEET_OPTIONS.keys() & host.given)):
            for place, error in host.look(name)[1]:
                if host.name in misplaced and re.search(r"has no value: .*hostvars", error, re.IGNORECASE):
                    continue
                yield one(host, place, error)
        for role, entry in sorted(host.roles):
            for name, option in specs.get((role, entry), {}).items():
                if option.get("required") and name not in host:
                    yield one(host, name, f"is not set, and {role} needs it. {remedy(option)}")


def name_problems(fleet: Fleet, roles: Iterable[str], known: Iterable[str]) -> Iterator[Problem]:
    """Find variables that no role reads: misspelt, or of another version of this project."""
    known = set(known)
    prefixes = sorted((f"{role}_" for role in (*roles, "lxc")), key=len, reverse=True)

    @cache
    def verdict(name: str) -> str | None:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            meant = closest(name, known, VERY_CLOSE)
        else:
            ours = (other.removeprefix(prefix) for other in known if other.startswith(prefix))
            rest = closest(name.removeprefix(prefix), ours, CLOSE)
            meant = f"{prefix}{rest}" if rest else None
        if meant:
            return f"nothing reads it. Write {meant}, or give a variable of your own a name less alike."
        return "nothing reads it. Take it out, or give a variable of your own another prefix." if prefix else None

    for host in fleet.values():
        for name in sorted(host.given - known):
            if not name.startswith(("__", "ansible_")) and (text := verdict(name)):
                yield one(host, name, text)


def containers(fleet: Fleet) -> list[Host]:
    """Return the hosts of the fleet that are containers."""
    return [host for host in fleet.values() if ("lxc_container", "main") in host.roles]


def carried(fleet: Fleet) -> Iterator[tuple[Host, Host]]:
    """Return each container with its host, where the inventory knows that one."""
    for host in containers(fleet):
        carrier = fleet.get(host.get("lxc_host") or "")
        if carrier is not None:
            yield host, carrier


def placement_problems(fleet: Fleet, carriers: Iterable[str]) -> Iterator[Problem]:
    """Check that each container names a host that carries containers."""
    carriers, inside = sorted(carriers), {host.name for host in containers(fleet)}
    for host in fleet.values():
        carrier = host.get("lxc_host")
        if host.name not in inside:
            if carrier is not None:
                yield one(host, "lxc_host", f"is {carrier!r}, but {host.name} is not in gpu_containers. Add it there.")
        elif carrier is None and not host.look("lxc_host")[1]:
            yield one(host, "lxc_host", f"is not set. Name the host that carries the container: {carriers}.")
        elif carrier is not None and carrier not in carriers:
            meant = closest(carrier, carriers, CLOSE)
            what = "is not in the group lxc_hosts" if carrier in fleet else "is not a host of the inventory"
            yield one(host, "lxc_host", f"{carrier!r} {what}. {f'Write {meant}' if meant else 'Add it there'}.")


def backend_problems(fleet: Fleet) -> Iterator[Problem]:
    """Check that a host is prepared for the back end that its containers use."""
    for host, carrier in carried(fleet):
        mine, theirs = host.get("lxc_container_backend"), carrier.get("lxc_container_backend")
        if ("lxc_container", "host") in carrier.roles and mine and theirs and mine != theirs:
            text = f"is {mine}, but {theirs} on its host {carrier.name}. Set the same on both."
            yield one(host, "lxc_container_backend", text)


def duplicates(
    hosts: Iterable[Host], variable: str, key: Callable[[Host], Any], text: Callable[[Any], str]
) -> Iterator[Problem]:
    """Find values of which only one host may have each; a key of None is no value."""
    holders: dict[Any, set[str]] = defaultdict(set)
    for host in hosts:
        if (found := key(host)) is not None:
            holders[found].add(host.name)
    for found, names in holders.items():
        if len(names) > 1:
            yield Problem(frozenset(names), variable, text(found))


def vmid_problems(fleet: Fleet) -> Iterator[Problem]:
    """Check that a vmid is given once per cluster, or per host that is in none."""
    places = {host.name: carrier.get("lxc_cluster") or carrier.name for host, carrier in carried(fleet)}

    def place(host: Host) -> tuple[str, int] | None:
        vmid = host.get("lxc_container_vmid")
        return (places[host.name], vmid) if host.name in places and vmid is not None else None

    yield from duplicates(
        containers(fleet),
        "lxc_vmid",
        place,
        lambda found: f"{found[1]} is given to more than one container of {found[0]}. Give each its own number.",
    )


def address_of(host: Host) -> str | None:
    """Return the IP address that a container is given, None where it is none."""
    try:
        return str(ipaddress.ip_interface(host.get("lxc_container_address")).ip)
    except ValueError:
        return None


def address_problems(fleet: Fleet) -> Iterator[Problem]:
    """Check that each address is given once and that Ansible reaches a container at its own."""
    yield from duplicates(
        containers(fleet),
        "lxc_container_address",
        address_of,
        lambda found: f"{found} is given to more than one container. Give each its own address.",
    )

    def reached_at(host: Host) -> tuple[str, int] | None:
        if host.get("ansible_connection") == "local":
            return None
        return str(host.get("ansible_host") or host.name), int(host.get("ansible_port") or 22)

    yield from duplicates(
        fleet.values(),
        "ansible_host",
        reached_at,
        lambda found: f"{found[0]} is where Ansible reaches more than one host. Correct all but one.",
    )
    for host in containers(fleet):
        address, at = address_of(host), str(host.get("ansible_host") or "")
        if address is None or at == address:
            continue
        try:
            near = ipaddress.ip_address(at) in ipaddress.ip_interface(host.get("lxc_container_address")).network
        except ValueError:
            continue
        if near:
            yield one(
                host,
                "ansible_host",
                f"{at} is not {address} of lxc_container_address, so Ansible would reach another machine. "
                "Make the two equal.",
            )


def memory_problems(fleet: Fleet) -> Iterator[Problem]:
    """Check that /dev/shm leaves memory for the container's processes."""
    for host in fleet.values():
        size, memory = host.get("shm_size_mib"), host.get("lxc_container_memory_mib")
        if size is not None and size < 1:
            yield one(host, "shm_size_mib", f"{size} is not a size. Set it to a number of MiB above 0.")
        if size is not None and memory and 0 < memory <= size:
            yield one(
                host,
                "shm_size_mib",
                f"{size} is not below lxc_container_memory_mib, {memory}. What lies in /dev/shm counts as memory: "
                "lower the one or raise the other.",
            )


def driver_problems(fleet: Fleet) -> Iterator[Problem]:
    """Check the form of versions, and that a container gets driver libraries only, and of its host's version."""
    for host in fleet.values():
        version = host.get("nvidia_driver_version")
        if version is not None and not DRIVER.fullmatch(version):
            yield one(
                host,
                "nvidia_driver_version",
                f"is {version!r}, which is not a package's full version. Write it with the revision, such as "
                "580.126.09-1; `apt-cache policy` on the host lists those there are.",
            )
    for host, carrier in carried(fleet):
        if ("nvidia_driver", "main") in host.roles and host.get("nvidia_driver_scope") == "host":
            yield one(host, "nvidia_driver_scope", "is 'host', which brings the kernel's part. Set it to container.")
        mine, theirs = host.get("nvidia_driver_version"), carrier.get("nvidia_driver_version")
        if mine is not None and theirs is not None and mine != theirs:
            yield Problem(
                frozenset([host.name, carrier.name]),
                "nvidia_driver_version",
                f"is {mine} in {host.name} and {theirs} on its host. A container needs the version of its host's "
                "kernel module: set it on the host only, and in gpu_containers to "
                "{{ hostvars[lxc_host].nvidia_driver_version }}.",
            )


def gpus_of(host: Host) -> list[str]:
    """Return the GPUs among a container's devices."""
    return [device for device in host.get("lxc_container_devices") or [] if GPU.fullmatch(device)]


def gpu_problems(fleet: Fleet) -> Iterator[Problem]:
    """Check that a machine has the GPUs that it declares, and that a container expects its host's model."""
    for host in fleet.values():
        model, declared = host.get("gpu_preflight_model"), host.get("gpu_preflight_simulated") or []
        others = sorted({gpu["name"] for gpu in declared} - {model})
        if model and others:
            yield one(
                host,
                "gpu_preflight_model",
                f"is {model!r}, but gpu_preflight_simulated has {', '.join(others)}. Correct one of the two.",
            )
    for host, carrier in carried(fleet):
        mine, theirs = host.get("gpu_preflight_model"), carrier.get("gpu_preflight_model")
        if mine and theirs and mine != theirs:
            text = f"is {mine!r}, but {theirs!r} on its host {carrier.name}. Correct one of the two, or lxc_host."
            yield one(host, "gpu_preflight_model", text)
        expected, given = host.get("gpu_preflight_count"), len(gpus_of(host))
        if expected and given and expected != given:
            text = f"is {expected}, but lxc_container_devices has {given} GPUs. Correct one of the two."
            yield one(host, "gpu_preflight_count", text)


def stem(device: str) -> str:
    """Return a device path without the number at its end."""
    return device.rstrip("0123456789")


def device_problems(fleet: Fleet) -> Iterator[Problem]:
    """Check that containers use GPUs that their hosts have, and each GPU once."""
    for host, carrier in carried(fleet):
        if ("gpu_devices", "main") not in carrier.roles or carrier.get("gpu_devices_nodes") is None:
            continue
        nodes = {node["path"] for node in carrier.get("gpu_devices_nodes")}
        kinds = {stem(path) for path in nodes}
        missing = [
            device
            for device in host.get("lxc_container_devices") or []
            if device not in nodes and (device.startswith("/dev/nvidia") or stem(device) in kinds)
        ]
        if missing:
            yield one(
                host,
                "lxc_container_devices",
                f"not among gpu_devices_nodes of {carrier.name}: {', '.join(missing)}. Add them there, or take them "
                "out here.",
            )
    users: dict[tuple[str, str], set[str]] = defaultdict(set)
    for host, carrier in carried(fleet):
        for device in gpus_of(host):
            if device not in (carrier.get("lxc_shared_gpus") or []):
                users[carrier.name, device].add(host.name)
    for (carrier_name, device), names in users.items():
        if len(names) > 1:
            yield Problem(
                frozenset(names),
                "lxc_container_devices",
                f"{device} of {carrier_name} is given to more than one container. Leave it with one, or name it in "
                f"lxc_shared_gpus of {carrier_name}.",
            )


def definition_problems(fleet: Fleet, module: Any) -> Iterator[Problem]:
    """Report what the container module itself would refuse.

    Args:
        fleet: the inventory.
        module: the file of the module lxc_guest.
    """
    for host in containers(fleet):
        if host.get("lxc_container_vmid") is None:
            continue
        values = {item.name: host.get(f"lxc_container_{item.name}") for item in fields(module.Guest)}
        values = {item: tuple(value) if isinstance(value, list) else value for item, value in values.items()}
        values["mounts"] = tuple(module.Mount(**mount) for mount in host.get("lxc_container_mounts") or [])
        guest = module.Guest(**{item: value for item, value in values.items() if value is not None})
        for text in module.definition_problems(guest):
            variable, _, rest = text.partition(": ")
            if host.get(variable) is not None:
                yield one(host, variable, rest)


TENSOR_PARALLEL = ("tp", "tp-size", "tensor-parallel-size")


def deployment_problems(fleet: Fleet, module: Any) -> Iterator[Problem]:
    """Report deployments that disturb each other or want GPUs that their container has not.

    Args:
        fleet: the inventory.
        module: the file of the module sglang_deployments.
    """
    for host in fleet.values():
        deployments = [module.Deployment(**item) for item in host.get("sglang_deployments") or []]
        for text in module.shape_problems(deployments):
            variable, _, rest = text.partition(": ")
            yield one(host, variable, rest)
        count = len(gpus_of(host))
        for item in deployments if count else []:
            where = f"sglang_deployments, {item.name}"
            if outside := sorted(gpu for gpu in item.gpus if not 0 <= gpu < count):
                text = f"gpus has {outside}, but lxc_container_devices has {count} GPUs, 0 to {count - 1}. Correct one."
                yield one(host, where, text)
            flags = {key.replace("_", "-"): value for key, value in item.arguments.items()}
            width = next((int(flags[key]) for key in TENSOR_PARALLEL if str(flags.get(key, "")).isdecimal()), 1)
            if width > (have := len(item.gpus) or count):
                yield one(
                    host, where, f"tensor parallel size {width} needs as many GPUs, and it has {have}. Correct one."
                )


def node_problems(fleet: Fleet, module: Any) -> Iterator[Problem]:
    """Report device nodes that the module itself would refuse.

    Args:
        fleet: the inventory.
        module: the file of the module gpu_nodes.
    """
    for host in fleet.values():
        if ("gpu_devices", "main") in host.roles:
            for text in module.problems(host.get("gpu_devices_nodes") or []):
                variable, _, rest = text.partition(": ")
                yield one(host, variable, rest)


def environment_problems(fleet: Fleet, module: Any) -> Iterator[Problem]:
    """Report environments whose place the module itself would refuse.

    Args:
        fleet: the inventory.
        module: the file of the module uv_release.
    """
    for host in fleet.values():
        name, root = host.get("uv_venv_name"), host.get("uv_venv_root")
        if ("uv_venv", "main") in host.roles and name is not None and root is not None:
            for text in module.place_problems(SimpleNamespace(name=name, root=Path(root))):
                variable, _, rest = text.partition(": ")
                yield one(host, variable, rest)


def variant_problems(fleet: Fleet, matrix: Mapping[str, Any], module: Any) -> Iterator[Problem]:
    """Check that drivers, GPUs, locks and deployments are those that a CUDA variant can have.

    Args:
        fleet: the inventory.
        matrix: what images/matrix.py defines.
        module: the file of the module gpu_check.
    """
    variable, variants = "gpu_preflight_cuda_variant", matrix["read"]()
    for host in fleet.values():
        if not (name := host.get(variable)):
            continue
        try:
            variant = matrix["find"](variants, name)
        except matrix["MatrixError"] as error:
            yield one(host, variable, str(error))
            continue
        cuda = module.Cuda(name, variant.driver_floor, list(variant.architectures))
        model = host.get("gpu_preflight_model") or ""
        capability = host.get("gpu_preflight_compute_capability") or module.CAPABILITIES.get(model, "")
        version = str(host.get("nvidia_driver_version") or "")
        driver = version if DRIVER.fullmatch(version) else ""
        for text in module.cuda_problems(cuda, model or "its GPUs", capability, driver):
            yield one(host, variable, text.partition(": ")[2])
        lock = Path(host.get("uv_venv_requirements") or "")
        theirs, _, stack = lock.stem.rpartition("-")
        if theirs in variants and theirs != name:
            right = lock.with_name(f"{name}-{stack}.txt")
            text = f"{lock} belongs to {theirs}, but {variable} is {name!r}. Write {right}."
            yield one(host, "uv_venv_requirements", text)
        for item in host.get("sglang_deployments") or []:
            flags = {key.replace("_", "-"): value for key, value in (item.get("arguments") or {}).items()}
            try:
                variant.require_algorithm(str(flags.get("speculative-algorithm", "")))
            except matrix["MatrixError"] as error:
                yield one(host, f"sglang_deployments, {item['name']}", str(error))


def file_problems(fleet: Fleet, project: Path) -> Iterator[Problem]:
    """Check that locks and packages named for environments are on the controller.

    Args:
        fleet: the inventory.
        project: folder that relative paths start from.
    """
    for host in fleet.values():
        if ("uv_venv", "main") not in host.roles:
            continue
        named = {"uv_venv_requirements": [host.get("uv_venv_requirements")]}
        named["uv_venv_local_packages"] = host.get("uv_venv_local_packages") or []
        for variable, paths in named.items():
            for path in paths:
                if path is not None and not (project / path).exists():
                    yield one(host, variable, f"{path} is not below {project} on the controller. Correct the path.")


def limit_problems(fleet: Fleet, running: Iterable[str]) -> Iterator[Problem]:
    """Check that a run of a container takes its host along."""
    running = set(running)
    for host, carrier in carried(fleet):
        if host.name in running and carrier.name not in running:
            yield one(
                host,
                "lxc_host",
                f"{carrier.name} carries it and is not in this run. Add it: -l {host.name},{carrier.name}. The "
                "callback limit_with_hosts, enabled in ansible.cfg, does so by itself.",
            )


def group_problems(groups: Iterable[str], expected: Iterable[str]) -> Iterator[Problem]:
    """Find groups whose names are nearly those that the plays run on."""
    expected = set(expected)
    for group in sorted(set(groups) - expected):
        if meant := closest(group, expected, VERY_CLOSE):
            yield Problem(frozenset(), f"group {group}", f"no play runs on it. Write {meant}, or name it less alike.")


def report(problems: Iterable[Problem], running: Iterable[str]) -> list[str]:
    """Return the problems that concern hosts of this run, one line each; hosts with the same problem share a line."""
    running, merged = set(running), defaultdict[tuple[str, str], frozenset[str]](frozenset)
    for problem in problems:
        if not problem.hosts or problem.hosts & running:
            merged[problem.variable, problem.text] |= problem.hosts
    return sorted(str(Problem(hosts, *key)) for key, hosts in merged.items())


def read_plays(playbook: Path, load: Callable[[str], Any]) -> list[Play]:
    """Return the plays of a playbook and of those it imports.

    Args:
        playbook: its path.
        load: reads a YAML file.
    """
    plays: list[Play] = []
    for item in load(str(playbook)) or []:
        imported = item.get("ansible.builtin.import_playbook") or item.get("import_playbook")
        if imported:
            plays += read_plays(playbook.parent / imported, load)
            continue
        roles, variables = [], dict(item.get("vars") or {})
        for entry in item.get("roles") or []:
            entry = {"role": entry} if isinstance(entry, str) else entry
            roles.append((entry.get("role") or entry["name"], "main"))
            variables |= entry.get("vars") or {}
        for task in [task for key in ("pre_tasks", "tasks", "post_tasks") for task in item.get(key) or []]:
            entry = task.get("ansible.builtin.import_role") or task.get("ansible.builtin.include_role")
            if entry:
                roles.append((entry["name"], entry.get("tasks_from", "main").removesuffix(".yml")))
                variables |= task.get("vars") or {}
        plays.append(Play(str(item["hosts"]), tuple(roles), variables))
    return plays


class Resolved(Mapping[str, Any]):
    """A host's variables, each resolved when it is asked for."""

    def __init__(self, raw: Mapping[str, Any], template: Callable[[Any], Any]) -> None:
        """Resolve `raw` with `template`, which raises AnsibleError."""
        self._raw = raw
        self._template = template

    def __getitem__(self, name: str) -> Any:
        """Return the value, or an Unresolved."""
        raw = self._raw[name]
        try:
            return self._template(raw)
        except AnsibleError as error:
            reason = " ".join(str(error).split())
            return Unresolved(reason if reason.endswith(".") else f"{reason}.", self._made_from_facts(raw, set()))

    def __contains__(self, name: object) -> bool:
        """Tell whether the variable is set."""
        return name in self._raw

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._raw)

    def __len__(self) -> int:
        """Count the variables."""
        return len(self._raw)

    def _made_from_facts(self, raw: Any, seen: set[str]) -> bool:
        text = repr(raw)
        if FACTS.search(text):
            return True
        names = set(re.findall(r"[a-z_]\w*", text)) & self._raw.keys() - seen if "{{" in text else set()
        return any(self._made_from_facts(self._raw[name], seen | names) for name in names)


class ActionModule(ActionBase):
    """Report all problems of the inventory that concern this run."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset({"playbook"})

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Check the inventory; nothing is connected to."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        lines = report(self._problems(variables), variables["ansible_play_hosts_all"])
        if lines:
            result["failed"] = True
            heading = f"The inventory has {len(lines)} problem{'s' * (len(lines) > 1)}; no machine was touched."
            result["msg"] = "\n".join([heading, *(f"* {line}" for line in lines)])
        return result

    def _problems(self, variables: dict[str, Any]) -> Iterator[Problem]:
        playbook = Path(self._task.args["playbook"]).resolve()
        plays = read_plays(playbook, self._load)
        specs, defaults = self._roles()
        options = {**FLEET_OPTIONS, **{name: option for spec in specs.values() for name, option in spec.items()}}
        fleet = self._fleet(variables, plays, options, defaults)
        groups, running = variables["groups"], variables["ansible_play_hosts_all"]
        ours = {name: fleet[name] for name in running}
        misplaced = list(placement_problems(fleet, groups.get("lxc_hosts", [])))
        yield from misplaced
        yield from argument_problems(ours, specs, {name for problem in misplaced for name in problem.hosts})
        yield from name_problems(ours, {role for role, _ in specs}, options)
        yield from group_problems(groups, {name for play in plays for name in re.findall(r"\w+", play.pattern)})
        for check in (
            backend_problems,
            vmid_problems,
            address_problems,
            driver_problems,
            gpu_problems,
            device_problems,
        ):
            yield from check(fleet)
        yield from memory_problems(ours)
        yield from file_problems(ours, playbook.parent)
        ran = {role for host in ours.values() for role, _ in host.roles}
        if "lxc_container" in ran:
            yield from definition_problems(ours, self._module("lxc_container", "lxc_guest"))
        if "gpu_devices" in ran:
            yield from node_problems(ours, self._module("gpu_devices", "gpu_nodes"))
        if "uv_venv" in ran:
            yield from environment_problems(ours, self._module("uv_venv", "uv_release"))
        if "gpu_preflight" in ran:
            matrix = runpy.run_path(str(MATRIX))
            yield from variant_problems(ours, matrix, self._module("gpu_preflight", "gpu_check"))
        if "sglang" in ran:
            yield from deployment_problems(ours, self._module("sglang", "sglang_deployments"))
        yield from limit_problems(fleet, running)

    def _load(self, path: str) -> Any:
        return self._loader.load_from_file(path, trusted_as_template=True)

    def _roles(self) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, Any]]:
        """Return the options of each role's entry points, and the defaults of all roles."""
        specs: dict[tuple[str, str], dict[str, Any]] = {}
        defaults: dict[str, Any] = {}
        for folder in map(Path, constants.DEFAULT_ROLES_PATH):
            for file in sorted(folder.glob("*/meta/argument_specs.yml")):
                role = file.parents[1]
                for entry, spec in self._load(str(file))["argument_specs"].items():
                    specs[role.name, entry] = spec.get("options") or {}
                if (values := role / "defaults/main.yml").exists():
                    defaults |= self._load(str(values)) or {}
        return specs, defaults

    def _module(self, role: str, name: str) -> Any:
        """Return a module file of a role, loaded by path."""
        for folder in map(Path, constants.DEFAULT_ROLES_PATH):
            file = folder / role / "library" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(name, file)
            if file.exists() and spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                sys.modules.setdefault(name, module)
                spec.loader.exec_module(module)
                return module
        raise AnsibleError(f"There is no {role}/library/{name}.py in roles_path, {constants.DEFAULT_ROLES_PATH}.")

    def _fleet(
        self,
        variables: dict[str, Any],
        plays: list[Play],
        options: Mapping[str, Mapping[str, Any]],
        defaults: dict[str, Any],
    ) -> dict[str, Host]:
        lookup = lookup_loader.get("ansible.builtin.inventory_hostnames", loader=self._loader, templar=self._templar)
        members = {pattern: set(lookup.run([pattern], variables)) for pattern in {play.pattern for play in plays}}
        hostvars = variables["hostvars"]
        fleet = {}
        for name in hostvars:
            mine = [play for play in plays if name in members[play.pattern]]
            given = hostvars.raw_get(name)
            raw = {**defaults, **given, "hostvars": hostvars}
            for play in mine:
                raw |= play.variables
            template = self._templar.copy_with_new_env(available_variables=raw).template
            roles = [role for play in mine for role in play.roles]
            fleet[name] = Host(name, roles, given, Resolved(raw, template), options)
        return fleet
