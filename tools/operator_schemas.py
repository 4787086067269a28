"""Prints the JSON schemas of the objects of KEDA and of the Prometheus operator that the chart renders. Runs in
.venv-deploy: cloudcoil's models are generated from the operators' CustomResourceDefinitions, and need httpx.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cloudcoil.models.keda import v1alpha1 as keda  # type: ignore[import-not-found]
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator  # type: ignore[import-not-found]

KINDS = {
    "keda.sh/v1alpha1": [keda.ScaledObject, keda.TriggerAuthentication],
    "monitoring.coreos.com/v1": [prometheus_operator.ServiceMonitor, prometheus_operator.PrometheusRule],
}


def forbid_unknown_fields(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            forbid_unknown_fields(value)
    elif isinstance(schema, list):
        for value in schema:
            forbid_unknown_fields(value)


schemas = {
    f"{version} {model.__name__}": model.model_json_schema(by_alias=True)
    for version, models in KINDS.items()
    for model in models
}
forbid_unknown_fields(schemas)
json.dump(schemas, sys.stdout)
