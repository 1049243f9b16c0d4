"""Documents and the header of shards that tests store."""

from tidar_core.convert.shards import DataHeader, Document, content_key

HEADER = DataHeader(model="tiny", fingerprint="f" * 16, tokenizer="t" * 16, seed=0)


def document(job: int, length: int = 20) -> Document:
    tokens = tuple((job * 7 + i) % 500 for i in range(length))
    return Document(tokens, tuple(i >= 5 for i in range(length)), content_key(tokens), "chat", job)
