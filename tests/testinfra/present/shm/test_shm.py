"""/dev/shm has its size, really holds that much, and keeps the size at the next boot."""

from typing import Any

import pytest
from testinfra.host import Host

GROUP = "gpu_containers"
MIB = 1024 * 1024


def test_df_shows_the_size(host: Host, variables: dict[str, Any]) -> None:
    assert host.check_output("df --block-size=1 --output=size /dev/shm").split()[1:] == [
        str(variables["shm_size_mib"] * MIB)
    ]


def test_fstab_sets_the_size_at_boot(host: Host, variables: dict[str, Any]) -> None:
    lines = [line.split() for line in host.file("/etc/fstab").content_string.splitlines()]
    options = [line[3].split(",") for line in lines if len(line) > 3 and line[1] == "/dev/shm"]
    assert len(options) == 1
    assert f"size={variables['shm_size_mib']}m" in options[0]


def test_the_boot_unit_applied_fstab(host: Host) -> None:
    assert host.check_output("systemctl show --property=Result --value systemd-remount-fs.service") == "success"


@pytest.mark.disruptive
def test_what_is_free_can_be_written_and_no_more(host: Host) -> None:
    """Write until the kernel says that no space is left; a size above the memory would end the writer instead.

    Whoever else writes to /dev/shm meanwhile gets the same answer, so this is not for a busy container.
    """
    free = int(host.check_output("df --block-size=1 --output=avail /dev/shm").split()[1])
    needed = host.check_output("awk '/^MemAvailable:/ {print $2}' /proc/meminfo")
    if int(needed) * 1024 < free:
        pytest.fail(
            f"{free // MIB} MiB of /dev/shm are free, but only {int(needed) // 1024} MiB of memory are available"
        )
    result = host.run(
        "file=$(mktemp -p /dev/shm) && trap 'rm -f \"$file\"' EXIT; "
        'LC_ALL=C dd if=/dev/zero of="$file" bs=1M; stat -c \'written %s\' "$file"'
    )
    assert "No space left on device" in result.stderr
    written = int(result.stdout.split("written")[1])
    assert free - MIB < written <= free
