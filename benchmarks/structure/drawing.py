"""Draw the floors as an SVG: a box for each place, an arrow for its imports of a lower place."""

from __future__ import annotations

import colorsys
import functools
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.structure.imports import (
    DOORS,
    FLOORS,
    PACKAGE,
    ROOT,
    Import,
    Module,
    Pairs,
    between_places,
    graph_of,
    imports,
    read,
    rings,
)

WIDTH, LEFT, RIGHT = 720, 58, 690
GAP, LANE, PAD, EAVES = 12, 18, 13, 14
BETWEEN = 50  # from floor to floor
NAME, SMALL, LINE = 19.5, 15, 21
STARTS = 12  # orders from which the search for the best begins
MOST_ARROWS, MANY = 16, 10
"""Where there are more arrows, those of fewer imports than MANY that a longer way implies are left
out."""
INK, QUIET, WRONG, PAPER = "#1f2933", "#56616e", "#b3261e", "#fbfaf7"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(eq=False)
class Spot:
    """Hold a box, or the lane in which arrows to a lower place pass a floor; y grows downwards."""

    place: str
    lane: bool = False
    least: float = LANE
    """The narrowest that it may be."""
    text: float = 0
    """How long its modules' names are on one line."""
    lines: int = 0
    modules: list[str] = field(default_factory=list)
    x: float = 0
    width: float = LANE
    y: float = 0
    height: float = 0

    @property
    def ends(self) -> tuple[float, float]:
        """Return the leftmost and the rightmost x where arrows touch it."""
        inset = self.width / 2 if self.lane else min(24, self.width / 3)
        return self.x + inset, self.x + self.width - inset

    @property
    def middle(self) -> float:
        """Return the x of its middle."""
        return self.x + self.width / 2


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return about how wide a text is in the widest of the usual fonts."""
    width = sum(
        0.34 if c in "ijl.,·'|!()[]/ " else 0.95 if c in "mwMW" else 0.7 if c.isupper() else 0.61
        for c in text
    )
    return width * size * (1.08 if bold else 1)


def reduction(pairs: Pairs) -> dict[tuple[str, str], int]:
    """Return the pairs without those that a longer way implies."""
    graph = graph_of(pairs)

    @functools.cache
    def below(node: str) -> frozenset[str]:
        return frozenset(graph[node]).union(*(below(x) for x in graph[node]))

    return {
        (source, target): count
        for (source, target), count in sorted(pairs.items())
        if not any(target in below(other) for other in graph[source] - {target})
    }


def _levels(places: set[str], pairs: Pairs) -> list[list[str]]:
    """Return the places of each floor from the top: by FLOORS, or by the longest way down."""
    floors = [[place for place in floor if place in places] for floor in FLOORS]
    if places - {place for floor in floors for place in floor}:
        graph = graph_of(pairs) | {place: set() for place in places - {*itertools.chain(*pairs)}}
        depth: dict[str, int] = {}
        for ring in rings(graph):
            under = [depth[x] + 1 for node in ring for x in graph[node] if x not in ring]
            depth |= dict.fromkeys(ring, max(under, default=0))
        floors = [sorted(x for x in depth if depth[x] == i) for i in range(max(depth.values()) + 1)]
    return [floor for floor in reversed(floors) if floor]


class House:
    """Arrange the floors as rows of spots, with segments of arrows from one row to the next."""

    def __init__(self, modules: Mapping[str, Module], found: Sequence[Import]) -> None:
        inside = [m for m in modules.values() if m.name.split(".")[0] == PACKAGE]
        self.boxes = {
            place: _box(place, [m for m in inside if m.place == place])
            for place in sorted({m.place for m in inside} - {*DOORS})
        }
        self.every = between_places(modules, found)
        self.rows: list[list[Spot]] = []
        self.numbers: list[int] = []
        levels = _levels({*self.boxes}, self.every)
        for i, places in enumerate(levels):
            for part in _parts([self.boxes[place] for place in places]):
                self.rows.append(part)
                self.numbers.append(len(levels) - 1 - i)
        row = {spot.place: i for i, spots in enumerate(self.rows) for spot in spots}
        floor = {place: self.numbers[i] for place, i in row.items()}
        self.down: Pairs = Counter(
            {pair: n for pair, n in self.every.items() if floor[pair[0]] > floor[pair[1]]}
        )
        few = {*self.down} if len(self.down) <= MOST_ARROWS else {*reduction(self.down)}
        self.drawn = {pair: n for pair, n in sorted(self.down.items()) if pair in few or n >= MANY}
        self.segments: list[Counter[tuple[Spot, Spot]]] = [Counter() for _ in self.rows]
        """Below each row: from which spot to which of the next row, and how many imports."""
        self._lead(row)
        self.right = max(RIGHT, *(LEFT + _needed(spots) for spots in self.rows))
        for spots in self.rows:
            _share(spots, self.right - LEFT)
        self._order()
        self._stand()

    def _lead(self, row: Mapping[str, int]) -> None:
        """Lead every arrow down from row to row, through one lane for all of the same target."""
        lanes: dict[tuple[str, int], Spot] = {}
        for (source, target), count in self.drawn.items():
            spot = self.boxes[source]
            for i in range(row[source], row[target]):
                below = self.boxes[target]
                if i + 1 < row[target]:
                    below = lanes.setdefault((target, i + 1), Spot(target, lane=True))
                    if below not in self.rows[i + 1]:
                        self.rows[i + 1].append(below)
                self.segments[i][spot, below] += count
                spot = below

    def _order(self) -> None:
        """Order the spots of each row so that arrows are short and cross seldom."""
        best: tuple[float, list[list[Spot]]] = math.inf, []
        many = sum(map(len, self.rows)) > 80
        for seed in range(1 if many else STARTS):
            chance = random.Random(seed)
            for i, spots in enumerate(self.rows):
                self._take(i, spots if seed == 0 else sorted(spots, key=lambda _: chance.random()))
            while any([self._improve(i) for i in range(len(self.rows))]):
                pass
            cost = sum(self._cost(i) for i in range(0, len(self.rows), 2))
            if cost < best[0] - 1e-6:
                best = cost, [list(spots) for spots in self.rows]
        for i, spots in enumerate(best[1]):
            self._take(i, spots)

    def _take(self, row: int, spots: Sequence[Spot]) -> None:
        """Let the spots of a row stand in this order."""
        x: float = LEFT
        for before, spot in itertools.pairwise([None, *spots]):
            assert spot is not None
            x += 0 if before is None else _gap(before, spot)
            spot.x = x
            x += spot.width
        self.rows[row] = list(spots)

    def _improve(self, row: int) -> bool:
        """Move neighbouring spots of a row to where they cost least; return whether any moved."""
        spots, best = list(self.rows[row]), self._cost(row)
        found = spots
        for i, j in itertools.combinations(range(len(spots) + 1), 2):
            rest = spots[:i] + spots[j:]
            runs = (spots[i:j], spots[i:j][::-1]) if len(spots) < 9 or j == i + 1 else ()
            for at, run in itertools.product(range(len(rest) + 1), runs):
                self._take(row, rest[:at] + run + rest[at:])
                cost = self._cost(row)
                if cost < best - 1e-6:
                    best, found = cost, self.rows[row]
        self._take(row, found)
        return found is not spots

    def _cost(self, row: int) -> float:
        """Return the length and the crossings of the segments above and below a row."""
        cost = 0.0
        for segments in self.segments[max(0, row - 1) : row + 1]:
            ways = [_meet(upper, lower) for upper, lower in segments]
            cost += sum(abs(a - b) for a, b in ways)
            for (a, b), (c, d) in itertools.combinations(ways, 2):
                cost += 300 * ((a - c) * (b - d) < 0)
        return cost

    def _stand(self) -> None:
        """Give every spot its height and its y."""
        y = 142.0
        for i, spots in enumerate(self.rows):
            y -= 8 if i and self.numbers[i] == self.numbers[i - 1] else 0
            height = max(_height(spot) for spot in spots)
            for spot in spots:
                spot.y, spot.height = y, height
            y += height + BETWEEN
        self.bottom = y - BETWEEN

    def ports(self, row: int) -> dict[tuple[Spot, Spot], list[float]]:
        """Return for each segment below a row where it begins and where it ends."""
        ends = {pair: list(_meet(*pair)) for pair in self.segments[row]}
        for side in (1, 0, 1, 0):
            groups: dict[Spot, list[tuple[Spot, Spot]]] = {}
            for pair in ends:
                groups.setdefault(pair[side], []).append(pair)
            for spot, pairs in groups.items():
                low, high = spot.ends
                pairs.sort(key=lambda pair: (ends[pair][1 - side], pair[1 - side].middle))
                wanted = [min(max(ends[pair][1 - side], low), high) for pair in pairs]
                for pair, x in zip(pairs, _spread(wanted, low, high), strict=True):
                    ends[pair][side] = x
        return ends


def _box(place: str, modules: Sequence[Module]) -> Spot:
    """Return the box of a place, with its modules by folder."""
    folders: dict[str, list[str]] = {}
    for module in modules:
        parts = module.name.split(".")[2:]
        name = "" if not parts or module.path.endswith("__init__.py") else parts.pop()
        folders.setdefault("/".join(parts), []).extend([name] if name else [])
    words = []
    for folder in sorted(folders):
        words += [f"{folder}/"] if folder else []
        words += sorted(folders[folder])
    lines = sum(module.lines for module in modules)
    need = text_width(place, NAME, True), text_width(_counted(lines), SMALL)
    least = max(*need, *(text_width(word, SMALL) for word in words)) + 2 * PAD
    text = sum(text_width(f"{word} · ", SMALL) for word in words)
    return Spot(place, least=least, text=text, lines=lines, modules=words)


def same_floors(svg: str, other: str) -> bool:
    """Return whether two drawings differ in no more than numbers of lines.

    Numbers change with every commit that adds a function; modules, imports and places seldom do.
    """
    number = re.compile(r"[\d\N{NARROW NO-BREAK SPACE}]+ lines<")
    return number.sub("lines<", svg) == number.sub("lines<", other)


def _counted(lines: int) -> str:
    """Return a number of lines to two digits, so that not every commit changes the drawing."""
    unit = 10 ** max(0, len(str(lines)) - 2)
    return f"{round(lines / unit) * unit:,} lines".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _parts(spots: list[Spot]) -> list[list[Spot]]:
    """Cut a floor into as many rows as its boxes need, of about the same width."""
    for count in range(1, len(spots) + 1):
        cuts = itertools.combinations(range(1, len(spots)), count - 1)
        ways = [[spots[i:j] for i, j in itertools.pairwise((0, *cut, len(spots)))] for cut in cuts]
        best = min(ways, key=lambda rows: max(map(_needed, rows)))
        if max(map(_needed, best)) <= 0.9 * (RIGHT - LEFT):
            return best
    return [[spot] for spot in spots]


def _needed(spots: Sequence[Spot]) -> float:
    """Return the width that a row takes at least."""
    return sum(spot.least for spot in spots) + GAP * (len(spots) - 1)


def _share(spots: Sequence[Spot], width: float) -> None:
    """Share the width of a row: at least what each needs, the rest by how much it has to say."""
    room = width - GAP * (len(spots) - 1) - LANE * sum(spot.lane for spot in spots)
    boxes = [spot for spot in spots if not spot.lane]
    tight: list[Spot] = []
    while True:
        rest = room - sum(spot.least for spot in tight)
        total = sum(spot.text for spot in boxes if spot not in tight) or 1
        more = [x for x in boxes if x not in tight and x.text * rest / total < x.least]
        if not more:
            break
        tight += more
    for spot in boxes:
        spot.width = spot.least if spot in tight else spot.text * rest / total
    if len(tight) == len(boxes):  # what is left over, in equal parts
        for spot in boxes:
            spot.width += rest / len(boxes)


def _gap(left: Spot, right: Spot) -> float:
    return GAP if left.lane == right.lane else 2


def _meet(upper: Spot, lower: Spot) -> tuple[float, float]:
    """Return the ends of the shortest segment between two spots."""
    (a, b), (c, d) = upper.ends, lower.ends
    if max(a, c) <= min(b, d):
        return ((max(a, c) + min(b, d)) / 2,) * 2
    return (b, c) if b < c else (a, d)


def _spread(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Return the points nearest to those wanted that keep apart and stay between low and high."""
    step = min(20.0, (high - low) / max(1, len(wanted) - 1))
    points: list[float] = []
    for x in wanted:
        points.append(max(x, points[-1] + step) if points else x)
    shift = (sum(points) - sum(wanted)) / len(points)  # as much to the left as to the right
    points = [x - shift for x in points]
    for i in range(len(points)):
        points[i] = max(points[i], low + i * step)
    for i in range(len(points)):
        points[-1 - i] = min(points[-1 - i], high - i * step)
    return points


def _wrapped(spot: Spot) -> list[list[str]]:
    """Return the words of a box by line."""
    rows: list[list[str]] = []
    used = math.inf
    for word in spot.modules:
        width = text_width(f"{word} · ", SMALL)
        if word.endswith("/") or used + width > spot.width - 2 * PAD + text_width(" · ", SMALL):
            rows.append([])
            used = 0
        rows[-1].append(word)
        used += width
    return rows


def _beside(spot: Spot) -> bool:
    """Return whether the number of lines stands beside the name, not below it."""
    need = text_width(spot.place, NAME, True) + text_width(_counted(spot.lines), SMALL) + 20
    return need <= spot.width - 2 * PAD


def _height(spot: Spot) -> float:
    if spot.lane:
        return 0
    return 38 + LINE * ((not _beside(spot)) + len(_wrapped(spot))) + (8 if spot.modules else 4)


def draw(root: Path = ROOT) -> str:
    """Return the floors as an SVG."""
    modules = read(root)
    house = House(modules, [one for one in imports(modules) if not one.types_only])
    width, height = _n(house.right + WIDTH - RIGHT), _n(house.bottom + 120)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="{FONT}" role="img">',
            "<title>The floors of transformer_jax: every import goes down</title>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            *_roof(house, modules),
            *_arrows(house),
            *_boxes(house),
            *_caption(house),
            "</svg>\n",
        ]
    )


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _say(x: float, y: float, text: str, size: float, color: str = INK, style: str = "") -> str:
    more = f" {style}" if style else ""
    at = f'x="{_n(x)}" y="{_n(y)}"'
    return f'<text {at} font-size="{_n(size)}" fill="{color}"{more}>{escape(text)}</text>'


def _colors(floor: int, highest: int) -> tuple[str, str, str]:
    """Return a floor's colors: a tint, a border, and one for its arrows and names."""
    hue = (230 - 205 * floor / max(1, highest)) / 360
    if floor == 0:
        return "#eceae6", "#b5afa5", "#5d574e"
    shades = ((0.945, 0.55), (0.74, 0.38), (0.33, 0.45))
    found = []
    for light, saturation in shades:
        rgb = colorsys.hls_to_rgb(hue, light, saturation)
        found.append("#" + "".join(f"{round(255 * x):02x}" for x in rgb))
    return found[0], found[1], found[2]


def _roof(house: House, modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield the walls and the roof, which has the two doors."""
    middle, right = (LEFT + house.right) / 2, house.right + 2 * EAVES
    points = f"{LEFT - 2 * EAVES},122 {_n(middle)},14 {_n(right)},122"
    wall = f'x="{LEFT - EAVES}" y="122" width="{_n(house.right - LEFT + 2 * EAVES)}"'
    yield f'<rect {wall} height="{_n(house.bottom + 14 - 122)}" fill="#ffffff" stroke="#e3d8d1"/>'
    yield f'<polygon points="{points}" fill="#f6e3da" stroke="#c9a08c" stroke-linejoin="round"/>'
    center = 'text-anchor="middle"'
    yield _say(middle, 72, PACKAGE, 25, INK, f'{center} font-weight="700"')
    doors = [f"from {PACKAGE} import …"]
    doors += [f"python -m {PACKAGE}"] * (f"{PACKAGE}.__main__" in modules)
    yield _say(middle, 100, "  ·  ".join(doors), SMALL, QUIET, center)


def _boxes(house: House) -> Iterator[str]:
    """Yield the boxes with their texts, and the number of each floor."""
    above = -1
    for spots, number in zip(house.rows, house.numbers, strict=True):
        top, height = spots[0].y, spots[0].height
        style = 'text-anchor="middle"'
        if number != above:
            yield _say((LEFT - EAVES) / 2, top + 27, str(number), 17, "#8a939d", style)
        above = number
        tint, border, strong = _colors(number, house.numbers[0])
        for spot in sorted((x for x in spots if not x.lane), key=lambda spot: spot.x):
            at = f'x="{_n(spot.x)}" y="{_n(top)}" width="{_n(spot.width)}" height="{_n(height)}"'
            yield f'<rect {at} rx="7" fill="{tint}" stroke="{border}"/>'
            left, right, y = spot.x + PAD, spot.x + spot.width - PAD, top + 27
            yield _say(left, y, spot.place, NAME, strong, 'font-weight="700"')
            lines = _counted(spot.lines)
            if _beside(spot):
                yield _say(right, y, lines, SMALL - 1, QUIET, 'text-anchor="end"')
            else:
                y += LINE
                yield _say(left, y, lines, SMALL - 1, QUIET)
            rows = _wrapped(spot)
            for i, words in enumerate(rows):
                text = " · ".join(words).replace("/ · ", "/ ")
                yield _say(left, y + LINE * (i + 1) + 3, text, SMALL)


def _arrows(house: House) -> Iterator[str]:
    """Yield the arrows, those to one place in its color."""
    rows = zip(house.rows, house.numbers, strict=True)
    colors = {
        spot.place: _colors(number, house.numbers[0])[2]
        for spots, number in rows
        for spot in spots
        if not spot.lane
    }
    for row, segments in enumerate(house.segments[:-1]):
        ends = house.ports(row)
        for pair, count in sorted(segments.items(), key=lambda x: (x[0][1].place, ends[x[0]])):
            upper, lower = pair
            (x0, x1), y0, y1 = ends[pair], upper.y + upper.height, lower.y
            tip = y1 if lower.lane else y1 - 9
            half, width = (y0 + tip) / 2, 1.2 + 0.75 * round(math.log2(count))
            way = f"M{_n(x0)} {_n(upper.y if upper.lane else y0)}V{_n(y0)}"
            way += f"C{_n(x0)} {_n(half)} {_n(x1)} {_n(half)} {_n(x1)} {_n(tip)}"
            line = f'stroke="{colors[lower.place]}" stroke-width="{_n(width)}"'
            yield f'<path d="{way}" fill="none" {line} stroke-opacity="0.8"/>'
            if not lower.lane:
                side = 4.5 + width / 2
                points = f"{_n(x1 - side)},{_n(y1 - 11)} {_n(x1 + side)},{_n(y1 - 11)}"
                points += f" {_n(x1)},{_n(y1)}"
                yield f'<polygon points="{points}" fill="{colors[lower.place]}"/>'


def _caption(house: House) -> Iterator[str]:
    """Yield the ground, and what the arrows mean."""
    y = house.bottom + EAVES
    ends = LEFT - 2 * EAVES, _n(house.right + 2 * EAVES)
    yield f'<path d="M{ends[0]} {_n(y)}H{ends[1]}" stroke="#c9a08c" stroke-width="2"/>'
    said = ["An arrow is an import by a place above; the thicker, the more imports."]
    left = len(house.down) - len(house.drawn)
    if left:
        said += [f"Left out: {left} arrows of fewer than {MANY} imports that a longer way implies."]
    up = sum(house.every.values()) - sum(house.down.values())
    said += [f"{up} imports do not go down; they are not drawn."] if up else []
    for i, text in enumerate(said):
        color = WRONG if "not go down" in text else QUIET
        yield _say(LEFT, y + 32 + 24 * i, text, SMALL, color)
