"""What an answer may be made to follow: a JSON schema, any JSON object, a regular expression, a grammar, or tags.

    grammar.py        what a request carries
    schemas.py        which schemas can be kept in every answer
    compiling.py      compiles a grammar for a model's tokens
    patterns.py       the patterns in a schema, as patterns of how a string is written
    guarding.py       compiles in a process of its own, which may hang or crash

`tidar_core.engine.grammars` has them compiled and keeps them, `tidar_core.engine.constraint` follows one.
"""
