"""From samples to a table: medians, ratios, and whether each bar is met. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

# implementation -> quantity -> one value a launch; launch i of every implementation ran in round i
Samples = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a ratio must keep to: `implementation`'s `quantity` over `of`'s lies in [at_least, at_most]."""

    implementation: str
    quantity: str
    at_most: float
    of: str = "fsdp2"
    at_least: float = 0.0

    def __str__(self) -> str:
        low = f"{self.at_least:.2f} to " if self.at_least else "<= "
        return f"{low}{self.at_most:.2f}x {self.of}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `met` is None where no bar applies."""

    case: str
    implementation: str
    quantity: str
    value: float
    unit: str
    of: str
    ratio: float | None
    bar: str = ""
    met: bool | None = None


def compare(case: str, samples: Samples, unit: str, bars: Sequence[Bar]) -> list[Row]:
    """A row for every implementation and quantity, as a ratio to FSDP2, and one for every further bar.

    The ratio is the median over rounds of the ratio within the round, so that a machine that slows down
    between two rounds changes nothing.
    """
    rows = []
    for implementation, quantities in samples.items():
        for quantity in quantities:
            mine = [b for b in bars if (b.implementation, b.quantity) == (implementation, quantity)]
            mine.sort(key=lambda bar: bar.of != "fsdp2")
            if not mine or ("fsdp2" in samples and mine[0].of != "fsdp2"):
                rows.append(_row(case, samples, implementation, quantity, unit, None))
            rows += [_row(case, samples, implementation, quantity, unit, bar) for bar in mine]
    return rows


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print the rows under their cases; a miss is marked so that it cannot be overlooked."""
    print(f"\n{title}")
    for case in dict.fromkeys(row.case for row in rows):
        print(f"  {case}")
        for row in (row for row in rows if row.case == case):
            ratio = "" if row.ratio is None else f"{row.ratio:6.2f}x {row.of}"
            mark = {None: "", True: f"{row.bar}: met", False: f"{row.bar}: MISS"}[row.met]
            value = f"{row.value:12.3f} {row.unit}"
            print(f"    {row.implementation:<16} {row.quantity:<20} {value:<22} {ratio:<20} {mark}".rstrip())


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as plain values."""
    return [asdict(row) for row in rows]


def _row(case: str, samples: Samples, implementation: str, quantity: str, unit: str, bar: Bar | None) -> Row:
    of = bar.of if bar else "fsdp2"
    values = samples[implementation][quantity]
    ratio = _ratio(values, samples.get(of, {}).get(quantity))
    met = None if bar is None or ratio is None else bar.at_least <= ratio <= bar.at_most
    text = str(bar) if bar else ""
    return Row(case, implementation, quantity, median(values), unit, of, ratio, text, met)


def _ratio(values: Sequence[float], reference: Sequence[float] | None) -> float | None:
    if reference is None or not all(reference):
        return None
    return median(value / base for value, base in zip(values, reference, strict=True))
