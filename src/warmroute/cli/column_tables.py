"""Tables that fit the terminal: columns that have no room go into a further table, below the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_FRAME: Final = 3
"""Characters that a column takes besides its content: a line and two spaces."""
_HEAD: Final = 9
"""A longer head is broken into lines."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    head: str
    cells: Sequence[Text]
    """One for each row."""
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        from rich.cells import cell_len

        words = [cell_len(word) for word in self.head.split()]
        return max([min(cell_len(self.head), _HEAD), *words, *(cell.cell_len for cell in self.cells)])

    @property
    def full_width(self) -> int:
        """With the head in one line."""
        from rich.cells import cell_len

        return max(self.width, cell_len(self.head))

    @property
    def head_lines(self) -> str:
        return "\n".join(wrap(self.head, self.width, break_long_words=False)) if self.head else ""


def fit_tables(
    keys: Sequence[TableColumn],
    columns: Sequence[TableColumn],
    width: int,
    title: str = "",
    sections: Sequence[int] = (),
    framed: bool = True,
) -> Iterator[Table]:
    """Yield tables of at most `width` characters. Each has the key columns, which name the rows, and some others.

    `sections`: numbers of the rows that end a section. A key that is too long is broken into lines.
    """
    if 1 + sum(column.full_width + _FRAME for column in (*keys, *columns)) <= width:
        yield _table(keys, columns, title, sections, width, framed, break_heads=False)
        return
    key_width = _key_width(keys, width, max((column.width for column in columns), default=0))
    room = width - 1 - sum(min(column.width, key_width) + _FRAME for column in keys)
    at = 0
    while at < len(columns):
        count, left = 1, room - columns[at].width - _FRAME
        while at + count < len(columns) and columns[at + count].width + _FRAME <= left:
            left -= columns[at + count].width + _FRAME
            count += 1
        yield _table(keys, columns[at : at + count], title if at == 0 else "", sections, key_width, framed)
        at += count


def _key_width(keys: Sequence[TableColumn], width: int, widest: int) -> int:
    """Return the largest width of a key column that leaves room for the widest other column."""
    limit = max((column.width for column in keys), default=0)
    while limit > 8 and 1 + sum(min(column.width, limit) + _FRAME for column in keys) + widest + _FRAME > width:
        limit -= 1
    return limit


def _table(
    keys: Sequence[TableColumn],
    columns: Sequence[TableColumn],
    title: str,
    sections: Sequence[int],
    key_width: int,
    framed: bool,
    break_heads: bool = True,
) -> Table:
    from rich.table import Table

    if framed:
        table = Table(title=title or None, title_justify="left", header_style="bold")
    else:
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in keys:
        table.add_column(
            column.head_lines if break_heads else column.head,
            justify=column.justify,
            max_width=key_width,
            overflow="fold",
        )
    for column in columns:
        table.add_column(column.head_lines if break_heads else column.head, justify=column.justify, no_wrap=True)
    shown = [*keys, *columns]
    for row in range(len(shown[0].cells)):
        table.add_row(*(column.cells[row] for column in shown), end_section=row in sections)
    return table
