"""The HTTP process. Any number of them may run: all that they know they can ask for again.

`api` has the routes. Around them `auth` lets in who has a key, and `outcomes` counts what clients get. `models` finds
who serves a name; `plans` makes of a body, in a thread, what an answer is made by; `streams` lets in as many answers as
may be under way, and brings their pieces, at a pace.
"""
