"""The platform class that takes the place of SGLang's own."""

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum


class CpuProfile(CpuSRTPlatform):
    """SGLang's CPU device operations, as an out-of-tree platform.

    As such SGLang uses the PyTorch form of its operators (rotary embedding, norms), where its own CPU platform needs
    kernels for AMX and its platform-less path looks for vLLM's. The memory pools are SGLang's.
    """

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        """Return the attention backend that needs nothing but PyTorch."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """Return the pool of keys and values."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        """Return the pool of compressed keys and values."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        """Return the allocator for pages of more than one token."""
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator
