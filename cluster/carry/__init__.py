"""How a stream is carried over replicas, as an ingress sees it.

`directory` knows who is there. `handover` carries one request: it makes one attempt after the other (`attempts`), or a
second one while a replica is quiet. `channels` fetches what a replica has for all requests of this ingress by one call.
Each call names its route (`cluster.line.Route`), by which `routing`, Ray Serve's router, chooses a replica: `affinity`
has the rule, the prefix that a replica has computed already, and load.
"""
