"""Fixtures that several of this room's tests share."""

from tests.cluster.carry.handles import card

__all__ = ["card"]
