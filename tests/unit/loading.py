"""Load a plugin file by its place in the repository, as Ansible does: by path, not as a package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """Return the module in `path` (relative to the repository), loaded once per test run.

    Raises:
        FileNotFoundError: there is no such file.
    """
    file = ROOT / path
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
