"""Rows of text in columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows, the first of them the heads, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
