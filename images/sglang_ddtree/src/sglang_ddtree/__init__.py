"""DDTree speculative decoding for SGLang: trees of a DFlash drafter's continuations, verified in one pass."""
