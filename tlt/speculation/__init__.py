"""Lossless speculative decoding: the sampling law, draft trees, verification, and the tuner.

With Gumbel noise G(v), an argmax over log-probabilities is a sample (the Gumbel-max trick):

    y = argmax_v [ log p(v) + G(v) ]   has   P(y = v) = p(v)

G is a hash of (key of the response, position, token id v), so a response follows from the model and its key,
on any engine and in any order. Speculation is four steps:

    1. a drafter proposes the next tokens, a chain or a tree        law/tree.py
    2. the target computes the logits at every node in one forward  law/tree.py: positions and mask
    3. the target draws its own token at every node, by the law     law/draw.py, defined in sampling.py
    4. the walk goes on while that token is a drafted child         law/verify.py

Every committed token is the target's own: a wrong draft costs time and changes no token. A drafter with
distribution q agrees more often if it uses the target's noise (Gumbel coupling):

    argmax_v [ log q(v) / tau + G(v) ]

q averages over what the drafter does not know, so it is flatter than p; tau < 1 sharpens it
(`TauSearch` in drafter/drafting/learned/calibration.py).

Read in law/: sampling.py, params.py, tree.py, verify.py, draw.py; then tuner/protocol.py. compiled.py (CPU)
and fused.py (GPU) only compute faster.
"""
