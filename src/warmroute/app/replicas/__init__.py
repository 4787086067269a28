"""Replicas of the router that share their state through Redis or Valkey (`[cluster]`)."""
