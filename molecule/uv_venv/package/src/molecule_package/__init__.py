"""A module whose import needs the lock's package."""

from packaging.version import Version as Version
