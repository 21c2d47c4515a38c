"""What a run may be, what it is, and whether that makes sense. Imports nothing heavy and no other room."""
