"""Hosts of adapters: packages that users install, and that we do not need."""

from __future__ import annotations

import importlib.util
import sys


def check_installed(package: str, docs: str) -> None:
    """Says which document lists the releases of a host that is not installed.

    Args:
        package: its name in imports. docs: the document, a path in this project.

    Raises:
        ModuleNotFoundError: there is no such package.
    """
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{package}: not installed, expected a release that {docs} lists; install it.", name=package
        )
