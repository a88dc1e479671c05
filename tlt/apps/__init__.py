"""The doors to the street: the commands (cli/), the Python API (api.py), what starts and serves runs
(run/), the plan of memory, the page of a run, audits, integrations."""
