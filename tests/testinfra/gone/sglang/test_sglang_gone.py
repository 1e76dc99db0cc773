"""Nothing of the servers is left; the model and the environment stay."""

from typing import Any

from testinfra.host import Host

GROUP = "sglang_servers"


def test_units_files_and_user_are_gone(host: Host, variables: dict[str, Any]) -> None:
    assert host.check_output("systemctl list-units --all --no-legend 'sglang@*'") == ""
    for path in (
        "/etc/sglang",
        "/etc/systemd/system/sglang@.service",
        "/etc/systemd/system/sglang-watchdog.timer",
        "/usr/local/sbin/sglang-gate",
        "/usr/local/sbin/sglang-watchdog",
        "/var/cache/sglang",
        "/var/cache/sglang-flags",
        "/var/lib/sglang-watchdog",
        "/var/lib/sglang",
    ):
        assert not host.file(path).exists, path
    assert not host.user(variables["sglang_user"]).exists


def test_model_and_environment_stay(host: Host, variables: dict[str, Any]) -> None:
    assert host.file(f"{variables['sglang_venv']}/bin/python").exists
    for deployment in variables["sglang_deployments"]:
        assert host.file(f"{deployment['model_path']}/config.json").exists
