"""How long a test waits for an event before it fails."""

from __future__ import annotations

PATIENCE = 240.0
"""Seconds: longer than a busy machine needs for any event, and shorter than the gate's limit for a whole test."""
