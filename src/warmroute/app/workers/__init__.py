"""Replicas of the router over Redis or Valkey: the transport of their messages, and what has to outlive them."""
