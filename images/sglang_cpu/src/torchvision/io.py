"""Readers of images."""

import enum

from torchvision._absent import absent

__getattr__ = absent(__name__)


class ImageReadMode(enum.Enum):
    """Colour modes of image readers; the numbers are torchvision's."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4
