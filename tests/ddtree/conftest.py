"""Tests of images/sglang_ddtree. They need an environment with SGLang: images/sglang_ddtree/README.md says how."""

import importlib.util
import os
from pathlib import Path

import pytest

WANTED = ("torch", "sglang", "sglang_cpu", "sglang_ddtree", "hypothesis")
if not Path("/dev/nvidiactl").exists():
    # Triton decides where kernels run when they are defined.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-all`."""
    parser.addoption("--slow", action="store_true", help="also what takes long")


def pytest_configure() -> None:
    """Refuse an environment in which nothing here could run."""
    missing = [name for name in WANTED if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(
            f"tests/ddtree: {', '.join(missing)} cannot be imported here; "
            "images/sglang_ddtree/README.md says how to make the environment"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless they were asked for."""
    if not config.getoption("--slow"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
