#!/bin/sh
# Prints a kubeconfig for a router in another cluster, with the token of remote-reader.yaml.
#   kubeconfig.sh CONTEXT NAMESPACE
set -eu
context=$1 namespace=$2
read_secret() {
    kubectl --context "$context" -n "$namespace" get secret warmroute-remote -o "jsonpath={.data.$1}"
}
server=$(kubectl --context "$context" config view --minify -o 'jsonpath={.clusters[0].cluster.server}')
authority=$(read_secret 'ca\.crt')
token=$(read_secret token | base64 -d)
[ -n "$token" ] || { echo "kubeconfig.sh: the Secret warmroute-remote has no token yet; try again" >&2; exit 1; }
cat <<END
apiVersion: v1
kind: Config
clusters:
  - {name: cluster, cluster: {server: "$server", certificate-authority-data: "$authority"}}
users:
  - {name: router, user: {token: "$token"}}
contexts:
  - {name: router, context: {cluster: cluster, user: router, namespace: "$namespace"}}
current-context: router
END
