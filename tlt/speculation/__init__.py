"""Lossless speculative decoding: the sampling law, draft trees, verification, and the tuner.

Ordinary sampling asks a random generator for the next token, so its tokens depend on the generator's history.
Here the randomness of every possible token is fixed beforehand. Gumbel noise G(v) added to log-probabilities
makes the argmax a sample of the distribution (the Gumbel-max trick):

    y = argmax_v [ log p(v) + G(v) ]   has   P(y = v) = p(v)

G is a hash of (key of the response, position, token id v). So a response is a function of the model and its
key, on any engine and in any order. Speculation needs no more:

    1. a drafter proposes the next tokens, a chain or a tree        law/tree.py
    2. the target computes the logits at every node in one forward  law/tree.py: positions, and who sees whom
    3. the target draws its own token at every node, by the law     law/sampling.py
    4. the walk goes on while that token is a drafted child         law/verify.py

Every committed token is the target's own, so a wrong draft costs time and changes nothing. A drafter may rank
its candidates with the same noise (Gumbel coupling): then it agrees with the target more often. The target
will pick argmax(log p + G). The drafter knows G and estimates p by its own distribution q, so it guesses

    argmax_v [ log q(v) / tau + G(v) ]

At tau = 1 it takes q for p. But the drafter knows less than the target, and averages over what it does not
know. An average of distributions is flatter than they are. So q is often flatter than p, and tau < 1, which
sharpens q, guesses better. How much depends on drafter and text: `TauSearch` in
drafter/drafting/learned/calibration.py counts which tau hits most often.

Read in law/: sampling.py (the law), params.py (temperature and truncation), tree.py, verify.py; then
tuner/protocol.py. The engine draws by verify.py → draw.py → compiled.py on a CPU (sampling.py in float64),
fused.py on a GPU. compiled.py and fused.py compute the same faster, and nothing is lost by skipping them.
"""
