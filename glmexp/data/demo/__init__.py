"""The shipped demo data: short questions in Chinese and English, answered in one word or two."""
