"""The cluster room: the engine behind HTTP, on Ray Serve.

A request's way, and the rooms it passes:

- `ingress` reads it, finds who serves the model that it asks for, and plans it: token ids, how they are picked.
- `wire` has OpenAI's words for that, and those for the answer: a body's fields on the way in, objects on the way out.
- `carry` brings each choice to a replica, over as many of them as it takes, and brings tokens back.
- `replica` keeps one engine, which answers all ingresses.
- Back in `ingress`, tokens become text (`wire`'s `Answer`), and leave as a stream or whole.

`observe` counts and traces all that. At the top stand the nouns of all rooms: `line` (what crosses between ingress and
replica), `card` (what an ingress must know of a model), `errors`, `options`; and what Ray Serve is told to run: `app`
ties ingress and engines into one application, `preflight` says first what would fail.

`operate` is what an operator runs: `tidar up`, `status`, `check`. For clusters that others run there are `drain`,
which empties a node before it goes (it finds Ray as `operate` does), `leaving`, which asks the clients of its proxy to
go elsewhere, and `autoscaling`, how many replicas there are where the options leave it open. `request_ids` keeps from
Serve what is no name for a request; `lean_serve` is what the processes of a Ray of our own import first. Apart from all
that, `training` has several workers train one drafter for `tidar convert --workers`.

No room imports one to its right: nouns, `observe` and `wire`, `carry` and `replica`, `ingress`, `preflight`, `app`,
`operate`, `training`.

Tokens cross the line between ingress and replica, never text: a replica knows no wire format, the ingress no model.
The ingress asks a replica what it must know of the model, its tokenizer included, whenever new replicas are there.
Every second it asks each replica whether it is alive. This also tells the replica that the ingress is alive: if one
ingress goes silent while another is heard, the replica ends the silent one's requests. The ingress decides for itself
how much work it lets in. Where the model may sleep, it holds a request until a replica is up.

A stream outlives its replica, since a token depends on prefix, parameters and seed alone: the ingress knows the tokens
that it passed on, and sends the request on as prompt + tokens. It does not outlive its ingress.
"""
