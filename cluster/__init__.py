"""The cluster room: the engine behind HTTP, on Ray Serve.

A request's way, and the rooms it passes:

- `ingress` reads it, finds who serves the model that it asks for, and plans the answer: the prompt as token ids, and
  how tokens are to be picked.
- `wire` has OpenAI's words for that, and those for the answer: a body's fields on the way in, objects on the way out.
- `carry` brings each choice to a replica, to another one if that is lost, and brings the tokens back.
- `replica` keeps one engine, which answers all ingresses.
- Back in `ingress`, tokens become text (`wire`'s `Answer`), and leave as a stream or whole.

`observe` counts and traces all that. `operate` is what an operator runs: `tidar up`, `status`, `check`. Apart from all
that, `training` has several workers train one drafter for `tidar convert --workers`.

Beside the rooms are these modules:

- nouns, the types that all rooms use: `line` (what crosses between ingress and replica), `card` (what an ingress must
  know of a model), `errors`, `options`;
- what Ray Serve is told to run: `app` ties ingress and engines into one application, `preflight` finds what would fail
  before anything starts;
- `autoscaling`: how many replicas there are where the options leave it open;
- for clusters that others run: `drain` empties a node before it goes (it finds Ray as `operate` does), `leaving` asks
  the clients of that node's proxy to go elsewhere;
- `request_ids`: keeps from Serve what a client sends as a request's id and is none;
- `lean_serve`: what the processes of a Ray of our own import first.

In this list nothing imports what is to its right: nouns, `observe` and `wire`, `carry` and `replica`, `ingress`,
`preflight`, `app`, `operate`, `training`.

Tokens cross the line between ingress and replica, never text: a replica knows no wire format, the ingress no model.
The ingress asks a replica what it must know of the model, its tokenizer included, whenever new replicas are there.
Every second it asks each replica whether it is alive. This also tells the replica that the ingress is alive: if one
ingress goes silent while another is heard, the replica ends the silent one's requests. The ingress decides for itself
how much work it lets in. Where the model may sleep, it holds a request until a replica is up.

A stream outlives its replica, since a token depends on prefix, parameters and seed alone: the ingress knows the tokens
that it passed on, and sends the request on as prompt + tokens. It does not outlive its ingress.
"""
