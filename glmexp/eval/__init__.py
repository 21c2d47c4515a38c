"""Held-out measurements: one module a hook. Light to import."""
