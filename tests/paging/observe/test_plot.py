"""The picture of a pool, cell by cell."""

import importlib.util

import numpy as np
import pytest

from jaxpaged.paging import PageAllocator
from jaxpaged.paging.observe import plot
from jaxpaged.paging.observe.plot import caption, pool_text, save_png
from jaxpaged.paging.observe.trace import demo_trace
from jaxpaged.paging.records import CACHED, FREE, NULL, PINNED, SHARED, USED, PoolSnapshot

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def make_snapshot(state, *, owner=None, ref_count=None, fill=None, seq_ids=("x", "y", "z")) -> PoolSnapshot:
    state = np.array(state, np.uint8)
    used = np.isin(state, (USED, SHARED))
    return PoolSnapshot(
        owner=np.where(used, 0, -1).astype(np.int32) if owner is None else np.array(owner, np.int32),
        ref_count=(used + (state == SHARED)).astype(np.int32) if ref_count is None else np.array(ref_count, np.int32),
        state=state,
        fill=np.where(np.isin(state, (FREE, NULL)), 0, 4).astype(np.int32)
        if fill is None
        else np.array(fill, np.int32),
        seq_ids=seq_ids,
        page_size=4,
    )


EVERY_STATE = make_snapshot(
    [NULL, USED, SHARED, SHARED, USED, CACHED, PINNED, FREE, FREE],
    owner=[-1, 0, 0, 0, 2, -1, -1, -1, -1],
    ref_count=[0, 1, 3, 2, 1, 0, 1, 0, 0],
    fill=[0, 4, 4, 4, 1, 4, 4, 0, 0],
)


def test_caption_counts_pages_fragmentation_and_savings():
    assert caption(EVERY_STATE) == (
        "9 pages of 4 tokens: 4 used (2 of them shared), 1 pinned, 1 cached, 2 free, 1 null. "
        "Fragmentation: 18.8% of the used slots are empty. Sharing saves 3 of 7 pages (43%)."
    )


def test_caption_of_an_empty_pool_has_no_fractions():
    assert caption(PageAllocator(1235, 16).snapshot()) == "1,235 pages of 16 tokens: 0 used, 1,234 free, 1 null."


@pytest.mark.parametrize("step", [10, 16, None])
def test_caption_agrees_with_the_allocator(step):
    pages = demo_trace().replay(step)
    snapshot = pages.snapshot()
    text, sharing = caption(snapshot), pages.sharing(snapshot.seq_ids)
    assert f" {sharing.num_held_pages} used" in text
    assert f"Sharing saves {sharing.num_saved_pages} of {sharing.num_unshared_pages} pages" in text
    assert f" {pages.num_free_pages - pages.stats().num_cached_pages} free" in text


def test_snapshot_of_a_pin_counts_it_as_no_owner():
    pages = PageAllocator(9, 4, prefix_caching=True)
    pages.add("a", [1, 2, 3, 4, 5])
    pages.commit("a", [1, 2, 3, 4])
    pages.prefix.pin([1, 2, 3, 4])
    assert pages.snapshot().state.tolist()[:3] == [NULL, USED, USED]
    assert caption(pages.snapshot()).endswith("Sharing saves 0 of 2 pages (0%).")
    pages.free("a")
    assert pages.snapshot().state.tolist()[:3] == [NULL, PINNED, FREE]
    assert caption(pages.snapshot()) == "9 pages of 4 tokens: 0 used, 1 pinned, 7 free, 1 null."


def test_pool_text_has_a_letter_for_each_owner_and_a_capital_where_shared():
    lines = pool_text(EVERY_STATE, title="after 7 verbs").plain.splitlines()
    assert lines == [
        "after 7 verbs",
        "       0  #aAAc+*··",
        "a x   c z   capital: shared   · free   # null   + cached   * pinned",
        caption(EVERY_STATE),
    ]


def test_pool_text_underlines_pages_with_room():
    text = pool_text(EVERY_STATE)
    underlined = [text.plain[span.start : span.end] for span in text.spans if "underline" in str(span.style)]
    assert underlined == ["c"]


@pytest.mark.parametrize(("width", "per_row"), [(10, 8), (30, 16), (80, 64)])
def test_pool_text_begins_each_row_with_its_page_id(width, per_row):
    lines = pool_text(make_snapshot([NULL] + [USED] * 99), width=width).plain.splitlines()[:-2]
    assert [int(line.split()[0]) for line in lines] == list(range(0, 100, per_row))
    assert [len(line.split()[1]) for line in lines[:-1]] == [per_row] * (len(lines) - 1)
    assert all(len(line) <= max(18, width) for line in lines)


def test_pool_text_of_a_large_pool_shows_what_most_pages_of_a_cell_are():
    state = np.full(64 * 32 * 3 - 1, FREE)
    state[3:6] = USED, FREE, USED
    state[6:9] = SHARED, SHARED, CACHED
    snapshot = make_snapshot(state, owner=np.where(state == USED, 1, np.where(state == SHARED, 2, -1)))
    lines = pool_text(snapshot, width=80).plain.splitlines()
    assert len(lines) == 32 + 2
    assert lines[0] == "       0  ·bC" + "·" * 61
    assert lines[1].split()[0] == "192"
    assert lines[-2].endswith("3 pages a cell")


def test_pool_text_names_some_of_many_owners_and_counts_the_rest():
    owner = np.arange(-1, 40)
    snapshot = make_snapshot([NULL] + [USED] * 40, owner=owner, seq_ids=tuple(f"s{i}" for i in range(40)))
    row, legend, _ = pool_text(snapshot, width=80).plain.splitlines()
    assert row.split()[1] == "#" + "abcdefghijklmnopqrstuvwxyz" + "abcdefghijklmn"
    assert legend.startswith("a s0   b s1   ")
    assert "l s11   and 28 more" in legend


@needs_matplotlib
def test_image_fills_each_cell_to_its_tokens_and_frames_shared_ones():
    cells = plot._cells(EVERY_STATE, 100)
    image = plot._image(cells, 3)
    size, gap = plot._CELL_PIXELS, plot._GAP_PIXELS
    assert image.shape == (3 * (size + gap), 3 * (size + gap), 3)
    assert image.min() >= 0
    assert image.max() <= 1

    def pixel(page, y, x=size // 2):
        return image[page // 3 * (size + gap) + y, page % 3 * (size + gap) + x]

    colours = plot._colours(cells)
    for page in range(9):
        np.testing.assert_array_equal(pixel(page, size - 3), colours[page])
        np.testing.assert_array_equal(pixel(page, size), [1, 1, 1])
    for page in (1, 2, 5, 6, 7):
        np.testing.assert_array_equal(pixel(page, 3), colours[page])
    np.testing.assert_allclose(pixel(4, 3), 0.25 * colours[4] + 0.75)  # one token of four
    np.testing.assert_allclose(pixel(4, size - 4), 0.25 * colours[4] + 0.75)
    for page, dark in ((1, 1), (2, 0.25), (3, 0.25)):
        np.testing.assert_allclose(pixel(page, size // 2, 0), dark * colours[page])
    assert len({tuple(colours[page]) for page in (0, 1, 4, 5, 6, 7)}) == 6


@needs_matplotlib
@pytest.mark.parametrize(
    "num_pages", [pytest.param(2, marks=pytest.mark.slow), pytest.param(17, marks=pytest.mark.slow), 5000]
)
def test_save_png_writes_a_picture(tmp_path, num_pages):
    from matplotlib.image import imread

    pages = PageAllocator(num_pages, 4)
    pages.add("a", 2)
    path = tmp_path / "pool.png"
    save_png(pages.snapshot(), path, title="a pool")
    image = imread(path)
    assert image.shape[1] == 9 * 150
    assert image[..., :3].std() > 0.01


def test_names_that_a_terminal_or_a_formula_would_obey_are_shown_as_they_are(tmp_path):
    pages = PageAllocator(9, 4)
    for name in ("a\x1b[31m\nb", r"cost $\frac{1}$", "_hidden"):
        pages.add(name, 5)
    text = pool_text(pages.snapshot()).plain
    assert r"a\x1b[31m\nb" in text
    assert r"cost $\frac{1}$" in text
    if importlib.util.find_spec("matplotlib"):
        patches = plot._patches(pages.snapshot(), plot._cells(pages.snapshot(), 64))
        assert [p.get_label() for p in patches[:3]] == [r" a\x1b[31m\nb", r" cost \$\frac{1}\$", " _hidden"]
        save_png(pages.snapshot(), tmp_path / "pool.png")


@needs_matplotlib
def test_title_that_a_terminal_or_a_formula_would_obey_is_shown_as_it_is(tmp_path):
    snapshot = PageAllocator(3).snapshot()
    title = "the \x1b[31m $\\frac{1}$"
    save_png(snapshot, tmp_path / "pool.png", title=title)  # matplotlib would refuse that formula
    assert pool_text(snapshot, title=title).plain.startswith("the \\x1b[31m $\\frac{1}$\n")
