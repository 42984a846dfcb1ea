"""Readers of recordings, one module a format."""
