"""Names of torchvision that SGLang imports at its start, for a profile that serves text only.

PyPI's torchvision is built against the CUDA build of PyTorch and does not load beside the CPU build. Text models never
call into it; here any use says so instead of failing in a stranger place.
"""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
