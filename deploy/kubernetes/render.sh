#!/bin/sh
# Renders the Helm chart with its default values, and with KEDA, a ServiceMonitor and a NetworkPolicy, into plain manifests.
#   render.sh HELM FOLDER
set -eu
helm=$1 folder=$2
chart=$(cd "$(dirname "$0")/../helm/warmroute" && pwd)
render() {
    echo "# Rendered from deploy/helm/warmroute by \`make manifests\`. Apply it to the namespace \`default\`."
    "$helm" template warmroute "$chart" --namespace default --kube-version 1.32.0 "$@" 2>/dev/null |
        grep -v -E '^ *(helm.sh/chart|app.kubernetes.io/managed-by):|^# Source:'
}
render > "$folder/warmroute.yaml"
render --set keda.enabled=true,engines.deployment=vllm,networkPolicy.enabled=true \
    --set admin.token=change-me,serviceMonitor.enabled=true \
    > "$folder/warmroute-keda.yaml"
