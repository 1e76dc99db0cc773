"""Command line of the lab; the Makefile's targets call it."""

import argparse
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

from lab import doctor, machine, network
from lab.machine import Machine
from lab.settings import LabError, Settings
from lab.shell import phase


def packages(_: Settings, __: argparse.Namespace) -> None:
    """Install the Debian packages that this machine lacks."""
    doctor.install_packages()


def whole(settings: Settings, args: argparse.Namespace) -> None:
    """Build the lab and run site.yml to the end."""
    from lab import up

    up.up(settings, args.bare)


def provide(settings: Settings, _: argparse.Namespace) -> None:
    """Make what the lab's machines are given: root file systems, a model, wheels."""
    from lab import up

    up.provide(settings)


def mount(text: str) -> tuple[Path, str, bool]:
    """Parse SOURCE:TARGET or SOURCE:TARGET:ro.

    Raises:
        LabError: it is neither.
    """
    source, *rest = text.split(":")
    if len(rest) not in (1, 2) or rest[1:] not in ([], ["ro"]):
        raise LabError(f"--mount: {text!r} is not SOURCE:TARGET or SOURCE:TARGET:ro.")
    return Path(source), rest[0], len(rest) == 2


def machine_up(settings: Settings, args: argparse.Namespace) -> None:
    """Make one machine on the lab's network and print how to reach it."""
    network.up(settings)
    one = Machine(args.name, args.last, args.kind, args.unprivileged, tuple(map(mount, args.mount)))
    one.up(settings)
    print(f"ssh {' '.join(machine.ssh_options(settings))} root@{settings.address(args.last)}")


def machine_down(settings: Settings, args: argparse.Namespace) -> None:
    """Remove one machine."""
    Machine(args.name, 0).down(settings)


def down(settings: Settings, _: argparse.Namespace) -> None:
    """Remove every machine of this lab, its bridge, rules, keys and control groups."""
    with phase("lab down"):
        for folder in settings.lxcpath.iterdir() if settings.lxcpath.exists() else []:
            machine.remove(settings, folder.name)
        machine.clear_cgroups(settings)
        network.down(settings)
        machine.forbid_mapping(settings)
        shutil.rmtree(settings.state, ignore_errors=True)
        if not any(settings.shared.iterdir()) and not network.others(settings):
            settings.shared.rmdir()
    if settings.cache.exists():
        print(f"Kept for the next time: {settings.cache}, {megabytes(settings.cache)} MB.")


def megabytes(folder: Path) -> int:
    """Return the size of the files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) // 10**6


def examine(settings: Settings, _: argparse.Namespace) -> None:
    """Print what this machine lacks."""
    findings = doctor.examine(settings)
    print(doctor.report(findings))
    if any(finding.needed for finding in findings):
        raise SystemExit(1)


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("up", help="build the lab and run site.yml on it")
    build.add_argument("--bare", action="store_true", help="end before site.yml")
    build.set_defaults(call=whole)
    commands.add_parser("packages", help="install the Debian packages that are missing").set_defaults(call=packages)
    commands.add_parser("provide", help="make file systems, a model and wheels").set_defaults(call=provide)
    commands.add_parser("down", help="remove all that the lab made").set_defaults(call=down)
    commands.add_parser("doctor", help="say what this machine lacks").set_defaults(call=examine)
    one = commands.add_parser("machine", help="a single machine on the lab's network").add_subparsers(required=True)
    make = one.add_parser("up")
    make.add_argument("name")
    make.add_argument("--last", type=int, required=True, help="last number of its address, 2 to 254")
    make.add_argument("--kind", choices=["guest", "host"], default="guest")
    make.add_argument("--unprivileged", action="store_true")
    make.add_argument("--mount", action="append", default=[], metavar="SOURCE:TARGET[:ro]")
    make.set_defaults(call=machine_up)
    remove = one.add_parser("down")
    remove.add_argument("name")
    remove.set_defaults(call=machine_down)
    args = parser.parse_args()
    try:
        settings = Settings.from_environment()
        with nullcontext() if args.call is examine or args.call is packages else settings.exclusive():
            args.call(settings, args)
    except LabError as error:
        sys.exit(f"lab: {error}")


if __name__ == "__main__":
    main()
