"""How a vector enters a forward pass: the marker, where it stands, and what is put in its place."""

from __future__ import annotations

from dragoman.injection.marker import Marker, choose_marker, prompt_renderer
from dragoman.injection.replace import ReplaceInjector
from dragoman.injection.sites import find_sites

__all__ = ["Marker", "ReplaceInjector", "choose_marker", "find_sites", "prompt_renderer"]
