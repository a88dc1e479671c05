"""Our engine beside vLLM and llama.cpp on the same work, in turns (__main__.py)."""
