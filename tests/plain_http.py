"""httpx's functions for addresses without TLS: what it reads for that takes 50 ms of a core each time."""

from functools import partial

import httpx

get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
put = partial(httpx.put, verify=False)
stream = partial(httpx.stream, verify=False)
