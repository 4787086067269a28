"""Discovery: finds nodes that somebody else starts, in files, in DNS and in Kubernetes."""
