"""The decoder, trained (decoder.py) and packed for the engine (packed.py), with its attention, cache and
adapters; Hugging Face's files (hf/)."""
