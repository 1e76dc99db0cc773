"""The CPU profile: SGLang's server on a machine without an accelerator, for tests and the lab."""


def activate() -> str | None:
    """Return the platform's class for SGLang's plugin loader, None on a machine where PyTorch sees CUDA."""
    import torch

    if torch.cuda.is_available():
        return None
    return "sglang_cpu.platform.CpuProfile"
