"""Reading runs back: what differs, what came of it, and whether a difference is more than chance. Light to import."""
