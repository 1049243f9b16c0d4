"""What an operator runs.

`deploy` is `tidar up`: a Ray cluster (`ray_cluster`), the applications on it, `haproxy` in front where Ray is our own,
and a clean end however it is interrupted (`interrupts`). `status` reads a running server over HTTP alone, `check` a
Serve config before a cluster gets it.
"""
