"""Nothing of the role is left: /dev/shm has the kernel's default size, which is half the memory."""

from testinfra.host import Host

GROUP = "gpu_containers"


def test_size_is_the_default(host: Host) -> None:
    size, default = host.check_output(
        "d=$(mktemp -d) && mount -t tmpfs tmpfs $d && df --block-size=1 --output=size /dev/shm $d; umount $d; rmdir $d"
    ).split()[1:]
    assert abs(int(size) - int(default)) < 4096 * 2


def test_fstab_does_not_name_it(host: Host) -> None:
    assert host.run("findmnt --fstab /dev/shm").rc == 1
