"""Reinforcement learning. loop.py is a run on one page; launch/ starts its ranks/, build/ makes its parts."""
