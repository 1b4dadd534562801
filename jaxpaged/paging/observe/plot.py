"""Pictures of a pool: who holds which page, as text for a terminal and as a PNG.

Each page is a cell, in the order of page ids. Of a large pool a cell stands for several neighbours, and shows what most
of them are. matplotlib is imported by `save_png` and nothing else.
"""

import dataclasses
import os
import string
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from jaxpaged.config import cdiv
from jaxpaged.paging.records import CACHED, FREE, NULL, PINNED, SHARED, USED, PoolSnapshot

_NAMES = {FREE: "free", NULL: "null", USED: "used", SHARED: "shared", CACHED: "cached", PINNED: "pinned"}
_GLYPHS = {FREE: "·", NULL: "#", CACHED: "+", PINNED: "*"}
_LETTERS = string.ascii_lowercase
_TERMINAL_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_STATE_COLOURS = {FREE: "#e8e8e8", NULL: "#202020", CACHED: "#9a9a9a", PINNED: "#c9a400"}
_MAX_ROWS = 32
_MAX_NAMES = 12
_CELL_PIXELS, _GAP_PIXELS = 12, 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Cells:
    """What to draw. Arrays of `[num_cells]`.

    Attributes:
        state: The most frequent of its pages.
        owner: The first owner of the first page in that state.
        fill: Tokens of its pages, as a fraction of their slots.
        pages_per_cell: Page ids a cell; the last has the rest.
    """

    state: npt.NDArray[np.intp]
    owner: npt.NDArray[np.int32]
    fill: npt.NDArray[np.float64]
    pages_per_cell: int


def caption(snapshot: PoolSnapshot) -> str:
    """The pool in a sentence or three: how many pages are what, how empty the used ones are, what sharing saves."""
    counts = np.bincount(snapshot.state, minlength=len(_NAMES)).tolist()
    num_used = counts[USED] + counts[SHARED]
    parts = [f"{num_used:,} used" + (f" ({counts[SHARED]:,} of them shared)" if counts[SHARED] else "")]
    parts += [f"{counts[state]:,} {_NAMES[state]}" for state in (PINNED, CACHED) if counts[state]]
    parts += [f"{counts[FREE]:,} free", f"{counts[NULL]:,} null"]
    text = f"{len(snapshot.state):,} pages of {snapshot.page_size} tokens: {', '.join(parts)}."
    if num_used:
        used = (snapshot.state == USED) | (snapshot.state == SHARED)
        empty = 1 - snapshot.fill[used].sum() / (num_used * snapshot.page_size)
        unshared = int(snapshot.ref_count[used].sum())
        saved = unshared - num_used
        text += f" Fragmentation: {empty:.1%} of the used slots are empty."
        text += f" Sharing saves {saved:,} of {unshared:,} pages ({saved / unshared:.0%})."
    return text


def pool_text(snapshot: PoolSnapshot, *, title: str = "", width: int = 72) -> Text:
    """The pool for a terminal: a letter for the first owner of each page, a capital where it is shared.

    Args:
        title: A line above.
        width: Columns of the terminal.
    """
    cells_per_row = max(8, (width - 10) // 8 * 8)
    cells = _cells(snapshot, cells_per_row * _MAX_ROWS)
    text = Text()
    if title:
        text.append(f"{_shown(title)}\n", style="bold")
    for begin in range(0, len(cells.state), cells_per_row):
        text.append(f"{begin * cells.pages_per_cell:>8}  ", style="dim")
        for i in range(begin, min(begin + cells_per_row, len(cells.state))):
            text.append(*_glyph(cells, i))
        text.append("\n")
    text.append(_text_legend(snapshot, cells) + "\n" + caption(snapshot))
    return text


def save_png(snapshot: PoolSnapshot, path: str | os.PathLike, *, title: str = "") -> None:
    """Draw the pool into a PNG file: a colour for each owner, filled to the height of the tokens in the page.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = _cells(snapshot, 64 * 64)
    columns = min(len(cells.state), 16 * max(1, round(np.sqrt(2 * len(cells.state)) / 16)))
    num_rows = cdiv(len(cells.state), columns)
    figure = Figure(figsize=(9, 1.9 + 7.4 * num_rows / columns), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(_image(cells, columns), extent=(0, columns, num_rows, 0), interpolation="nearest")
    labelled = range(0, num_rows, cdiv(num_rows, 16))
    axes.set_yticks([row + 0.5 for row in labelled], [f"{row * columns * cells.pages_per_cell:,}" for row in labelled])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("page id" if cells.pages_per_cell == 1 else f"page id, {cells.pages_per_cell} pages a cell")
    axes.set_title(_unformatted(_shown(title)), fontsize=11)
    figure.legend(
        handles=_patches(snapshot, cells), loc="outside lower center", ncols=6, fontsize=8, frameon=False,
        title=caption(snapshot).replace(". ", ".\n"), title_fontsize=9,
    )  # fmt: skip
    figure.savefig(path, format="png")


def _cells(snapshot: PoolSnapshot, max_cells: int) -> _Cells:
    num_pages = len(snapshot.state)
    per_cell = cdiv(num_pages, max_cells)
    num_cells = cdiv(num_pages, per_cell)
    pages = np.arange(num_pages)
    counts = np.bincount(pages // per_cell * len(_NAMES) + snapshot.state, minlength=num_cells * len(_NAMES))
    state = counts.reshape(num_cells, -1).argmax(axis=1)
    typical = np.flatnonzero(snapshot.state == np.repeat(state, per_cell)[:num_pages])
    first = typical[np.unique(typical // per_cell, return_index=True)[1]]  # of each cell, as each has one at least
    tokens = np.bincount(pages // per_cell, weights=snapshot.fill)
    slots = np.bincount(pages // per_cell) * snapshot.page_size
    return _Cells(state, snapshot.owner[first], tokens / slots, per_cell)


def _glyph(cells: _Cells, i: int) -> tuple[str, str]:
    """The letter of a cell and its style."""
    state, owner = int(cells.state[i]), int(cells.owner[i])
    if state not in (USED, SHARED):
        return _GLYPHS[state], "dim" if state == FREE else ""
    letter = _LETTERS[owner % len(_LETTERS)]
    style = _TERMINAL_COLOURS[owner % len(_TERMINAL_COLOURS)]
    if cells.fill[i] < 1:
        style += " underline"
    return (letter.upper(), f"bold {style}") if state == SHARED else (letter, style)


def _drawn_owners(snapshot: PoolSnapshot) -> tuple[list[tuple[int, str]], int]:
    """The first owners of pages, by number and name, as many as a legend holds; and how many more there are."""
    owners = np.unique(snapshot.owner[snapshot.owner >= 0]).tolist()
    return [(owner, _shown(snapshot.seq_ids[owner])) for owner in owners[:_MAX_NAMES]], len(owners[_MAX_NAMES:])


def _shown(seq_id: Hashable) -> str:
    """A name on one line: what a terminal would obey stands escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(seq_id))


def _text_legend(snapshot: PoolSnapshot, cells: _Cells) -> str:
    owners, num_more = _drawn_owners(snapshot)
    parts = [f"{_LETTERS[owner % len(_LETTERS)]} {name}" for owner, name in owners]
    parts += [f"and {num_more} more"] if num_more else []
    parts += ["capital: shared"] if SHARED in cells.state else []
    parts += [f"{glyph} {_NAMES[state]}" for state, glyph in _GLYPHS.items() if state in cells.state]
    parts += [f"{cells.pages_per_cell} pages a cell"] if cells.pages_per_cell > 1 else []
    return "   ".join(parts)


def _owner_colours() -> npt.NDArray[np.float64]:
    """`[18, 3]`, for the owners in turn: none of them is a grey, which stands for no owner."""
    from matplotlib import colormaps

    return np.array([colour for colour in colormaps["tab20"].colors if len({*colour}) > 1])  # pyright: ignore[reportAttributeAccessIssue]


def _colours(cells: _Cells) -> npt.NDArray[np.float64]:
    """`[num_cells, 3]` red, green and blue from 0 to 1."""
    from matplotlib.colors import to_rgb

    owned = (cells.state == USED) | (cells.state == SHARED)
    colours = np.array([to_rgb(_STATE_COLOURS.get(state, "white")) for state in range(len(_NAMES))])[cells.state]
    palette = _owner_colours()
    colours[owned] = palette[cells.owner[owned] % len(palette)]
    return colours


def _image(cells: _Cells, columns: int) -> npt.NDArray[np.float64]:
    """The grid in pixels, red, green and blue. A cell is pale above its tokens; a shared one has a dark frame."""
    size, num_cells = _CELL_PIXELS, len(cells.state)
    height = np.arange(size, 0, -1) / size  # of each row of pixels above the bottom of its cell
    has_tokens = np.isin(cells.state, (USED, SHARED, CACHED))
    filled = (height <= cells.fill[:, None]) | ~has_tokens[:, None]
    colours = _colours(cells)[:, None, :]
    rows = np.where(filled[..., None], colours, 0.25 * colours + 0.75)  # [num_cells, size, 3]
    squares = np.repeat(rows[:, :, None], size, axis=2)
    frame = np.ones((size, size), bool)
    frame[2:-2, 2:-2] = False
    squares[np.ix_(cells.state == SHARED, range(size), range(size))] *= np.where(frame, 0.25, 1)[..., None]
    num_rows = cdiv(num_cells, columns)
    padded = np.ones((num_rows * columns, size + _GAP_PIXELS, size + _GAP_PIXELS, 3))
    padded[:num_cells, :size, :size] = squares
    grid = padded.reshape(num_rows, columns, *padded.shape[1:]).swapaxes(1, 2)
    return grid.reshape(num_rows * padded.shape[1], columns * padded.shape[2], 3)


def _unformatted(text: str) -> str:
    """The text for matplotlib, which reads formulas between dollar signs."""
    return text.replace("$", r"\$")


def _patches(snapshot: PoolSnapshot, cells: _Cells) -> list[Any]:
    """The legend."""
    from matplotlib.patches import Patch

    owners, num_more = _drawn_owners(snapshot)
    palette = _owner_colours()
    # matplotlib hides names that begin with an underscore.
    labels = {owner: " " + _unformatted(name) for owner, name in owners}
    patches = [Patch(color=palette[owner % len(palette)], label=label) for owner, label in labels.items()]
    patches += [Patch(color="white", label=f"and {num_more} more")] if num_more else []
    if SHARED in cells.state:
        patches.append(Patch(facecolor="white", edgecolor="#404040", linewidth=2, label="shared"))
    patches += [Patch(color=c, label=_NAMES[state]) for state, c in _STATE_COLOURS.items() if state in cells.state]
    return patches
