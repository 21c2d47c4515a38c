"""The shipped tiny models: one folder a model, and the text that they were pre-trained on."""
