"""Controller's part of gpu_check: looks a CUDA variant up in the matrix of environments."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

MATRIX = Path(__file__).resolve().parents[3] / "images" / "matrix.py"


def row(name: str) -> dict[str, Any]:
    """Return what the module needs of a variant.

    Raises:
        AnsibleActionFail: there is none of that name.
    """
    matrix = runpy.run_path(str(MATRIX))
    try:
        variant = matrix["find"](matrix["read"](), name)
    except matrix["MatrixError"] as error:
        raise AnsibleActionFail(f"gpu_preflight_cuda_variant: {error}") from error
    return {"variant": name, "driver_floor": variant.driver_floor, "architectures": list(variant.architectures)}


class ActionModule(ActionBase):
    """Run the module with the variant's row in the place of its name."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module."""
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        name = args.pop("cuda_variant", "")
        if name:
            args["cuda"] = row(name)
        return dict(self._execute_module(module_args=args, task_vars=task_vars))
