"""Group sizes with a static hint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LARGEST_HINT = 2**31 - 1
"""Kernels take the hint as an int32; no group has more rows."""


@dataclass(frozen=True)
class GroupSizes:
    """Group sizes, and the usual number of rows per group.

    Attributes:
        value: integers [G] on the device of the rows.
        representative: usual number of rows per group, a static hint for the choice of tiles; results do not change.

    Raises:
        TypeError: the hint is not an integer. ValueError: it is less than 1.
    """

    value: Any
    representative: int | None = None

    def __post_init__(self) -> None:
        if not (self.representative is None or hasattr(self.representative, "__index__")):
            raise TypeError(
                f"`representative` of GroupSizes: {self.representative!r}, expected None or an integer; "
                "pass the usual number of rows per group."
            )
        if self.representative is not None and self.representative < 1:
            raise ValueError(
                f"`representative` of GroupSizes: {self.representative}, expected None or at least 1; "
                "pass the usual number of rows per group."
            )


def unwrap(group_sizes: Any) -> tuple[Any, int]:
    """(the integers, the hint or 0) of an argument that may be plain or `GroupSizes`."""
    if isinstance(group_sizes, GroupSizes):
        return group_sizes.value, min(int(group_sizes.representative or 0), _LARGEST_HINT)
    return group_sizes, 0
