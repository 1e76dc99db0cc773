"""The lab's bridge and the firewall rules that let its machines reach package mirrors."""

import re
from pathlib import Path

from lab.settings import LabError, Settings
from lab.shell import run, succeeds

FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


def rules(settings: Settings) -> list[list[str]]:
    """Return the iptables rules of this lab, each as the words after -A/-C/-D; all carry the bridge's name."""
    mark = ["-m", "comment", "--comment", settings.bridge]
    network = settings.network
    return [
        ["nat", "POSTROUTING", "-s", network, "!", "-d", network, *mark, "-j", "MASQUERADE"],
        ["filter", "FORWARD", "-i", settings.bridge, *mark, "-j", "ACCEPT"],
        ["filter", "FORWARD", "-o", settings.bridge, *mark, "-j", "ACCEPT"],
    ]


def others(settings: Settings) -> list[str]:
    """Return the bridges of other labs on this machine."""
    links = (folder.name for folder in Path("/sys/class/net").iterdir())
    return sorted(name for name in links if re.fullmatch(r"gpulab\d+", name) and name != settings.bridge)


def up(settings: Settings) -> None:
    """Make the bridge and the rules that are not there yet.

    Raises:
        LabError: the lab's network is in use by another interface of this machine.
    """
    for line in run(["ip", "-o", "-4", "address", "show"]).splitlines():
        _, device, _, address = line.split()[:4]
        if address.startswith(f"10.{settings.subnet}.") and device != settings.bridge:
            raise LabError(
                f"LAB_SUBNET: {settings.network} is already used by {device} ({address}). Set another LAB_SUBNET."
            )
    if not succeeds(["ip", "link", "show", settings.bridge]):
        run(["ip", "link", "add", settings.bridge, "type", "bridge"])
    run(["ip", "address", "replace", f"{settings.gateway}/24", "dev", settings.bridge])
    run(["ip", "link", "set", settings.bridge, "up"])
    saved = settings.shared / "ip_forward"
    if FORWARDING.read_text().strip() != "1":
        saved.write_text(FORWARDING.read_text())
        FORWARDING.write_text("1\n")
    for table, chain, *words in rules(settings):
        if not succeeds(["iptables", "-w", "-t", table, "-C", chain, *words]):
            run(["iptables", "-w", "-t", table, "-I", chain, *words])


def down(settings: Settings) -> None:
    """Take away what `up` made; nothing happens where nothing is left."""
    for table, chain, *words in rules(settings):
        while succeeds(["iptables", "-w", "-t", table, "-D", chain, *words]):
            pass
    if succeeds(["ip", "link", "show", settings.bridge]):
        run(["ip", "link", "delete", settings.bridge])
    saved = settings.shared / "ip_forward"
    if saved.exists() and not others(settings):
        FORWARDING.write_text(saved.read_text())
        saved.unlink()
