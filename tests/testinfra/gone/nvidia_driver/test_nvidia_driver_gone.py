"""No package, pin, hold, block or source of the driver is left."""

from testinfra.host import Host

GROUP = "lxc_hosts:gpu_containers"


def test_packages_and_holds_are_gone(host: Host) -> None:
    shown = host.run("dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\\n' '*nvidia*' 'libcuda1*'").stdout
    assert [line for line in shown.splitlines() if line.startswith("ii")] == []
    assert host.check_output("apt-mark showhold") == ""


def test_apt_knows_nothing_of_the_driver(host: Host) -> None:
    found = host.run("grep -rliE 'nvidia' /etc/apt").stdout
    assert found == ""
    assert "non-free" not in host.check_output("apt-cache policy")
