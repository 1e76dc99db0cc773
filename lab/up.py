"""The whole lab: the host kpro6, what it needs before the play, and the play that makes ct200."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from lab import machine, model, network, rootfs
from lab.doctor import install_packages
from lab.machine import Machine
from lab.settings import ROOT, LabError, Settings
from lab.shell import phase, run

HOST, CONTAINER = ("kpro6", 6), ("ct200", 200)
INVENTORY = ROOT / "inventories" / "lab"
GUEST_ROOT = 100000
"""Who root of an unprivileged container is on its host; the package cache it writes to belongs to it."""

PIP = ROOT / "build" / "bootstrap" / "bin" / "pip"
TORCH_CPU = ROOT / "images" / "locks" / "torch-cpu.txt"
TORCH_CPU_INDEX = os.environ.get("LAB_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


def kpro6(settings: Settings) -> Machine:
    """Return the machine that plays the Proxmox host."""
    return Machine(
        *HOST,
        kind="host",
        mounts=(
            (settings.state / "models", "/var/lib/models", True),
            (settings.cache / "wheelhouse", "/var/lib/wheelhouse", True),
            (settings.cache / "guest/uv", "/var/cache/guest/uv", False),
        ),
    )


def provide(settings: Settings) -> None:
    """Make what an operator has before the first run: a model and wheels that PyPI does not carry."""
    with phase("root file systems"):
        for kind in ("host", "guest"):
            rootfs.archive(settings, kind)
    with phase("model"):
        model.make(settings.state / "models" / "tiny-qwen3")
    with phase("torch for the CPU"):
        fetch_torch(settings.cache / "wheelhouse")
    packages = settings.cache / "guest" / "uv"
    packages.mkdir(parents=True, exist_ok=True)
    os.chown(packages, GUEST_ROOT, GUEST_ROOT)


def fetch_torch(wheelhouse: Path) -> None:
    """Put PyTorch's CPU build into a folder, where it is not there with the right hash."""
    wheelhouse.mkdir(parents=True, exist_ok=True)
    pinned = TORCH_CPU.read_text()
    for file in wheelhouse.glob("torch-*.whl"):
        with file.open("rb") as wheel:
            if hashlib.file_digest(wheel, "sha256").hexdigest() in pinned:
                return
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--python-version", "3.11"]
    index = ["--extra-index-url", TORCH_CPU_INDEX]
    try:
        run([PIP, "download", "--quiet", *options, *index, "--dest", wheelhouse, "--requirement", TORCH_CPU])
    except LabError as error:
        raise LabError(
            f"LAB_TORCH_INDEX: {TORCH_CPU_INDEX} did not give the wheel of {TORCH_CPU.relative_to(ROOT)}. Name an "
            f"index that this machine reaches, or put the wheel into {wheelhouse}.\n{error}"
        ) from error


def play(settings: Settings, *words: str | Path) -> None:
    """Run site.yml for the container, with the output going to the terminal.

    Raises:
        LabError: the play failed.
    """
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), "site.yml", "-i", str(INVENTORY), "-l", "ct200"]
    env = {**os.environ, "LAB_SUBNET": str(settings.subnet), "LAB_STATE": str(settings.state.parent)}
    code = subprocess.run([*argv, *map(str, words)], cwd=ROOT, env=env, check=False).returncode
    if code:
        raise LabError(f"site.yml ended with {code}; the lines above say why. `make lab` goes on where it stopped.")


def up(settings: Settings, bare: bool = False) -> None:
    """Build the lab and run site.yml to the end.

    Args:
        settings: the lab.
        bare: end before site.yml, with the host as an installation leaves it.
    """
    with phase("packages of this machine"):
        install_packages()
    provide(settings)
    with phase("kpro6"):
        network.up(settings)
        kpro6(settings).up(settings)
    if bare:
        return
    with phase("site.yml -l ct200"):
        play(settings)
    print(summary(settings))


def summary(settings: Settings) -> str:
    """Return what is running now and how to talk to it."""
    url = f"http://{settings.address(CONTAINER[1])}:30000"
    ssh = f"ssh {' '.join(machine.ssh_options(settings))}"
    defaults = Settings.default()
    names = {
        "LAB_SUBNET": str(settings.subnet),
        "LAB_STATE": str(settings.state.parent),
        "LAB_CACHE": str(settings.cache),
    }
    usual = {
        "LAB_SUBNET": str(defaults.subnet),
        "LAB_STATE": str(defaults.state.parent),
        "LAB_CACHE": str(defaults.cache),
    }
    lab = "".join(f"{name}={value} " for name, value in names.items() if value != usual[name])
    return f"""
Running now:
  kpro6  {settings.address(HOST[1])}    the Proxmox host's place
  ct200  {settings.address(CONTAINER[1])}  the GPU container, with sglang@tiny.service

Talk to it:
  curl -w '%{{http_code}}\\n' {url}/health
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "tiny", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 16}}'
  {ssh} root@{settings.address(CONTAINER[1])}

Again, unchanged: {lab}.venv/bin/ansible-playbook site.yml -i inventories/lab -l ct200
Check again:      {lab}make verify
Remove it all:    {lab}make lab-down"""
