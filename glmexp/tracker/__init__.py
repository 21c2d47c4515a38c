"""Where metrics go: one module a tracker. Light to import."""
