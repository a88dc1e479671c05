"""The small model that proposes tokens: its shapes, how it drafts (drafting/), is trained (training/) and
is stored (formats/). protocol.py is what any drafter promises the engine."""
