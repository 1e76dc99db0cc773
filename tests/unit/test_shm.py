"""The size of /dev/shm: what is refused, what is written."""

import pytest

from tests.unit.loading import load

dev_shm = load("roles/shm/library/dev_shm.py")

MIB = 1024 * 1024
MOUNTINFO = """\
770 214 254:0 /var/lib/lxc/200/rootfs / rw,relatime shared:80 - ext4 /dev/vda rw
771 770 0:101 / /dev rw,relatime shared:97 - tmpfs none rw,size=492k,mode=755,uid=100000,gid=100000
945 771 0:124 / /dev/shm rw,nosuid,nodev shared:525 - tmpfs tmpfs rw,size=307200k,uid=100000,gid=100000
"""


def test_flags_of_the_mount_are_read() -> None:
    assert dev_shm.mount_flags(MOUNTINFO) == ("rw", "nosuid", "nodev")


def test_the_last_mount_on_top_counts() -> None:
    over = "950 945 0:130 / /dev/shm rw,nosuid,nodev,noexec - tmpfs tmpfs rw\n"
    assert dev_shm.mount_flags(MOUNTINFO + over) == ("rw", "nosuid", "nodev", "noexec")


@pytest.mark.parametrize(
    ("mountinfo", "said"),
    [
        ("", "/dev/shm is not a mount point. Mount a tmpfs there"),
        ("945 771 0:124 / /dev/shm rw - ext4 /dev/sda1 rw\n", "/dev/shm is a ext4, not a tmpfs."),
    ],
)
def test_anything_but_a_tmpfs_is_refused(mountinfo: str, said: str) -> None:
    with pytest.raises(dev_shm.ShmError, match="not a") as error:
        dev_shm.mount_flags(mountinfo)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([], 24684568 * 1024),
        (["max\n"], 24684568 * 1024),
        (["4294967296\n"], 4294967296),
        (["9223372036854771712\n", "2147483648\n"], 2147483648),
    ],
)
def test_memory_is_the_lowest_limit(limits: list[str], expected: int) -> None:
    assert dev_shm.memory("MemFree:  1 kB\nMemTotal:       24684568 kB\n", limits) == expected


@pytest.mark.parametrize(
    ("size_mib", "used", "said"),
    [
        (0, 0, ["shm_size_mib is 0. Set it to a number of MiB above 0."]),
        (1024, 0, ["shm_size_mib is 1024, but the machine has 1024 MiB of memory"]),
        (100, 100 * MIB + 1, ["shm_size_mib is 100, but 101 MiB of /dev/shm are in use."]),
        (2048, 3000 * MIB, ["but the machine has 1024 MiB", "but 3000 MiB of /dev/shm are in use"]),
        (1023, 1023 * MIB, []),
    ],
)
def test_all_problems_are_named_together(size_mib: int, used: int, said: list[str]) -> None:
    found = dev_shm.problems(size_mib, 1024, dev_shm.Mount((), 4096 * MIB, used))
    assert len(found) == len(said)
    for problem, part in zip(found, said, strict=True):
        assert part in problem


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("rw", "nosuid", "nodev"), "nosuid,nodev,size=300m"),
        (("rw", "relatime"), "nosuid,nodev,size=300m"),
        (("rw", "nosuid", "nodev", "noexec"), "nosuid,nodev,noexec,size=300m"),
    ],
)
def test_locked_flags_stay(flags: tuple[str, ...], expected: str) -> None:
    assert dev_shm.mount_options("300m", flags) == expected


LINE = "tmpfs /dev/shm tmpfs nosuid,nodev,size=300m 0 0"


@pytest.mark.parametrize(
    ("fstab", "line", "expected"),
    [
        ("", LINE, f"{LINE}\n"),
        ("# none\n", LINE, f"# none\n{LINE}\n"),
        ("/dev/sda1 / ext4 defaults 0 1", LINE, f"/dev/sda1 / ext4 defaults 0 1\n{LINE}\n"),
        (
            "none /dev/shm tmpfs defaults 0 0\n/dev/sda1 / ext4 defaults 0 1\n",
            LINE,
            f"{LINE}\n/dev/sda1 / ext4 defaults 0 1\n",
        ),
        (f"{LINE}\n{LINE}\n", LINE, f"{LINE}\n"),
        (f"#{LINE}\n", LINE, f"#{LINE}\n{LINE}\n"),
        ("tmpfs /dev/shm/inner tmpfs defaults 0 0\n", LINE, f"tmpfs /dev/shm/inner tmpfs defaults 0 0\n{LINE}\n"),
        (f"# none\n{LINE}\n", None, "# none\n"),
        ("# none\n", None, "# none\n"),
    ],
)
def test_fstab_has_one_line_for_it(fstab: str, line: str | None, expected: str) -> None:
    assert dev_shm.with_line(fstab, line) == expected
    assert dev_shm.with_line(expected, line) == expected
