"""Reinforcement learning. loop.py is a run on one page: rollout/, update/, saved/ on ranks/ that launch/
starts; build/ makes the parts from a configuration, report/ tells them."""
