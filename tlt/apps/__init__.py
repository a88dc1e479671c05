"""The doors to the street: commands (cli/), Python API (api.py), and what they use."""
