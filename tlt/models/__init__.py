"""The decoder, trainable (decoder.py) and packed for the engine (packed.py); Hugging Face's files (hf/)."""
