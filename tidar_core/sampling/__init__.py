"""The token rule: which token comes at a position, given its logits, the parameters and the seed.

    x = logits with bias and penalties (`penalties.py`), banned ids and what a grammar refuses at -inf
    T = 0:  argmax x, the lowest id on a tie
    T > 0:  z = x / T;  S = what top-k, top-p and min-p keep of softmax(z)
            argmax over v in S of  z[v] + G(seed, choice, position, v)

G is Gumbel noise looked up in `philox.py`, so the pick is a sample of softmax(z) over S that is fixed by the
seed, and a drafter that guesses with the same noise agrees as often as its distribution allows.

A row's token depends on that row and its rule alone, bit for bit: never on the other rows, their number or their
order. Three things see to that. Maxima, sorts and elementwise functions are free of rounding order. Where
probabilities must be summed, for top-p, they are integers first (fixed point, relative to the row's best token):
integer sums are exact in any order and over any width. And since what S keeps is always the head of the row by
descending score, it can be found among a few best candidates, whose number changes the cost and never the result.

    token_rule.py  the rule of one token
    picking.py     picks by it, in plain torch: what the kernels of each device have to agree with
    philox.py      the random numbers
    penalties.py   what changes the scores before the rule sees them
    bad_words.py   what never comes
"""
