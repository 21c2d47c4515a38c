"""glmexp: composed fine-tuning experiments for ChatGLM 1-3 and Qwen2 on DeepSpeed."""

__version__ = "0.1.0"
