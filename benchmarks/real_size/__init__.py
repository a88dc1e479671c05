"""Our engine beside vLLM and llama.cpp at real sizes: the same prompts, lengths, types and threads, in
turns (__main__.py)."""
