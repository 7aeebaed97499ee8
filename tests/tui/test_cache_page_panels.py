"""What the panels of the cache page draw, and the arithmetic behind them; no terminal."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from kvd.histograms import CACHE_BUCKET_BOUNDS
from kvd.insight import BlockMap, MapCell
from kvd.tui import glyphs
from kvd.tui.block_map import MODES, BlockMapPanel, Letters, by_age, by_owner, by_sharing, flow, layout, letter
from kvd.tui.comparison import differing, marked_lines
from kvd.tui.eviction_panel import EvictionPanel
from kvd.tui.panel import Panel, Spans, span_width
from kvd.tui.prefix_panel import PrefixPanel
from kvd.tui.retention import GAPS, IDLE, LIFETIME, bucket_counts, share_found_later, verdict
from kvd.tui.view import History, Link, View
from kvd.views import Counters, DiskFacts, Histogram, PrefixView, Snapshot
from tests.tui.fakes import block_map, histogram, snapshot

LINK = Link("http://127.0.0.1:8000/v1", "smollm2-135m-instruct", 0.5)
BOUNDS = (*CACHE_BUCKET_BOUNDS[GAPS], math.inf)


def view_of(*snapshots: Snapshot) -> View:
    history = History()
    return [history.add(each, has_details=True) for each in snapshots][-1]


def texts(lines: list[Spans]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def drawn(panel: Panel, view: View | None, width: int, height: int) -> list[str]:
    lines = panel.draw(view, LINK, width, height)[:height]
    assert all(span_width(line) <= width for line in lines), [line for line in lines if span_width(line) > width]
    return texts(lines)


def cell(
    free: int = 0,
    cached: int = 0,
    active: int = 0,
    *,
    shared: int = 0,
    pinned: int = 0,
    owner: int = -1,
    idle: float = 0,
) -> MapCell:
    return MapCell(free, cached, active, shared, pinned, owner, idle)


# --------------------------------------------------------------------------- block map


def test_a_client_keeps_its_letter_while_it_has_blocks() -> None:
    letters = Letters()
    assert letters.assign(("a", "b", "c")) == (0, 1, 2)
    assert letters.assign(("c", "a")) == (2, 0)
    assert letters.assign(("d", "c", "a")) == (1, 2, 0)


def test_letters_are_the_lowest_free_ones_whatever_happened() -> None:
    rng = random.Random(7)
    letters, names = Letters(), [f"client {i}" for i in range(40)]
    previous: dict[str, int] = {}
    for _ in range(200):
        owners = tuple(rng.sample(names, rng.randrange(len(names))))
        now = dict(zip(owners, letters.assign(owners), strict=True))
        assert sorted(now.values())[: len(now)] == sorted(set(now.values()))
        assert all(number < max(len(owners), max(previous.values(), default=0) + 1) for number in now.values())
        assert all(now[name] == previous[name] for name in now if name in previous)
        previous = now


def test_owners_beyond_z_share_a_sign() -> None:
    assert [letter(0), letter(25), letter(26), letter(63)] == ["A", "Z", "+", "+"]


@pytest.mark.parametrize(
    ("given", "sign"),
    [
        (cell(free=4), "·"),
        (cell(free=3, cached=1, owner=1), "b"),
        (cell(free=3, active=1, owner=0), "A"),
        (cell(cached=3, active=1, owner=2), "C"),
        (cell(active=1, owner=-1), "+"),
        (cell(active=1, owner=9), "+"),
    ],
)
def test_by_owner(given: MapCell, sign: str) -> None:
    assert by_owner(given, (0, 1, 2))[0] == sign


def test_by_owner_is_bold_where_half_of_the_cell_is_used() -> None:
    assert by_owner(cell(free=2, active=2, owner=0), (0,)) == ("A", "active-bold")
    assert by_owner(cell(free=3, active=1, owner=0), (0,)) == ("A", "active")


@pytest.mark.parametrize(
    ("given", "sign"),
    [
        (cell(free=4), "·"),
        (cell(free=27, cached=1), "░"),
        (cell(cached=3, active=4), "▓"),
        (cell(cached=3, active=7, shared=4), "█"),
        (cell(cached=3, active=7, shared=4, pinned=1), "◆"),
    ],
)
def test_by_sharing(given: MapCell, sign: str) -> None:
    assert by_sharing(given)[0] == sign


@pytest.mark.parametrize(
    ("given", "sign"),
    [
        (cell(free=4), "·"),
        (cell(active=2, cached=1, idle=5.0), "█"),
        (cell(cached=2, idle=0.0), "▇"),
        (cell(cached=2, idle=9.9), "▇"),
        (cell(cached=2, idle=10.0), "▆"),
        (cell(cached=2, idle=599.0), "▅"),
        (cell(cached=2, idle=3599.0), "▃"),
        (cell(cached=2, idle=1e9), "▁"),
    ],
)
def test_by_age(given: MapCell, sign: str) -> None:
    assert by_age(given)[0] == sign


def test_no_two_kinds_of_cells_look_alike_in_ascii() -> None:
    glyphs.use_ascii(True)
    try:
        kinds = (cell(free=1), cell(cached=1), cell(active=1), cell(active=1, shared=1), cell(active=1, pinned=1))
        assert len({glyphs.plain(by_sharing(kind)[0]) for kind in kinds}) == len(kinds)
        ages = [cell(free=1), cell(active=1), *(cell(cached=1, idle=idle) for idle in (1, 30, 300, 3000, 30_000))]
        assert len({glyphs.plain(by_age(kind)[0]) for kind in ages}) == len(ages)
    finally:
        glyphs.use_ascii(False)


def test_small_pools_get_wide_cells_and_every_cell_is_seen() -> None:
    assert layout(64, 76, 5) == (25, 3)
    assert layout(5 * 38, 76, 5) == (38, 2)
    assert layout(5 * 38 + 1, 76, 5) == (76, 1)
    for num_cells, width, height in itertools.product((1, 7, 380, 4096), (1, 2, 76, 300), (1, 5, 60)):
        columns, cell_width = layout(num_cells, width, height)
        assert columns * cell_width <= width
        assert cell_width == 1 or -(-num_cells // columns) <= height


@pytest.mark.parametrize("mode", MODES)
def test_the_map_has_a_cell_for_every_cell_and_a_legend(mode: str) -> None:
    panel = BlockMapPanel(id="map")
    panel.mode = mode  # type: ignore[assignment]
    panel.put(block_map(num_blocks=50_000, num_cells=760, num_active=20_000, num_cached=10_000))
    lines = drawn(panel, None, 76, 14)
    assert len(lines) <= 14
    assert sum(len(line) for line in lines[:12]) == -(-50_000 // 66)
    legend = " ".join(lines[12:])
    assert "· free 20k" in legend
    if mode == "owner":
        assert "A claude-code 127.0.0.1" in legend
    if mode == "sharing":
        assert "▓ active 10k" in legend
        assert "█ shared 10k" in legend
        assert "░ cached 10k" in legend
    if mode == "age":
        assert "█ active 20k" in legend


def test_the_legend_says_how_many_owners_it_leaves_out() -> None:
    panel = BlockMapPanel(id="map")
    owners = tuple(f"client-{i:02d}" for i in range(40))
    panel.put(block_map(owners=owners))
    legend = drawn(panel, None, 76, 6)[-1]
    assert legend.startswith("· free 448")
    assert legend.endswith(" more")
    shown = legend.count("client-")
    assert 1 <= shown < 40
    assert int(legend.split()[-2]) == sum(count > 0 for count in block_map(owners=owners).owner_blocks) - shown


def test_flow_fits_its_lines() -> None:
    entries: list[Spans] = [((f"entry-{i}", "text"),) for i in range(30)]
    for width, num_lines in itertools.product((20, 40, 76, 300), (0, 1, 2, 3)):
        lines = flow(entries, width, num_lines)
        assert len(lines) <= num_lines
        assert all(span_width(line) <= width for line in lines)


def test_a_new_map_replaces_the_old_one() -> None:
    panel = BlockMapPanel(id="map")
    panel.put(block_map(num_blocks=64, num_cells=64, num_active=64, num_cached=0))
    assert "·" not in "".join(drawn(panel, None, 76, 6)[:-1])
    panel.put(block_map(num_blocks=64, num_cells=64, num_active=0, num_cached=0))
    assert set("".join(drawn(panel, None, 76, 6)[:-1])) == {"·"}


def test_a_name_of_a_client_cannot_move_the_cursor() -> None:
    panel = BlockMapPanel(id="map")
    panel.put(block_map(owners=("\x1b[2Jevil", "b", "c")))
    assert "\x1b" not in "".join(drawn(panel, None, 76, 14))
    assert "·[2Jevil" in "".join(drawn(panel, None, 76, 14))


def test_clients_without_blocks_take_no_letters() -> None:
    panel = BlockMapPanel(id="map")
    given = block_map(num_blocks=4, num_cells=4, num_active=0, num_cached=4, owners=("(others)", "b", "c"))
    panel.put(replace(given, owner_blocks=(0, 3, 1), cells=tuple(cell(cached=1, owner=i) for i in (1, 1, 1, 2))))
    assert drawn(panel, None, 12, 4)[0] == "aaaaaaaaabbb"


def test_what_cannot_be_had_is_said_in_its_place() -> None:
    for panel in (BlockMapPanel(id="map"), PrefixPanel(id="prefixes")):
        panel.problem = "HTTP 404: no such route"
        assert "HTTP 404: no such route" in drawn(panel, None, 76, 6)[0]


def test_a_map_of_no_cells() -> None:
    panel = BlockMapPanel(id="map")
    panel.put(BlockMap(0, 1, 0, 1, (), (), ()))
    assert drawn(panel, None, 30, 5)[-1] == "· free 0"


# --------------------------------------------------------------------------- prefixes


def chain(number: int, **fields: object) -> PrefixView:
    row = PrefixView(f"{number:032x}", 160 * number, 100 - number, False, False, f"client {number % 3}", 60.0, number)
    return replace(row, **fields)  # type: ignore[arg-type]


def listed(panel: PrefixPanel) -> list[int]:
    return [int(row.prefix_id, 16) for row in panel._prefixes]


def test_prefixes_are_sorted_as_asked_and_the_cursor_stays_with_its_chain() -> None:
    panel = PrefixPanel(id="prefixes")
    panel.put(tuple(chain(i) for i in (3, 1, 2)))
    assert listed(panel) == [1, 2, 3]  # by hits, most first
    panel.place(2)
    panel.action_reverse()
    assert listed(panel) == [3, 2, 1]
    assert panel.selected == chain(3)
    panel.action_sort(-1)  # by tokens
    assert listed(panel) == [3, 2, 1]
    panel.put(tuple(chain(i) for i in (4, 3, 1)))
    assert listed(panel) == [4, 3, 1]
    assert panel.selected == chain(3)
    panel.put((chain(5),))
    assert panel.selected == chain(5)
    panel.put(())
    assert panel.selected is None


def test_every_column_sorts() -> None:
    rows = (
        chain(1, is_pinned=True, age_seconds=5.0, client="b"),
        chain(2, is_active=True, age_seconds=50.0, client="c"),
        chain(3, age_seconds=9.0, client="a"),
    )
    panel = PrefixPanel(id="prefixes")
    panel.put(rows)
    orders = {}
    for _ in range(8):
        title = next(word for word in drawn(panel, view_of(snapshot()), 78, 6)[0].split() if word[-1] in "▾▴")
        orders[title] = listed(panel)
        panel.action_sort(1)
    assert orders == {
        "tokens▾": [3, 2, 1], "hits▾": [1, 2, 3], "pool▾": [3, 2, 1], "age▾": [2, 3, 1], "idle▴": [1, 2, 3],
        "state▾": [1, 2, 3], "owner▴": [3, 1, 2], "id▴": [1, 2, 3],
    }  # fmt: skip


def test_a_row_says_what_the_chain_is() -> None:
    panel = PrefixPanel(id="prefixes")
    panel.put((chain(1, num_tokens=16_384, num_hits=41, is_pinned=True, age_seconds=100.0, idle_seconds=7.0),))
    view = view_of(snapshot())
    panel.show(view, LINK)
    heading, row = drawn(panel, view, 158, 6)
    assert row.split() == ["▸", "16.4k", "41", "50%", "1m40", "7s", "◆", "pinned", "client", "1", f"{1:032x}"]
    assert "tokens" in heading
    panel.put((chain(1, is_active=True),))
    assert "▓ active" in drawn(panel, view, 78, 6)[1]
    panel.put((chain(1),))
    assert " cached" in drawn(panel, view, 78, 6)[1]


def test_the_filter_looks_at_owner_and_id() -> None:
    panel = PrefixPanel(id="prefixes")
    panel.put(tuple(chain(i) for i in range(1, 7)))
    panel.set_filter("CLIENT 2")
    assert listed(panel) == [2, 5]
    panel.set_filter("00006")
    assert listed(panel) == [6]
    panel.set_filter("nobody")
    assert "No prefix matches the filter." in drawn(panel, view_of(snapshot()), 78, 6)[0]


def test_an_empty_table_says_why() -> None:
    panel = PrefixPanel(id="prefixes")
    view = view_of(snapshot())
    assert "waiting" in drawn(panel, view, 78, 6)[0]
    panel.put(())
    assert "Nothing is cached yet" in drawn(panel, view, 78, 6)[0]
    off = snapshot()
    off = replace(off, info=replace(off.info, prefix_caching=False))
    assert "enable_prefix_caching: true" in drawn(panel, view_of(off), 78, 6)[0]


# --------------------------------------------------------------------------- retention


def seconds(*values: float) -> Histogram:
    return histogram(list(values), BOUNDS)


def test_the_life_table_by_hand() -> None:
    # Between 60 and 120 s: 40 found, 20 evicted, of 100 that were unused for longer than 60 s.
    gaps = seconds(*[1.0] * 50, *[90.0] * 40)
    idle = seconds(*[90.0] * 20, *[200.0] * 40)
    assert share_found_later(gaps, idle, 60.0, 120.0) == pytest.approx(40 / (100 - 10))
    assert share_found_later(gaps, idle, 60.0, 90.0) == pytest.approx(1 - (1 - 40 / 90) ** 0.5)


def test_blocks_that_nobody_wants_are_found_by_nobody() -> None:
    assert share_found_later(seconds(1.0), seconds(*[500.0] * 9), 10.0, 250.0) == 0


def test_nothing_is_said_of_times_that_no_block_has_lasted() -> None:
    assert share_found_later(seconds(1.0, 2.0), seconds(*[40.0] * 9), 60.0, 120.0) is None
    assert share_found_later(seconds(1.0), seconds(1e6), 80_000.0, 160_000.0) is None
    assert share_found_later(seconds(1.0), histogram([1.0], (1.0, math.inf)), 1.0, 2.0) is None


def test_the_life_table_finds_the_share_behind_generated_blocks() -> None:
    """Blocks come back after exponential times; some are evicted first. The estimate sees through the evictions."""
    generator = random.Random(11)
    for mean in (30.0, 200.0):
        found, evicted = [], []
        for _ in range(20_000):
            returns, stays = generator.expovariate(1 / mean), generator.uniform(20.0, 1000.0)
            (found if returns <= stays else evicted).append(min(returns, stays))
        share = share_found_later(seconds(*found), seconds(*evicted), 60.0, 120.0)
        assert share == pytest.approx(1 - math.exp(-60.0 / mean), abs=0.05)


def test_buckets_add_up() -> None:
    values = [0.05, 3.0, 3.0, 1e9]
    counts = bucket_counts(seconds(*values))
    assert sum(counts) == 4
    assert counts[0] == 1
    assert counts[BOUNDS.index(5.0)] == 2
    assert counts[-1] == 1


def test_the_verdict() -> None:
    quiet = snapshot()
    assert verdict(quiet) == ("Nothing had to give way so far: the pool holds all that was cached.",)
    # An engine that keeps no histograms, and evicts, says nothing wrong.
    assert verdict(replace(quiet, counters=Counters(num_evicted_blocks=3))) == ()
    busy = replace(
        quiet,
        counters=Counters(num_evicted_blocks=60, prefix_query_tokens=10_000),
        cache_histograms={
            GAPS: seconds(*[1.0] * 50, *[90.0] * 40),
            IDLE: seconds(*[90.0] * 30, *[300.0] * 30),
            LIFETIME: seconds(*[500.0] * 60),
        },
        misses=(("differs", 9, 999), ("evicted", 3, 1_480)),
    )
    lost, twice, half = verdict(busy)
    assert lost.startswith("1,480 tokens (15% of those looked up) were wanted again after they were evicted")
    # Of the 30 that lasted 120 s none was found by 240 s, and all of them were still there.
    assert twice == "Twice the pool, or as much RAM below it, would turn 0% of the evictions into hits."
    assert (
        half
        == "Half of the evicted blocks had been unused for 2m00 or longer; those found again, for 950ms at the median."
    )
    unwanted = verdict(replace(busy, misses=(("new", 3, 0),), cache_histograms={IDLE: seconds(*[90.0] * 30)}))
    assert unwanted[0] == "Nothing that was evicted was wanted again so far."
    unexamined = verdict(replace(busy, misses=(), cache_histograms={IDLE: seconds(*[90.0] * 30)}))
    assert unexamined == ("Half of the evicted blocks had been unused for 1m30 or longer.",)


# --------------------------------------------------------------------------- evictions and tiers


def evicting() -> View:
    first = snapshot(time=10.0, counters=Counters(num_evicted_blocks=100))
    later = snapshot(
        time=20.0,
        counters=Counters(
            num_evicted_blocks=140,
            evicted_blocks=(("capacity", 100), ("cap", 40), ("dropped", 5), ("reset", 0)),
            num_saved_blocks=30,
            num_restored_blocks=20,
            num_unsaved_blocks=3,
        ),
        num_ram_blocks=279,
        num_ram_blocks_used=70,
        disk=DiskFacts(812, 1 << 30, 4 << 30, 3 << 30, 1 << 28, num_corrupt_blocks=2, problem="no room on the disk"),
        cache_histograms={
            LIFETIME: seconds(*[500.0] * 60), IDLE: seconds(*[90.0] * 30), GAPS: seconds(*[1.0] * 50)
        },
    )  # fmt: skip
    return view_of(first, later)


def test_evictions_by_reason_and_per_second() -> None:
    lines = drawn(EvictionPanel(id="evictions"), evicting(), 76, 14)
    assert "145 blocks" in lines[0]
    assert "4.0/s lately" in lines[0] or "4/s lately" in lines[0]
    assert lines[1] == "└ capacity 100, cap 40, dropped 5"


def test_lifetime_against_reuse_gap_on_one_axis() -> None:
    lines = drawn(EvictionPanel(id="evictions"), evicting(), 76, 14)
    lifetime = next(line for line in lines if line.startswith("lifetime"))
    gap = next(line for line in lines if line.startswith("found after"))
    axis = next(line for line in lines if "1m" in line and "1h" in line and "p50" not in line)
    assert lifetime.index("█") - gap.index("█") == BOUNDS.index(600.0) - BOUNDS.index(1.0)
    assert gap.index("█") == axis.index("1s")


def test_the_tiers() -> None:
    lines = drawn(EvictionPanel(id="evictions"), evicting(), 76, 14)
    assert "RAM  70 of 279 blocks 25%  saved 30  restored 20  unsaved 3" in lines
    assert "disk 1 GiB of 4 GiB 25%  written 3 GiB  read 256 MiB  corrupt 2" in lines
    assert "     not used: no room on the disk" in lines
    none = drawn(EvictionPanel(id="evictions"), view_of(snapshot()), 76, 14)
    assert "RAM  no tier: set swap_space to keep what is evicted" in none
    assert "disk no tier: set disk_cache to keep it across restarts" in none


def test_the_tiers_stay_where_the_sentences_do_not_fit() -> None:
    lines = drawn(EvictionPanel(id="evictions"), evicting(), 76, 8)
    assert any(line.startswith("RAM ") for line in lines)


# --------------------------------------------------------------------------- two texts


def test_what_differs_is_marked_in_both() -> None:
    ours, theirs = differing("Today is 2026-11-30 00:22\nHello", "Today is 2026-11-29 00:22\nHello")
    assert ours == [("Today is ", False), ("2026-11-30", True), (" 00:22\nHello", False)]
    assert theirs == [("Today is ", False), ("2026-11-29", True), (" 00:22\nHello", False)]


@pytest.mark.parametrize("num_words", [12, 900])
def test_pieces_join_to_the_text_again(num_words: int) -> None:
    generator = random.Random(num_words)
    for _ in range(20):
        left, right = (
            "".join(generator.choice(("a", "bb", "c", " ", "\n", "  ")) for _ in range(num_words)) for _ in range(2)
        )
        ours, theirs = differing(left, right)
        assert "".join(text for text, _ in ours) == left
        assert "".join(text for text, _ in theirs) == right
        assert "".join(text for text, differs in ours if not differs) == "".join(
            text for text, differs in theirs if not differs
        )


def test_white_space_that_differs_is_visible() -> None:
    ours, _ = differing("a  b", "a b")
    assert texts(marked_lines(ours, 40)) == ["a▸␣␣◂b"]
    ours, _ = differing("a\nb", "a b")
    assert texts(marked_lines(ours, 40)) == ["a▸↵", "◂b"]


def test_revealed_text_breaks_between_words() -> None:
    assert texts(marked_lines([("one two three four", False)], 9)) == ["one two ", "three ", "four"]
    assert texts(marked_lines([("one two ", False), ("three", True)], 12)) == ["one two ", "▸three◂"]
    assert texts(marked_lines([("abcdefgh ij", False)], 5)) == ["abcde", "fgh ", "ij"]


def test_marked_lines_fit_and_hold_no_controls() -> None:
    lines = marked_lines([("x" * 50 + "\x1b[2J\n\n", False), ("漢字" * 30, True)], 20)
    assert all(span_width(line) <= 20 for line in lines)
    assert "\x1b" not in "".join(texts(lines))


# --------------------------------------------------------------------------- any size


@pytest.mark.parametrize("width", [1, 2, 5, 17, 40, 76, 158, 300])
def test_no_size_is_too_small(width: int) -> None:
    blocks, prefixes = BlockMapPanel(id="map"), PrefixPanel(id="prefixes")
    blocks.put(block_map())
    prefixes.put(tuple(chain(i) for i in range(1, 9)))
    for height, view in itertools.product((1, 2, 3, 9, 40), (None, evicting())):
        for panel in (blocks, EvictionPanel(id="evictions")):
            drawn(panel, view, width, height)
        prefixes.draw(view, LINK, width, height)
