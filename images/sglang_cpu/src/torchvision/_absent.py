"""What stands for the functions of torchvision."""

from collections.abc import Callable
from typing import Any, NoReturn


def absent(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` by which any function can be imported and none be called.

    Args:
        module: the module of torchvision it serves.
    """

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{module}.{name}: the CPU profile serves text only and has no torchvision")

        return refuse

    return get
