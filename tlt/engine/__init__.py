"""Generates responses: backend.py is what any engine promises, own/ and vllm/ keep it, build/ makes
engines."""
