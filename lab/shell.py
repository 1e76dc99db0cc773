"""Run programs and say what went wrong in one message."""

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab.settings import LabError

CGROUP_V2_ONLY = 'umount -R /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup; exec "$@"'


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        LabError: it is missing or ended with an error; the message has the command and its last lines.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            env=None if env is None else dict(env),
            cwd=cwd,
            input=stdin,
        )
    except FileNotFoundError as error:
        raise LabError(f"{words[0]}: not found. `make doctor` lists what this machine lacks.") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-15:]
        raise LabError(f"`{shlex.join(words)}` ended with {done.returncode}:\n  " + "\n  ".join(lines))
    return done.stdout


def succeeds(argv: Sequence[str | Path]) -> bool:
    """Tell whether a program exists and ends without an error."""
    try:
        return subprocess.run([str(word) for word in argv], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def on_pure_cgroup2(argv: Sequence[str | Path]) -> list[str]:
    """Return the command so that it sees what Proxmox VE 8 has: cgroup2 alone at /sys/fs/cgroup.

    A machine that mixes both versions keeps its mounts; only the command's own mount namespace differs.
    """
    words = [str(word) for word in argv]
    if run(["stat", "-fc", "%T", "/sys/fs/cgroup"]).strip() == "cgroup2fs":
        return words
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", CGROUP_V2_ONLY, "sh", *words]


@contextlib.contextmanager
def phase(title: str) -> Iterator[None]:
    """Print a phase and the seconds it took."""
    start = time.monotonic()
    print(f"==> {title}", flush=True)
    try:
        yield
    except BaseException:
        print(f"==> {title}: failed after {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        raise
    print(f"==> {title}: {time.monotonic() - start:.1f} s", flush=True)
