"""The second version of the transformations."""

from torchvision.transforms.v2 import functional

__all__ = ["functional"]
