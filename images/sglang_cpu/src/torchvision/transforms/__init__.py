"""Transformations of images."""

import enum

from torchvision.transforms import functional


class InterpolationMode(enum.Enum):
    """Ways to resize; the values are torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__all__ = ["InterpolationMode", "functional"]
