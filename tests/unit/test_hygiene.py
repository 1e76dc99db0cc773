"""What is in the repository could be shown to anyone and runs anywhere: no secrets, no private places, no ballast."""

import ipaddress
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.loading import ROOT

LARGEST_BYTES = 500_000
LOCKS = ("locks/", "images/locks/")
"""Made by uv and made of hashes; only their size and hosts are checked."""
DOCUMENTATION = [
    ipaddress.ip_network(text) for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
]
LOCAL = [ipaddress.ip_network(text) for text in ("127.0.0.0/8", "0.0.0.0/32", "::/128", "::1/128")]
LAB_FOLDERS = ("lab/", "molecule/", "tests/", "inventories/lab/")
LAB_NETWORK = ipaddress.ip_network("10.0.0.0/8")

ADDRESS = re.compile(
    r"(?<![\w.:-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.:-]*\d)|(?<![\w:.])(?:[0-9a-f]{1,4}:){2,7}[0-9a-f:]+(?!\w)"
)
HOSTS = re.compile(r"\b(?:pypi|files\.pythonhosted|(?:deb|security|ftp)\.debian)\.(?:org|net)\b")
PLACES = re.compile(r"(?<![\w.])/(?:" + "|".join(["work", "home", "Users", "mnt"]) + r")/[\w.-]+")
SECRETS = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[\w+/=]{16}"),
    "a token": re.compile(
        r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9]{32,})\b"
    ),
    "a password in an address": re.compile(r"\b[a-z]+://[^/\s:@{}'\"]+:[^/\s:@{}'\"]+@"),
    "a secret in clear": re.compile(
        r"^\s*\w*(?:password|secret|api_key|token):[ \t]+[\"']?(?![\"'!{|>]|\s)\S", re.M | re.I
    ),
}

SETTINGS = (".yml", ".yaml", ".j2", ".cfg", ".ini", ".toml", ".env")


def tracked() -> list[Path]:
    """Return the files in the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def texts(locks: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file, with or without locks."""
    for file in tracked():
        name = str(file.relative_to(ROOT))
        if locks or not name.startswith(LOCKS):
            yield name, file.read_text()


def addresses(text: str) -> set[str]:
    """Return the IP addresses in a text."""
    found = set()
    for candidate in ADDRESS.findall(text):
        try:
            found.add(str(ipaddress.ip_address(candidate)))
        except ValueError:
            continue
    return found


def allowed(address: str, name: str) -> bool:
    """Tell whether a file may contain an address."""
    ip = ipaddress.ip_address(address)
    networks = [*DOCUMENTATION, *LOCAL, *([LAB_NETWORK] if name.startswith(LAB_FOLDERS) else [])]
    return any(ip in network for network in networks if network.version == ip.version)


def test_files_are_small_text() -> None:
    large = {
        str(file.relative_to(ROOT)): file.stat().st_size for file in tracked() if file.stat().st_size > LARGEST_BYTES
    }
    assert large == {}
    assert [str(file.relative_to(ROOT)) for file in tracked() if b"\0" in file.read_bytes()] == []


def test_addresses_are_for_documentation() -> None:
    found = {(name, one) for name, text in texts() for one in addresses(text) if not allowed(one, name)}
    assert found == set()


def test_no_registry_or_mirror_is_named() -> None:
    assert {(name, host) for name, text in texts(locks=True) for host in HOSTS.findall(text)} == set()


def test_no_place_on_a_machine_is_named() -> None:
    assert {(name, place) for name, text in texts() for place in PLACES.findall(text)} == set()


@pytest.mark.parametrize("what", SECRETS)
def test_no_secret_is_there(what: str) -> None:
    kinds = SETTINGS if what == "a secret in clear" else ("",)
    assert {name for name, text in texts() if name.endswith(kinds) and SECRETS[what].search(text)} == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("at 192.0.2.8, or 192.0.2.7/24", {"192.0.2.8", "192.0.2.7"}),
        ("2001:db8::1 and [2001:db8:1:2::3]:22", {"2001:db8::1", "2001:db8:1:2::3"}),
        ("version 580.126.09-1, 1.2.3, at 10:20:30, slot 0000:01:00.0", set()),
    ],
)
def test_addresses_are_found(text: str, found: set[str]) -> None:
    assert addresses(text) == found


def test_other_addresses_are_refused() -> None:
    public, lab = str(ipaddress.ip_address(0x08080808)), str(ipaddress.ip_address(0x0A4D0006))
    assert not allowed(public, "docs/inventory.md")
    assert not allowed(lab, "inventories/example/hosts.yml")
    assert allowed(lab, "inventories/lab/hosts.yml")
    assert not allowed(public, "inventories/lab/hosts.yml")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a private key", "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3Bl" * 9),
        ("a token", "HF_TOKEN=hf_" + "a" * 34),
        ("a password in an address", "https://user" + ":word@example.org/"),
        ("a secret in clear", "    api_key" + ": abc123"),
    ],
)
def test_secrets_are_found(what: str, text: str) -> None:
    assert SECRETS[what].search(text)


def test_a_vaulted_or_templated_secret_is_none() -> None:
    clear = SECRETS["a secret in clear"]
    assert not clear.search('api_key: !vault |\n  $ANSIBLE_VAULT\napi_key: "{{ vault_api_key }}"\napi_key: ""\n')


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {re.split(r"[<>=~\[;]", line)[0] for line in wanted}
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/decisions.md").read_text(), re.M)
    assert names == {name for row in rows for name in row.split(", ")} - {"Package", "---"}


def test_links_in_pages_lead_somewhere() -> None:
    dead = {
        (name, target)
        for name, text in texts()
        if name.endswith(".md")
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        if not (ROOT / name).parent.joinpath(target).exists()
    }
    assert dead == set()


def test_roles_and_playbooks_do_not_know_the_lab() -> None:
    """What differs between the lab and a fleet is data of the inventory."""
    words = re.compile(r"\blab\b|\blab_|gpusim|gpulab", re.I)
    folders = ("roles/", "playbooks/", "plugins/", "site.yml")
    found = {
        (name, line)
        for name, text in texts()
        if name.startswith(folders)
        for line in text.splitlines()
        if words.search(line)
    }
    assert found == set()
