"""Fixtures: each test module names its GROUP, each test runs once per host of it that is within --limit."""

import functools
from typing import Any

import pytest
from testinfra.host import Host

from tests.testinfra.fleet import Fleet


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `ansible-playbook` that choose hosts, and the one that allows disruptions."""
    parser.addoption("--inventory", action="append", help="inventory path, several times for several")
    parser.addoption("--limit", help="only hosts of this pattern, as after ansible-playbook -l")
    parser.addoption("--disruptive", action="store_true", help="also run checks that stop and restart things")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "disruptive: stops or restarts a service or a machine; needs --disruptive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out disruptive checks unless they were asked for."""
    if config.getoption("--disruptive"):
        return
    left_out = [item for item in items if item.get_closest_marker("disruptive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@functools.cache
def fleet_of(inventories: tuple[str, ...], limit: str | None) -> Fleet:
    """Return the fleet, read once."""
    return Fleet(list(inventories) or None, limit)


def _fleet(config: pytest.Config) -> Fleet:
    return fleet_of(tuple(config.getoption("--inventory") or ()), config.getoption("--limit"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each host of its module's GROUP."""
    if "inventory_hostname" in metafunc.fixturenames:
        names = _fleet(metafunc.config).names(metafunc.module.GROUP)
        metafunc.parametrize("inventory_hostname", names, scope="module")


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """Return the inventory."""
    return _fleet(request.config)


@pytest.fixture(scope="module")
def host(fleet: Fleet, inventory_hostname: str) -> Host:
    """Return a connection to the host under test."""
    return fleet.host(inventory_hostname)


@pytest.fixture(scope="module")
def variables(fleet: Fleet, inventory_hostname: str) -> dict[str, Any]:
    """Return the variables of the host under test."""
    return fleet.variables(inventory_hostname)


@pytest.fixture(scope="module")
def carrier(fleet: Fleet, variables: dict[str, Any]) -> Host:
    """Return a connection to the machine that carries the container under test."""
    return fleet.host(variables["lxc_host"])
