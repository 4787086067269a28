"""Validates Kubernetes objects against published schemas: Kubernetes' own (kubernetes-validate), and those of KEDA and
of the Prometheus operator (tools/operator_schemas.py).

Unknown fields are errors: the API server would drop them in silence.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

VERSIONS = ("1.25", "1.37")
"""The oldest and the newest version of Kubernetes that the package has."""

Object = dict[str, Any]


def is_builtin(one: Object) -> bool:
    """Whether Kubernetes itself defines this kind."""
    group = str(one["apiVersion"]).rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


def schema_problems(one: Object) -> list[str]:
    """Return what is wrong with an object of a builtin kind, by version of Kubernetes."""
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {_name(one)}: {error.json_path}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError:
            found.append(f"{version}: there is no {one['apiVersion']} {one['kind']}")
    return found


def custom_problems(one: Object, schemas: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object of an operator's kind. `schemas`: by apiVersion and kind."""
    schema = schemas[f"{one['apiVersion']} {one['kind']}"]
    errors = Draft202012Validator(schema).iter_errors({**one, "metadata": {}})
    return [f"{_name(one)}: {error.json_path}: {error.message}" for error in map(_deepest, errors)]


def _deepest(error: Any) -> Any:
    """Of the alternatives that a value matches none of, return the error farthest in."""
    return max(map(_deepest, error.context), key=lambda one: len(one.absolute_path)) if error.context else error


def _name(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"
