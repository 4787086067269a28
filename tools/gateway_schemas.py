"""Writes the schemas of the gateways' objects in deploy/envoy, from the CustomResourceDefinitions that the gateways
publish: tests/deploy/gateway_schemas.json.

    python tools/gateway_schemas.py CRD.yaml ...

Of each object that a manifest enters, the result has all field names, their types, values and which are required;
fields that no manifest uses are not described further. Descriptions are left out. Unknown fields are errors: an API
server would drop them in silence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ("istio.yaml", "envoy-gateway.yaml")
TARGET = ROOT / "tests" / "deploy" / "gateway_schemas.json"
KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")


def published(paths: list[str]) -> dict[str, Any]:
    """Return the schemas by apiVersion and kind."""
    found = {}
    for path in paths:
        for one in yaml.safe_load_all(Path(path).read_text()):
            if not one or one.get("kind") != "CustomResourceDefinition":
                continue
            spec = one["spec"]
            for version in spec["versions"]:
                name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
                found[name] = version["schema"]["openAPIV3Schema"]
    return found


def reduced(schema: dict[str, Any], used: list[Any]) -> dict[str, Any]:
    """Return what checks these values."""
    result = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    if "properties" in schema:
        mappings = [one for one in used if isinstance(one, dict)]
        result["additionalProperties"] = False
        result["properties"] = {
            name: reduced(field, [one[name] for one in mappings if name in one])
            if any(name in one for one in mappings)
            else {}
            for name, field in schema["properties"].items()
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = reduced(schema["additionalProperties"], [])
    if "items" in schema:
        result["items"] = reduced(schema["items"], [item for one in used if isinstance(one, list) for item in one])
    return result


def main() -> None:
    schemas, objects = published(sys.argv[1:]), []
    for name in MANIFESTS:
        objects += [one for one in yaml.safe_load_all((ROOT / "deploy" / "envoy" / name).read_text()) if one]
    found: dict[str, Any] = {}
    for kind in sorted({f"{one['apiVersion']} {one['kind']}" for one in objects}):
        found[kind] = reduced(schemas[kind], [one for one in objects if f"{one['apiVersion']} {one['kind']}" == kind])
        found[kind]["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {"type": "object"}}
    TARGET.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
