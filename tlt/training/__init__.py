"""Reinforcement learning. Begin with loop.py, a run on one page."""
