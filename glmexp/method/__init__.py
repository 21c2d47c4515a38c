"""What is trained: one module a method, each a settings dataclass and ``apply``. Light to import."""
