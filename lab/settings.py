"""Where the lab keeps things and which addresses it uses."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""

DEFAULT_SUBNET = 77
LOCKS = Path("/run/lock")


class LabError(Exception):
    """Something about this machine or this call that the operator can mend; the text says what and how."""


@dataclass(frozen=True)
class Settings:
    """One lab on this machine. Several can run side by side when their subnets differ.

    Attributes:
        subnet: N of the network 10.N.0.0/24 and of the bridge gpulabN (1 to 254).
        state: root-only folder with keys and container file systems; `down` removes it.
        cache: root file systems, packages and wheels that survive `down`; safe to delete.
    """

    subnet: int
    state: Path
    cache: Path

    @classmethod
    def default(cls) -> "Settings":
        """Return what holds where the environment says nothing."""
        return cls(DEFAULT_SUBNET, Path("/var/lib/gpufleet-lab") / str(DEFAULT_SUBNET), Path("/var/cache/gpufleet-lab"))

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read LAB_SUBNET, LAB_STATE and LAB_CACHE.

        Raises:
            LabError: LAB_SUBNET is not a whole number from 1 to 254.
        """
        usual = cls.default()
        text = os.environ.get("LAB_SUBNET", str(usual.subnet))
        if not text.isdecimal() or not 1 <= int(text) <= 254:
            raise LabError(f"LAB_SUBNET: {text!r} is not a whole number from 1 to 254. Unset it for {DEFAULT_SUBNET}.")
        state = Path(os.environ.get("LAB_STATE", usual.state.parent)) / text
        cache = Path(os.environ.get("LAB_CACHE", usual.cache))
        return cls(int(text), state, cache)

    @property
    def shared(self) -> Path:
        """Folder of what all labs of this machine have in common, made on first use."""
        folder = self.state.parent / "shared"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other commands away from this lab.

        Raises:
            LabError: one of them is at work.
        """
        path = LOCKS / f"gpufleet-lab{self.subnet}"
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LabError(
                    f"another command is building or removing the lab {self.subnet}. Wait for its end, or end it, and "
                    "run again."
                ) from None
            yield

    @property
    def bridge(self) -> str:
        """The bridge on this machine, also the mark on everything else the lab makes."""
        return f"gpulab{self.subnet}"

    @property
    def network(self) -> str:
        """The lab's network in CIDR form."""
        return f"10.{self.subnet}.0.0/24"

    @property
    def gateway(self) -> str:
        """This machine's address in the lab's network."""
        return self.address(1)

    def address(self, last: int) -> str:
        """Return the lab address that ends in `last`."""
        return f"10.{self.subnet}.0.{last}"

    @property
    def lxcpath(self) -> Path:
        """Where the lab's own containers lie."""
        return self.state / "lxc"

    @property
    def key(self) -> Path:
        """The private key that reaches every machine of the lab."""
        return self.state / "ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """Host keys of the lab's machines, written when they are made."""
        return self.state / "ssh" / "known_hosts"

    @cached_property
    def identity(self) -> str:
        """A short mark of this lab, used in host interface names (at most 15 characters with a suffix)."""
        return hashlib.sha256(self.bridge.encode()).hexdigest()[:6]
