"""The pictures of order.md, drawn from the order itself: python docs/concepts/order_pictures.py writes them beside itself.

Each function gives one SVG as text; tests/unit/order/test_pictures.py holds that the files are what these functions give.
"""

from __future__ import annotations

from pathlib import Path

from penstock.order import IndexedOrder, MixedSource, MixOrder, MixWeights

CELL, GAP = 14, 2  # px
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#222255")
INK = "#555555"


class Picture:
    """An SVG that grows downwards."""

    def __init__(self, width: int) -> None:
        self._width, self._height, self._parts = width, 8, []

    def text(self, words: str) -> None:
        """A line of words."""
        self._height += 16
        self._parts.append(f'<text x="8" y="{self._height}">{words}</text>')
        self._height += 8

    def row(self, colours: list[str], words: list[str] | None = None, *, label: str = "", first: int = 72) -> None:
        """Cells side by side; `words` in them."""
        y = self._height
        if label:
            self._parts.append(f'<text x="8" y="{y + 11}">{label}</text>')
        for index, colour in enumerate(colours):
            x = first + index * (CELL + GAP)
            self._parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{colour}"/>')
            if words:
                self._parts.append(
                    f'<text x="{x + CELL / 2:g}" y="{y + 11}" class="in">{words[index]}</text>'
                )  # fmt: skip
        self._height += CELL + GAP

    def svg(self) -> str:
        """The whole picture."""
        style = f"text{{font:11px sans-serif;fill:{INK}}}.in{{font-size:8px;fill:#fff;text-anchor:middle}}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" height="{self._height + 8}">'
        return "\n".join(
            [
                head,
                f"<style>{style}</style>",
                '<rect width="100%" height="100%" fill="#fff"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def lanes() -> str:
    """From stored shards to positions: 6 shards, 4 lanes, a window of 16."""
    order = IndexedOrder(samples=[9, 6, 8, 5, 7, 5], seed=4, lanes=4, window=16)
    picture = Picture(760)
    picture.text("Stored: a colour is a shard, a number a sample in it.")
    picture.row(
        [COLOURS[s] for s, n in enumerate(order.samples) for _ in range(n)],
        [str(k) for n in order.samples for k in range(n)],
    )
    picture.text(
        "Lanes, as they are read: shards permuted, cut into 4 lanes of equal length, inside a shard where the cut falls."
    )
    for lane in range(4):
        cells = [
            (s.shard, s.first + k)
            for s in order.segments(lane, 0, order.lane_length(lane))
            for k in range(s.samples_count)
        ]
        picture.row([COLOURS[s] for s, _ in cells], [str(k) for _, k in cells], label=f"lane {lane}")
    picture.text(
        "Lanes, as they leave: runs of 16 / 4 = 4 samples permuted; a lane with a higher number has a shorter first run."
    )
    for lane in range(4):
        part = order.locations(lane)
        picture.row([COLOURS[s] for s in part.shards], [str(k) for k in part.samples], label=f"lane {lane}")
    picture.text("Positions: one sample of each lane in turn, 0 to 39.")
    cells = [order.locate(p) for p in range(order.samples_count)]
    picture.row([COLOURS[c.shard] for c in cells], [str(c.sample) for c in cells])
    return picture.svg()


def resume() -> str:
    """Who hands out which position: 2 ranks, stopped, then 4."""
    order = IndexedOrder(samples=[9, 6, 8, 5, 7, 5], seed=4, lanes=4, window=16)
    cells = [order.locate(p) for p in range(order.samples_count)]
    picture = Picture(760)
    picture.text("Positions 0 to 39 of the picture above, a colour is a shard.")
    picture.row([COLOURS[c.shard] for c in cells], [str(c.sample) for c in cells])
    picture.text(
        "2 ranks with 4 samples each, stopped after two global batches: position 16. Then 4 ranks with 2 samples each."
    )
    for rank in range(4):
        mine = [p for p in range(40) if (p % 2 == rank if p < 16 else p % 4 == rank)]
        colours = [COLOURS[cells[p].shard] if p in mine else "#f2f2f2" for p in range(40)]
        picture.row(colours, [str(cells[p].sample) if p in mine else "" for p in range(40)], label=f"rank {rank}")
    picture.text("Global batches of 8 positions: the same samples in each, before and after.")
    picture.row(["#777777" if p // 8 % 2 else "#aaaaaa" for p in range(40)], [str(p // 8) for p in range(40)])
    return picture.svg()


def mix() -> str:
    """Whose turn it is: 8 lanes, weights that change at a row, a source that ends."""
    history = (MixWeights((5, 2, 1)), MixWeights((1, 2, 5), 0, 80))
    order = MixOrder(sources=tuple(MixedSource(samples=[n]) for n in (100, 70, 110)), history=history, lanes=8)
    picture = Picture(680)
    picture.text(
        "A colour is a source; a column has 8 positions, one of each lane. Weights 5 : 2 : 1, from position 80 on 1 : 2 : 5."
    )
    for lane in range(8):
        picture.row([COLOURS[(0, 3, 4)[s]] for s in order.sources_of(lane, 0, 99)], label=f"lane {lane}")
    picture.text(
        "Each column has the weights to within one sample. At the end two sources run out, lane by lane; the first takes over."
    )
    return picture.svg()


PICTURES = {"order_lanes.svg": lanes, "order_resume.svg": resume, "order_mix.svg": mix}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw())
