"""SkyPilot's catalogue: a CSV file for each cloud, with what each instance type costs where. Prices of 0 stand there
for ones that are not known, and bid floors for spot prices; the lowest that can be true counts.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from warmroute.scaling.provisioner import CloudError

COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Region", "Price", "SpotPrice")


class Row(NamedTuple):
    cloud: str
    region: str
    instance_type: str
    gpu: str
    gpus: int
    spot: bool
    usd_per_hour: float

    @property
    def name(self) -> str:
        return f"{self.cloud}/{self.region}/{self.instance_type}" + ("/spot" if self.spot else "")


class Wanted(NamedTuple):
    gpu: str
    """Empty for any."""
    regions: frozenset[str]
    instance_types: frozenset[str]
    spot: tuple[bool, ...]
    floor_usd: float
    """Of a GPU, below which a price is none."""


def folder_of(catalog_dir: str) -> Path:
    """Where the clouds' folders are: in the newest version's, where there are versions."""
    folder = Path(catalog_dir).expanduser()
    versions = [one for one in folder.glob("v*") if re.fullmatch(r"v[0-9]+", one.name)]
    return max(versions, key=lambda one: int(one.name[1:])) if versions else folder


def rows_of(path: Path, cloud: str, wanted: Wanted) -> tuple[list[Row], list[str]]:
    """What is wanted of a cloud's file, one row for each offer, and what is to be said of it. Raises CloudError."""
    best: dict[str, Row] = {}
    no_type = unreadable = 0
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = set(COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise CloudError(f"{path}: has no column {', '.join(sorted(missing))}: it is no catalogue of instances")
            for line in reader:
                gpu, kind, region = line["AcceleratorName"] or "", line["InstanceType"] or "", line["Region"] or ""
                if not gpu or (wanted.gpu and gpu.lower() != wanted.gpu.lower()):
                    continue
                if wanted.regions and region not in wanted.regions:
                    continue
                if not kind:
                    no_type += 1
                    continue
                if wanted.instance_types and kind not in wanted.instance_types:
                    continue
                try:
                    gpus = int(float(line["AcceleratorCount"] or 1))
                    prices = [(spot, line["SpotPrice" if spot else "Price"] or "") for spot in wanted.spot]
                    rows = [Row(cloud, region, kind, gpu, gpus, spot, float(price)) for spot, price in prices if price]
                except (ValueError, TypeError):
                    unreadable += 1
                    continue
                for row in rows:
                    before = best.get(row.name)
                    best[row.name] = row if before is None else _better((before, row), wanted.floor_usd)
    except FileNotFoundError:
        raise CloudError(f"{path} is not there: `sky show-gpus --cloud {cloud}` makes SkyPilot fetch it") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CloudError(f"{path}: cannot be read: {error}") from None
    said = []
    if no_type:
        said.append(
            f"{path}: {no_type} rows have no instance type (this cloud sells GPU and machine apart): not on offer; "
            "name the instance type in provisioners.prices"
        )
    if unreadable:
        said.append(f"{path}: {unreadable} rows have prices or counts that are no numbers: dropped")
    return list(best.values()), said


def _better(rows: Iterable[Row], floor_usd: float) -> Row:
    """The cheapest whose price can be true (of its zones); else any, for whoever checks prices to complain of."""

    def rank(row: Row) -> tuple[bool, float]:
        usd = row.usd_per_hour
        return not (math.isfinite(usd) and usd > 0 and usd >= floor_usd * row.gpus), usd

    return min(rows, key=rank)
