"""Keyed reuse: whatever can change a value is in its key."""
