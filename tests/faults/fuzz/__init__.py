"""What do the commands say to input that is damaged or absurd? `python -m tests.faults.fuzz` asks them.

case                           a command in a folder of its own, and what it may end with
sound                          what every case begins with: a model, a drafter, a task, the folder of a run
inputs · arguments · surroundings · run_folders · user_code     the kinds of cases, by what is odd
judge                          what becomes of a case
kinds                          all of them, and how many cases of each
"""
