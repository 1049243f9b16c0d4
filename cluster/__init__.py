"""The cluster room: the engine behind HTTP, on Ray Serve.

A request's way: `api` (routes) reads the body, `models` finds who serves what it asks for, `schemas` checks it
(`messages`, `tools`, `structured` their parts; `items` makes a chat of what the Responses API is asked); `prompts`
turns text into token ids, in a thread, `sampling` says how the answer is picked; `streams` sends one `Request` a choice
on its way and turns what comes back into text (`spelling` the single tokens), `thoughts` tells what the model only
thinks apart, `tool_calls` finds the calls in the rest; `handover` carries each over as many replicas as it takes, in
`attempts`, and `channels` fetches what each replica has for all of them; `routing` chooses replicas by `affinity`, the
prefix that a replica has computed already, and by load; `responses` writes the answer down as OpenAI's objects,
`response_object` as those of the Responses API. `openapi` describes it all.
`replica` keeps one engine, driven by `engine_thread`; `metrics` counts there and the ingress shows all replicas on one
page, with what came of its requests (`outcomes`). `tracing` tells OpenTelemetry. `app` ties ingress and engine into one
Serve application, `deploy` puts it on a Ray cluster together with the playground (`preflight` first, `haproxy` in
front); `status` reads it back.
For clusters that others run, `check` reads a Serve config before it is deployed, `drain` empties a node before it goes,
and `leaving` asks the clients of its proxy to go elsewhere.

Apart from all that, `train` has several workers (`train_worker`) train one drafter for `tidar convert --workers`.

Tokens cross the line between ingress and replica, never text: a replica knows no wire format, the ingress no model.
What the ingress must know of a model, its tokenizer included, it asks of a replica whenever others are there
(`ModelCard`); whether replicas live it asks every second (`directory`), by which they know that it lives: what it asked
for they end when it falls silent and another does not. How much work it lets in is its own affair (`Admission`). How
many replicas there are `autoscaling` decides, where the options leave it open; where there may be none, the ingress
holds a request until one is up.

A stream outlives its replica, since a token depends on prefix, parameters and seed alone: the ingress knows the tokens
that it passed on, and sends the request on as prompt + tokens. It does not outlive its ingress.
"""
