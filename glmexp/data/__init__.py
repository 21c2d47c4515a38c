"""Rows, chat templates, labels and batches."""
