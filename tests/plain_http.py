"""httpx's functions for addresses without TLS: what it reads for that takes 50 ms of a core each time. They wait for a
busy server longer than httpx would."""

from functools import partial

import httpx

get = partial(httpx.get, verify=False, timeout=60)
post = partial(httpx.post, verify=False, timeout=60)
put = partial(httpx.put, verify=False, timeout=60)
stream = partial(httpx.stream, verify=False, timeout=60)
