"""What the operator's own programs answer, in JSON: offers and machines. Each offer is read for itself, so that one
that makes no sense costs no other.
"""

from __future__ import annotations

from typing import Any

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine


def entries(answer: bytes, key: str, who: str) -> list[Any]:
    """The list under this key; raises CloudError with the answer's beginning where it is none."""
    try:
        read = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CloudError(f"{who}: the answer is not JSON ({error}); it begins {beginning(answer)}") from None
    found = read.get(key) if isinstance(read, dict) else None
    if not isinstance(found, list):
        raise CloudError(f'{who}: the answer is not like {{"{key}": […]}}; it begins {beginning(answer)}')
    return found


def offers(answer: bytes, config: ProvisionerConfig) -> tuple[list[Offer], list[str]]:
    """The offers in it, and a sentence for each entry that is none."""
    read: list[Offer] = []
    said: list[str] = []
    defaults = {"island": config.island or config.label, "gpus": 1}
    for entry in entries(answer, "offers", config.label):
        if not isinstance(entry, dict):
            said.append(f"{config.label}: an offer is {entry!r:.60}, not a table: dropped")
            continue
        try:
            read.append(msgspec.convert(defaults | entry | {"provisioner": config.label}, Offer))
        except msgspec.ValidationError as error:
            said.append(f"{config.label}: the offer {str(entry.get('name'))[:60]!r} is dropped: {error}")
    return read, said


def machines(answer: bytes, who: str) -> list[Machine]:
    """Every machine in it. One that cannot be read is an error: one that is overlooked would be taken for gone."""
    try:
        return msgspec.convert(entries(answer, "machines", who), list[Machine])
    except msgspec.ValidationError as error:
        raise CloudError(f"{who}: a machine in the answer cannot be read: {error}") from None


def beginning(answer: bytes) -> str:
    return repr(answer[:80].decode(errors="replace"))
