"""The plan: memory, time and batch numbers of a configuration, known before anything is loaded. Imports no torch."""
