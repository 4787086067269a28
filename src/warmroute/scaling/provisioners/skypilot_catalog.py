"""SkyPilot's catalogue: a CSV file for each cloud with the price of each instance type by region. A price of 0 stands
for an unknown one, and some spot prices are bid floors. Of several prices the lowest plausible one counts.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from warmroute.config import ProvisionerConfig
from warmroute.scaling.provisioner import ProvisionerError

COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Region", "Price", "SpotPrice")


class CatalogRow(NamedTuple):
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


def catalog_folder(catalog_dir: str) -> Path:
    """Return the folder with one folder for each cloud: that of the newest version, if there are versions."""
    folder = Path(catalog_dir).expanduser()
    versions = [one for one in folder.glob("v*") if re.fullmatch(r"v[0-9]+", one.name)]
    return max(versions, key=lambda one: int(one.name[1:])) if versions else folder


def read_catalog(path: Path, cloud: str, wanted: ProvisionerConfig) -> tuple[list[CatalogRow], list[str]]:
    """Return the rows of a cloud's file that the configuration wants, one for each offer, and the file's problems.
    Raises ProvisionerError."""
    best: dict[str, CatalogRow] = {}
    without_type = invalid = 0
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = set(COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise ProvisionerError(f"{path} lists no instances: no column {', '.join(sorted(missing))}")
            for line in reader:
                gpu, instance_type = line["AcceleratorName"] or "", line["InstanceType"] or ""
                region = line["Region"] or ""
                if not gpu or (wanted.gpu and gpu.lower() != wanted.gpu.lower()):
                    continue
                if wanted.regions and region not in wanted.regions:
                    continue
                if not instance_type:
                    without_type += 1
                    continue
                if wanted.instance_types and instance_type not in wanted.instance_types:
                    continue
                try:
                    gpus = int(float(line["AcceleratorCount"] or 1))
                    rows = [
                        CatalogRow(cloud, region, instance_type, gpu, gpus, market == "spot", float(price))
                        for market in wanted.markets
                        if (price := line["SpotPrice" if market == "spot" else "Price"])
                    ]
                except (ValueError, TypeError):
                    invalid += 1
                    continue
                for row in rows:
                    best[row.name] = _better((best.get(row.name, row), row), wanted.min_usd_per_gpu_hour)
    except FileNotFoundError:
        raise ProvisionerError(f"{path} does not exist: download it with `sky show-gpus --cloud {cloud}`") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProvisionerError(f"cannot read {path}: {error}") from None
    problems = []
    if without_type:
        problems.append(
            f"{path}: ignoring {without_type} rows without an instance type (the cloud sells GPUs separately); "
            "name the instance type in provisioners.prices"
        )
    if invalid:
        problems.append(f"{path}: ignoring {invalid} rows whose prices or counts are not numbers")
    return list(best.values()), problems


def _better(rows: Iterable[CatalogRow], min_usd_per_gpu_hour: float) -> CatalogRow:
    """Return the cheapest row with a plausible price, else any, whose price the validation then reports."""

    def rank(row: CatalogRow) -> tuple[bool, float]:
        usd = row.usd_per_hour
        return not (math.isfinite(usd) and usd > 0 and usd >= min_usd_per_gpu_hour * row.gpus), usd

    return min(rows, key=rank)
