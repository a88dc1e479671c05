"""What a GPU has to show, in one command: `make gpu`, or `python -m benchmarks.gpu --out
benchmarks/results/gpu`."""
