"""The router process: builds all parts, connects them, starts, reloads and stops them."""

from warmroute.service.service import Service

__all__ = ["Service"]
