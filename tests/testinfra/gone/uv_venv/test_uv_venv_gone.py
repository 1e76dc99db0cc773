"""Nothing of the environment is left, nor what only environments use."""

from typing import Any

from testinfra.host import Host

GROUP = "gpu_containers"


def test_environment_is_gone(host: Host, variables: dict[str, Any]) -> None:
    assert not host.file(f"{variables['uv_venv_root']}/{variables['uv_venv_name']}").exists


def test_shared_folders_are_gone_with_the_last_environment(host: Host, variables: dict[str, Any]) -> None:
    for folder in (variables["uv_venv_root"], variables["uv_venv_cache_dir"]):
        assert host.run("mountpoint --quiet %s", folder).rc == 0 or not host.file(folder).exists, folder
