"""Mistakes that tests seed into the overlays."""

from tests.deploy.mistakes import agreement, lifetimes, rights
from tests.deploy.mistakes.registry import MISTAKES, Change

__all__ = ["MISTAKES", "Change", "agreement", "lifetimes", "rights"]
