"""Discovery: finds nodes that somebody else starts, in files, in DNS and in Kubernetes. sync.py keeps the fleet equal
to what the sources list, and names the source of each kind (_KINDS)."""
