"""Tables on standard output: results that people read and scripts cut."""

import sys
from collections.abc import Sequence


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Write rows of cells in aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def size(num_bytes: int) -> str:
    """Bytes as people read them: 44.1 MB."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"
