"""What a run can do: train, evaluate, export."""
