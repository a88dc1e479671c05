#!/usr/bin/env bash
# A drafter of its own for base/ (33 MB): `bash drafter.sh DATA`, an hour on two cores. DATA: the folder with GSM8K's train.jsonl.
# The model answers NUM of its problems (300, or the second argument); an EAGLE layer is trained on the answers.
set -euo pipefail
data=${1:?give the folder with train.jsonl of GSM8K}
num=${2:-300}

tlt task math --num "$num" --data "$data" --split train --out problems.jsonl
tlt generate base --prompts problems.jsonl --chat true --max-tokens 400 --dtype bfloat16 --threads 2 --out responses.jsonl
tlt drafter train base --responses responses.jsonl --preset eagle --epochs 4 --dtype bfloat16 --threads 2 --out drafter
