"""TLT: train reasoning models with reinforcement learning, faster, without changing the result."""

__version__ = "0.1.0"
