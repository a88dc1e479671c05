"""Generates: backend.py is what any engine promises, own/ our engine, vllm/ vLLM as one; build/ makes one
from a model, a drafter and settings."""
