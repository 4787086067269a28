"""Kubernetes' API: connections to a cluster, objects, lists and watches. Needs the extra `kubernetes`."""
