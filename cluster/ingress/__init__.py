"""The HTTP process. Any number of them may run: all that they know they can ask for again.

`api` has the routes. Around them `auth` lets in who has a key, and `outcomes` counts what clients get, for
metrics, traces and the log (`request_log`).

`answering` takes a request from its body to its answer. `models` finds who serves the name that it asks for. `plans`
turns the body into token ids and sampling parameters, in a thread. `streams` limits how many answers are under way, and
brings their pieces at a pace. `late` lets a stream begin before its first token, where that is late.
"""
