"""Functions on images."""

from torchvision._absent import absent

__getattr__ = absent(__name__)
